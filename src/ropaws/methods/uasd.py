"""UASD, Uncertainty-Aware Self-Distillation (Chen et al., AAAI 2020): images teach their own averaged selves.

L = CE(w(x)) + a(t) mean_{i in x, u: max q_i >= gamma} H(q_i, p(w(i)))

q_i is the mean of all that the network has said of image i in earlier steps, and H uses it as a soft target.
The mean is over the rows of the batch, labeled and unlabeled, whose averaged prediction is as confident as
images of the known classes are: gamma is the mean of max q over such images, and 0.9 before any was seen.
An image that the network has not seen yet is not learned.
Defaults follow the released code: Adam at 0.001, no unlabeled loss in the first 20 % of the steps, and
a(t) = exp(-5 (1 - t / 0.4)^2) over the first 40 %; as many unlabeled as labeled images per step.

Deviations: the paper takes gamma from a labeled validation set; there is none here, so gamma is that of the
labeled images themselves, which the network knows better, and is stricter. The steps of the ramps are shares
of the run (100,000 and 200,000 of 500,000); the rate falls along half a cosine instead of once by a factor of
5 at 80 %; views are those of FixMatch, without noise; tests use a moving average of the weights.
The confidence of the network serves as the score of in-class images, also of new ones, which have no q.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ropaws.core.distributed import gather_constants
from ropaws.core.records import Batch, Losses
from ropaws.embedding.backbones import Encoder
from ropaws.methods.classifier import (
    Averaged,
    ClassifierMethod,
    Network,
    gaussian_ramp,
    kept_mean,
    labeled_cross_entropy,
    soft_cross_entropy,
)
from ropaws.methods.method import check_share, check_weight
from ropaws.pool.augment import AugmentConfig, View
from ropaws.pool.rand_augment import WeakView
from ropaws.training.loaders import PoolPass

FIRST_THRESHOLD = 0.9  # before any labeled image was seen


def mean_predictions(sums: Tensor) -> Tensor:
    """Means of summed predictions, which sum to 1 each; zeros where there is none.   (n, c)  ->  (n, c)"""
    return sums / sums.sum(dim=1, keepdim=True).clamp_min(1)


def known_confidence(sums: Tensor) -> Tensor:
    """Mean confidence of the averaged predictions of labeled images that were seen.   (l, c)  ->  ()"""
    seen = sums[sums.sum(dim=1) > 0]
    return mean_predictions(seen).amax(dim=1).mean() if len(seen) else sums.new_tensor(FIRST_THRESHOLD)


class MemoryModel(Averaged):
    """A network, its moving average, and the sum of all that the network has said of each training image."""

    sums: Tensor
    labeled_rows: Tensor

    def __init__(self, network: Network, decay: float, *, classes: int, pool: int) -> None:
        super().__init__(network, decay)
        self.register_buffer("sums", torch.zeros(pool, classes))
        # (pool,) position of each labeled image among the training images; beyond the last one for no image,
        # so that a step before the first epoch is an error.
        self.register_buffer("labeled_rows", torch.full((pool,), pool))

    def threshold(self) -> Tensor:
        """Confidence from which an averaged prediction is learned.   ->  ()"""
        return known_confidence(self.sums[self.labeled_rows[self.labeled_rows < len(self.sums)]])

    @torch.no_grad()
    def remember(self, rows: Tensor, probs: Tensor) -> None:
        """Add predictions of all processes.   rows (n,) of the training images, probs (n, c)"""
        rows, probs = gather_constants(rows), gather_constants(probs).to(self.sums.dtype)
        self.sums.index_put_((rows,), probs, accumulate=True)


@dataclass(frozen=True, kw_only=True)
class UASD(ClassifierMethod):
    """Images learn the average of their earlier predictions, if it is as confident as for labeled images."""

    unlabeled_weight: float = 1.0
    """Weight of the loss against averaged predictions once it has grown."""
    begin: float = 0.2
    """Share of the steps before that loss begins."""
    ramp: float = 0.4
    """Share of the steps, from the first one, over which its weight grows."""

    optim: ClassVar[Mapping[str, Any]] = {"name": "adam", "peak": 1e-3, "weight_decay": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "begin", "ramp")
        check_weight(self, "unlabeled_weight")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        return {"weak": WeakView(size=augment.size)}

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        network = Network(encoder, self.heads(encoder.trained_dims, classes))
        return MemoryModel(network, self.ema, classes=classes, pool=pool)

    def before_epoch(self, model: nn.Module, pool: PoolPass) -> None:
        """Which training images are labeled; the batch numbers them among themselves."""
        assert isinstance(model, MemoryModel)
        labeled = pool.data.labeled_indices
        model.labeled_rows[: len(labeled)] = labeled.to(model.labeled_rows.device)

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, MemoryModel)
        network, count = model.network, len(batch.labeled.classes)
        logits = network.logits(network(torch.cat([batch.labeled.images, batch.views["weak"]])))
        known = labeled_cross_entropy(logits[:count], batch.labeled.classes)
        rows = torch.cat([model.labeled_rows[batch.labeled.identity], batch.pool_index])
        targets = mean_predictions(model.sums[rows])
        mask = (targets.amax(dim=1) >= (threshold := model.threshold())).to(logits.dtype)
        learned = kept_mean(soft_cross_entropy(targets, logits), mask)
        model.remember(rows, logits.softmax(dim=1))
        weight = self.weight_at(batch)
        parts = {"cross_entropy": known.detach(), "self_distillation": learned.detach(), "gamma": threshold}
        return Losses(known + weight * learned, parts, mask[count:] * float(weight > 0))

    def weight_at(self, batch: Batch) -> float:
        """Weight of the loss against averaged predictions at this step."""
        if batch.step < self.begin * batch.steps:
            return 0.0
        return self.unlabeled_weight * gaussian_ramp(batch.step, self.ramp * batch.steps)
