"""RealMix (Nair et al., arXiv 2019): MixMatch that leaves out the least confident part of each batch.

L = mean_x 1[any p_c(x) < eta y_c] H(y, p(x)) + lambda mean_u 1[max p(u) > quantile] mean_c (q_c - p_c(u))^2

x and u are mixed (MixUp): each row is averaged with another of the batch, its label y or guess q alike. The
guess of an unlabeled image is the mean prediction of two weak views, sharpened. Rows below the given quantile
of the confidence of the batch are taken as out-of-class, so their share must be guessed; both means are over
the rows that are kept. eta grows from 1 / C to 1 (training signal annealing): a labeled row counts while some
class of its mixed label is predicted with less than eta times its share.
Defaults are the paper's for half of the pool out-of-class: quantile 0.5, Beta(0.75), sharpening 0.5, linear
annealing, lambda 75 after a ramp over a 64th of the run, Adam at 0.002, average 0.999. 64 labeled and 64
unlabeled images per step.

Deviations: all mixed rows go through the network as one batch, instead of three interleaved ones; the
released code compares p with eta times the logits, where its comments say the labels, as it is here; weight
decay is Adam's, not apart from it; the labeled images are not augmented fifty times in advance. Processes
exchange their images, so that a row may be mixed with any other. On known features it is these that are
mixed. Confidence serves as the score of in-class images.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.core.distributed import gather_constants, share
from ropaws.core.records import Batch, Losses, Support
from ropaws.methods.classifier import (
    Averaged,
    ClassifierMethod,
    Network,
    kept_mean,
    kept_norm_statistics,
    linear_ramp,
    row_mean,
    sharpened,
    soft_cross_entropy,
)
from ropaws.methods.method import check_positive, check_share, check_weight
from ropaws.methods.uda import Annealing, annealed_threshold
from ropaws.pool.augment import AugmentConfig, View
from ropaws.pool.rand_augment import WeakView


class MixedBatch(NamedTuple):
    """This process's share of a mixed batch; images may be features (n, d)."""

    labeled: Tensor  # (s, channels, size, size)
    labels: Tensor  # (s, c) rows sum to 1
    unlabeled: tuple[Tensor, ...]  # each (u, channels, size, size)
    guesses: tuple[Tensor, ...]  # each (u, c)


class Draw(NamedTuple):
    """Partners and shares of the rows of a batch."""

    partners: Tensor  # (n,)
    shares: Tensor  # (n,) of the row itself, from 0.5 to 1


def mixup_draw(rows: int, seed: int, alpha: float) -> Draw:
    """A permutation, and max(b, 1 - b) with b of Beta(alpha, alpha), for each row."""
    random = np.random.default_rng(seed)
    shares = random.beta(alpha, alpha, rows)
    return Draw(torch.from_numpy(random.permutation(rows)), torch.from_numpy(np.maximum(shares, 1 - shares)))


def mix(values: Tensor, draw: Draw) -> Tensor:
    """share * row + (1 - share) * its partner.   (n, ...)"""
    own = draw.shares.to(values.dtype).to(values.device).view(-1, *[1] * (values.ndim - 1))
    return own * values + (1 - own) * values[draw.partners.to(values.device)]


def steady_order(images: Tensor, identity: Tensor) -> Tensor:
    """An order of labeled rows that is the same however they were shared out.   (s, ...), (s,)  ->  (s,)

    By image, then by what a view looks like: a sum in which every pixel has its own weight.
    """
    flat = images.flatten(1)
    looks = (flat * torch.linspace(1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device)).sum(dim=1)
    order = looks.argsort(stable=True)
    return order[identity[order].argsort(stable=True)]


def mixed_batch(
    labeled: Support, views: tuple[Tensor, ...], guess: Tensor, *, seed: int, alpha: float
) -> MixedBatch:
    """Mix labeled rows and all views of unlabeled ones with each other.

    views: each (u, ...), guess (u, c): the label of row u in every view
    """
    images, classes, identity = map(gather_constants, (labeled.images, labeled.classes, labeled.identity))
    order = steady_order(images, identity)
    all_views, guesses = [gather_constants(view) for view in views], gather_constants(guess)
    counts = [len(images), *(len(view) for view in all_views)]
    one_hot = F.one_hot(classes[order], guess.shape[1]).to(guess)
    draw = mixup_draw(sum(counts), seed, alpha)
    pixels = mix(torch.cat([images[order], *all_views]), draw).split(counts)
    labels = mix(torch.cat([one_hot, *[guesses] * len(views)]), draw).split(counts)
    mine = [share(count) for count in counts]
    own_pixels, own_labels = ([p[m] for p, m in zip(parts, mine, strict=True)] for parts in (pixels, labels))
    return MixedBatch(own_pixels[0], own_labels[0], tuple(own_pixels[1:]), tuple(own_labels[1:]))


def annealing_mask(probs: Tensor, labels: Tensor, threshold: float) -> Tensor:
    """1.0 for rows with a class that is predicted below threshold * label.   both (s, c)  ->  (s,)"""
    return (probs < threshold * labels).any(dim=1).to(probs)


def confidence_mask(confidence: Tensor, quantile: float) -> Tensor:
    """1.0 for rows above the quantile of the rows of all processes; for all with a quantile of 0.   (n,)"""
    if quantile == 0:
        return torch.ones_like(confidence)
    everyone = gather_constants(confidence).sort().values
    return (confidence > everyone[int(quantile * len(everyone))]).to(confidence)


@dataclass(frozen=True, kw_only=True)
class RealMix(ClassifierMethod):
    """MixUp of labels and guesses; the least confident unlabeled rows of each batch are left out."""

    outliers: float = 0.5
    """Share of each unlabeled batch that is left out: the guessed share of out-of-class images."""
    unlabeled_weight: float = 75.0
    """Weight of the unlabeled loss after the ramp (lambda)."""
    ramp: float = 1 / 64
    """Share of the run in which that weight grows linearly."""
    mixup: float = 0.75
    """Both parameters of the Beta distribution that MixUp draws from."""
    temperature: float = 0.5
    """Of the guesses; lower is sharper."""
    annealing: Annealing = "linear"
    """Leave out labeled rows that are learned already, below a threshold that grows to 1."""

    optim: ClassVar[Mapping[str, Any]] = {"name": "adam", "peak": 0.002, "weight_decay": 4e-5}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "outliers", "ramp")
        check_weight(self, "unlabeled_weight")
        check_positive(self, "mixup", "temperature")
        if self.annealing not in (known := get_args(Annealing)):
            raise ValueError(f"method.annealing must be one of {', '.join(known)}, got {self.annealing}")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        weak = WeakView(size=augment.size)
        return {"weak1": weak, "weak2": weak}

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, Averaged)
        network, views = model.network, (batch.views["weak1"], batch.views["weak2"])
        guess = self.guess(network, views)
        mixed = mixed_batch(batch.labeled, views, guess, seed=batch.seed, alpha=self.mixup)
        labeled, *unlabeled = map(network.logits, network.features(mixed.labeled, *mixed.unlabeled))
        known = self.labeled_loss(labeled, mixed.labels, batch)
        probs = torch.cat(unlabeled).softmax(dim=1)
        kept = confidence_mask(probs.detach().amax(dim=1), self.outliers)
        distance = kept_mean((probs - torch.cat(mixed.guesses)).square().mean(dim=1), kept)
        weight = self.unlabeled_weight * linear_ramp(batch.step, self.ramp * batch.steps)
        parts = {"cross_entropy": known.detach(), "consistency": distance.detach()}
        return Losses(known + weight * distance, parts, kept.view(len(views), -1).mean(dim=0))

    @torch.no_grad()
    def guess(self, network: Network, views: tuple[Tensor, ...]) -> Tensor:
        """Sharpened mean prediction of the views.   each (u, ...)  ->  (u, c)"""
        with kept_norm_statistics(network):  # those of the mixed rows are kept, as in MixMatch
            probs = torch.stack([network.logits(view).softmax(1) for view in network.features(*views)])
        return sharpened(probs.mean(dim=0).log(), self.temperature)

    def labeled_loss(self, logits: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy with mixed labels, of the rows that annealing leaves.   both (s, c)  ->  ()"""
        losses = soft_cross_entropy(labels, logits)
        if self.annealing == "none":
            return row_mean(losses)
        threshold = annealed_threshold(batch.step / batch.steps, logits.shape[1], self.annealing)
        return kept_mean(losses, annealing_mask(logits.detach().softmax(dim=1), labels, threshold))
