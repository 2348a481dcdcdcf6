"""Pseudo-label (Lee, ICML workshop 2013), with a confidence threshold: a network learns its own classes.

L = CE(w(x)) + lambda a(t) mean_u 1[max p(w(u)) >= tau] H(argmax p(w(u)), p(w(u)))

One weak view (flip, shifted crop) makes the pseudo-label and learns it; the mean is over all unlabeled rows,
and nothing flows back through the pseudo-labels. a(t) grows from 0 to 1 over the first 40 % of the steps.
Labeled and unlabeled images go through the network one after the other: each batch is normalized by its own
statistics, and those of the labeled batch alone are remembered for tests.
Defaults are those of the USB benchmark: tau 0.95, lambda 1, SGD with Nesterov momentum at 0.03,
cos(7/16 pi t), a moving average of 0.999, as many unlabeled as labeled images per step.

Deviations: Lee has no threshold (`--method.confidence 0`), a weight that grows up to 3, and denoising
auto-encoders to start from; the labeled batch is balanced over classes; the average warms up
(methods/classifier.py). There is no detector: the confidence serves as the score of in-class images.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from ropaws.core.records import Batch, Losses
from ropaws.methods.classifier import (
    Averaged,
    ClassifierMethod,
    hard_targets,
    kept_norm_statistics,
    labeled_cross_entropy,
    linear_ramp,
    masked_mean,
)
from ropaws.methods.method import check_share, check_weight
from ropaws.pool.augment import AugmentConfig, View
from ropaws.pool.rand_augment import WeakView


@dataclass(frozen=True, kw_only=True)
class PseudoLabel(ClassifierMethod):
    """Weak views learn their own confident classes, with a weight that grows."""

    confidence: float = 0.95
    """Probability from which a pseudo-label is learned (tau)."""
    unlabeled_weight: float = 1.0
    """Weight of the unlabeled loss once it has grown (lambda)."""
    ramp: float = 0.4
    """Share of the steps over which the weight of the unlabeled loss grows from 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "confidence", "ramp")
        check_weight(self, "unlabeled_weight")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        return {"weak": WeakView(size=augment.size)}

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, Averaged)
        network = model.network
        known = labeled_cross_entropy(network.logits(network(batch.labeled.images)), batch.labeled.classes)
        with kept_norm_statistics(network):
            weak = network.logits(network(batch.views["weak"]))
        targets = hard_targets(weak.softmax(dim=1), self.confidence)
        pseudo = masked_mean(F.cross_entropy(weak, targets.classes, reduction="none"), targets.mask)
        weight = self.unlabeled_weight * linear_ramp(batch.step, self.ramp * batch.steps)
        parts = {"cross_entropy": known.detach(), "pseudo_label": pseudo.detach()}
        return Losses(known + weight * pseudo, parts, targets.mask)
