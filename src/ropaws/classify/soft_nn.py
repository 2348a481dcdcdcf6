"""What PAWS-like methods share: labeled batch, soft nearest-neighbor classifier, in-domain score."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws import equations as eq
from ropaws.core.distributed import all_gather_with, all_sum, place
from ropaws.core.records import Embeddings, Support


def in_blocks(rows: Tensor, size: int) -> Sequence[Tensor]:
    """Parts of at most so many rows.

    All rows in one while a model is exported (run/export_graph.py): how many they are is then a symbol,
    and a graph cannot have a number of parts that depends on it.
    """
    if isinstance(rows.shape[0], torch.SymInt):
        return [rows]
    parts: Sequence[Tensor] = rows.split(size)
    return parts


KEPT = 0.95  # share of the labeled points that the threshold takes for in-class
MEMORY = 0.95  # of a guessed class prior, from one step to the next
TYPICAL_PRIOR = 0.7  # prior that a labeled point gets from the nearest one of its class, by default
# Embeddings of a class may shrink to a point; the prior must not become a step function.
LEAST_PRIOR_TEMPERATURE = 0.01
GAP_MOMENTUM = 0.9  # of the running distance between supports of one class
BLOCK = 4096  # rows that are compared with all labeled points at a time
BLOCK_BYTES = 1 << 27
TEMPERATURES = (0.01, 0.02, 0.05, 0.07, 0.1, 0.2, 0.5)  # to choose from
AS_GOOD = 0.02  # difference of mean log likelihood that does not count
JUDGES = 4096  # labeled rows that choose, at most


# Training: the labeled batch before the equations


def smooth(labels: Tensor, amount: float) -> Tensor:
    """Label smoothing: one-hot rows (s, c) give that share of their mass to all classes evenly."""
    return labels * (1 - amount) + amount / labels.shape[1]


class GlobalSupport(NamedTuple):
    """The supports of all processes."""

    z: Tensor  # (s, d) with gradient: the anchor side
    h: Tensor  # (s, d) constants: the target side
    labels: Tensor  # (s, c) smoothed
    labeled: Support  # labels and identities as they were given; no images


def gather_support(embedded: Embeddings, support: Support, smoothing: float) -> GlobalSupport:
    """The labels travel with the embeddings, whatever part of the classes a process has."""
    z, h, labels, identity, classes = all_gather_with(
        embedded.z, embedded.h, support.labels, support.identity, support.classes
    )
    known = Support(support.images[:0], labels, identity, classes)
    return GlobalSupport(z, h, smooth(labels, smoothing), known)


def global_mean(anchors: Tensor, weights: Tensor | None, sharpen_temperature: float) -> Tensor | None:
    """p-bar over the samples of all processes; None in a single one, where the loss takes its own."""
    if place().size == 1:
        return None
    total, weight = eq.prediction_sum(anchors, weights, sharpen_temperature=sharpen_temperature)
    together = all_sum(torch.cat([total, weight[None]]))
    return together[:-1] / together[-1].clamp_min(eq.TINY)


def batch_class_prior(class_prior: Tensor | None, support: Support) -> Tensor | None:
    """Frequencies of a batch's classes, in the order of its columns.   (all classes,)  ->  (c,) sums to 1"""
    if class_prior is None:
        return None
    found = class_prior.to(support.labels)[batch_classes(support)]
    return found / found.sum()


def batch_classes(support: Support) -> Tensor:
    """Number of the class of each column of the labels.   ->  (c,)"""
    return support.classes[support.labels.argmax(dim=0)]


def followed(class_prior: Tensor, mean: Tensor, support: Support) -> Tensor:
    """Frequencies one step closer to the mean prediction: a running mean that starts as the guess.

    me-max then keeps predictions from running away, and does not force them to be what the guess says.
    class_prior (all classes,), mean (c,) of the classes in the batch  ->  (all classes,)
    """
    here = batch_classes(support)
    before = class_prior[here]
    return class_prior.index_put((here,), torch.lerp(before, before.sum() * mean, 1 - MEMORY))


def anchor_predictions(
    views: list[Embeddings], support: Tensor, labels: Tensor, temperature: float
) -> Tensor:
    """Soft nearest-neighbor predictions of all views, with gradient.   ->  (v, u, c)"""
    z = torch.cat([view.z for view in views])
    probs = eq.soft_nn(z, support, labels, temperature=temperature)
    return probs.view(len(views), -1, labels.shape[1])


def may_vote(support: Support) -> Tensor:
    """Which support may vote for which: not the views of the same image.

    Only where a batch has no other image of the class may the other views of the image.
    ->  (s, s) bool, one row for each support that is predicted
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


def update_running_gap(average: Tensor, gap: Tensor) -> None:
    """Exponential moving average, in place; the first value counts in full, a missing one not at all."""
    gap = gap.to(average.dtype)
    smoothed = torch.where(average.isfinite(), torch.lerp(gap, average, GAP_MOMENTUM), gap)
    average.copy_(torch.where(gap.isfinite(), smoothed, average))


# Testing: all labeled images are the support


@dataclass(frozen=True, eq=False)
class LabeledEmbeddings:
    """The labeled images of a run as its network sees them."""

    embeddings: Tensor  # (l, d) unit rows
    labels: Tensor  # (l,) class
    classes: int

    @cached_property
    def one_hot(self) -> Tensor:
        """Labels as rows.   (l, c)"""
        return F.one_hot(self.labels, self.classes).to(self.embeddings.dtype)

    @cached_property
    def nearest_same_class(self) -> Tensor:
        """Similarity of each labeled point to the nearest other one of its class; lone ones are left out."""
        return nearest_same_class(self.embeddings, self.labels)


def class_probabilities(queries: Tensor, support: LabeledEmbeddings, *, temperature: float) -> Tensor:
    """Soft nearest-neighbor probabilities in blocks.   (n, d)  ->  (n, c)

    Where some classes have more labels than others, each class's density is the mean over its own labels,
    Eq. (4) and (5), as in training, where every support batch is balanced: a class is not more likely
    because it was labeled more often.
    """
    if queries.shape[0] == 0:
        return queries.new_empty(0, support.classes)
    blocks = [
        eq.soft_nn(part, support.embeddings, support.one_hot, temperature=temperature)
        for part in in_blocks(queries, BLOCK)
    ]
    probs = torch.cat(blocks)
    counts = torch.bincount(support.labels, minlength=support.classes)
    if (counts == counts[0]).all():
        return probs
    densities = probs / counts.clamp_min(1).to(probs)
    return densities / densities.sum(dim=1, keepdim=True).clamp_min(eq.TINY)


def leave_one_out(support: LabeledEmbeddings, *, temperature: float) -> Tensor:
    """Soft nearest-neighbor probabilities of each labeled point, from all the others.

    ->  (l, c), rows sum to 1; needs two points
    """
    points = support.embeddings
    if len(points) < 2:
        raise ValueError(f"leaving one out needs at least 2 labeled points, got {len(points)}")
    parts = []
    for rows in torch.arange(len(points)).split(max(1, BLOCK_BYTES // (4 * len(points)))):
        kernel = eq.cosine(points[rows], points) / temperature
        kernel[torch.arange(len(rows)), rows] = -torch.inf
        parts.append(kernel.softmax(dim=1) @ support.one_hot)
    return torch.cat(parts)


def likeliest_temperature(support: LabeledEmbeddings) -> float:
    """The temperature at which labeled points best predict one another; 0.1 where no class has two."""
    labels = support.labels
    rows = (torch.bincount(labels)[labels] > 1).nonzero().squeeze(1)[:JUDGES]
    if len(rows) < 2:
        return 0.1
    labels = labels[rows]
    judges = LabeledEmbeddings(support.embeddings[rows], labels, support.classes)

    def log_likelihood(temperature: float) -> float:
        probs = leave_one_out(judges, temperature=temperature)
        return float(probs.gather(1, labels[:, None]).clamp_min(1e-6).log().mean())

    found = {temperature: log_likelihood(temperature) for temperature in TEMPERATURES}
    # Among those that do as well the widest kernel, which hears of more neighbors.
    return max(t for t, value in found.items() if value >= max(found.values()) - AS_GOOD)


def max_similarity(queries: Tensor, support: Tensor) -> Tensor:
    """s(x) = max_l z . z_l; low means out-of-class.   queries (n, d), support (s, d)  ->  (n,)"""
    if queries.shape[0] == 0:
        return queries.new_empty(0)
    return torch.cat([eq.cosine(part, support).amax(dim=1) for part in in_blocks(queries, BLOCK)])


# In-domain probability: the prior of Eq. (13), with a temperature and a threshold from the labels


def nearest_same_class(points: Tensor, labels: Tensor) -> Tensor:
    """Similarity of each labeled point to the nearest other one of its class; lone ones are left out.

    points (s, d), labels (s,)  ->  (at most s,)
    """
    found = []
    for rows in torch.arange(len(points)).split(BLOCK):
        same = labels[rows, None] == labels
        same[torch.arange(len(rows)), rows] = False
        found.append(eq.cosine(points[rows], points).masked_fill(~same, -math.inf).amax(dim=1))
    nearest = torch.cat(found)
    return nearest[nearest.isfinite()]


def auto_prior_temperature(gap: float, typical_prior: float) -> float:
    """Solve exp(-gap / t) = typical_prior for t; t = 0.1, the paper's, while no gap is known."""
    if not math.isfinite(gap):
        return 0.1
    return max(LEAST_PRIOR_TEMPERATURE, gap / -math.log(typical_prior))


def fitted_prior_temperature(nearest: Tensor, typical_prior: float) -> float:
    """The temperature at which labeled points get the typical prior from one another on average.

    nearest: of nearest_same_class
    """
    gap = float((1 - nearest).mean()) if len(nearest) else math.nan
    return auto_prior_temperature(gap, typical_prior)


def default_threshold(nearest: Tensor, prior_temperature: float) -> float:
    """The in-domain probability that 95 % of the labeled points reach, each judged by the others."""
    priors = ((nearest - 1).clamp_max(0) / prior_temperature).exp()
    return kept_quantile(priors)


def kept_quantile(in_domain: Tensor) -> float:
    """The value that 95 % of in-class points reach; 0.5 where none is known."""
    return float(in_domain.quantile(1 - KEPT)) if len(in_domain) else 0.5


def in_domain_scores(queries: Tensor, support: Tensor, prior_temperature: float) -> Tensor:
    """Probability of belonging to any class, in blocks.   queries (n, d), support (s, d)  ->  (n,)"""
    if queries.shape[0] == 0:
        return queries.new_empty(0)
    parts = [
        eq.in_domain_prior(part, support, temperature=prior_temperature) for part in in_blocks(queries, BLOCK)
    ]
    return torch.cat(parts)
