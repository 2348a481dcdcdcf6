"""What the methods do with a labelled batch before the equations."""

from typing import NamedTuple

import torch
from torch import Tensor

from ropaws import equations as eq
from ropaws.batch import Embeddings, Support
from ropaws.distributed import all_gather, all_sum, gather_constants, place


def smooth(labels: Tensor, amount: float) -> Tensor:
    """Label smoothing: one-hot rows (s, c) give that share of their mass to all classes evenly."""
    return labels * (1 - amount) + amount / labels.shape[1]


class GlobalSupport(NamedTuple):
    """The supports of all processes."""

    z: Tensor  # (s, d) with gradient: the anchor side
    h: Tensor  # (s, d) constants: the target side
    labels: Tensor  # (s, c) smoothed
    labelled: Support  # labels and identities as they were given; no images


def gather_support(embedded: Embeddings, support: Support, smoothing: float) -> GlobalSupport:
    """The labels travel with the embeddings, whatever part of the classes a process has."""
    labels, identity = gather_constants(support.labels), gather_constants(support.identity)
    return GlobalSupport(
        all_gather(embedded.z),
        gather_constants(embedded.h),
        smooth(labels, smoothing),
        Support(support.images[:0], labels, identity),
    )


def global_mean(anchors: Tensor, weights: Tensor | None, sharpen_temperature: float) -> Tensor | None:
    """p-bar over the samples of all processes; None in a single one, where the loss takes its own."""
    if place().size == 1:
        return None
    total, weight = eq.prediction_sum(anchors, weights, sharpen_temperature=sharpen_temperature)
    return all_sum(total) / all_sum(weight).clamp_min(eq.TINY)


def anchor_predictions(
    views: list[Embeddings], support: Tensor, labels: Tensor, temperature: float
) -> Tensor:
    """Soft nearest-neighbour predictions of all views, with gradient.   ->  (v, u, c)"""
    z = torch.cat([view.z for view in views])
    probs = eq.soft_nn(z, support, labels, temperature=temperature)
    return probs.view(len(views), -1, labels.shape[1])


def may_vote(support: Support) -> Tensor:
    """Which support may speak for which: not the views of the same image.

    Only where a batch has no other image of the class may the other views of the image.
    ->  (s, s) bool, a row for each support that is spoken for
    """
    same_image = support.identity[:, None] == support.identity
    same_class = support.labels @ support.labels.T > 0
    alone = ~(same_class & ~same_image).any(dim=1, keepdim=True)
    itself = torch.eye(len(support.identity), dtype=torch.bool, device=same_image.device)
    return ~torch.where(alone, itself, same_image)


def nearest_gap(embeddings: Tensor, support: Support) -> Tensor:
    """Mean distance 1 - cos of a support to the nearest other image of its class (leave-one-out).

    embeddings (s, d)  ->  (); NaN where no support has another one of its class
    """
    candidates = may_vote(support) & (support.labels @ support.labels.T > 0)
    nearest = eq.cosine(embeddings, embeddings).masked_fill(~candidates, -torch.inf).amax(dim=1)
    return (1 - nearest[nearest.isfinite()]).mean()
