"""FixMatch (Sohn et al., NeurIPS 2020): consistency with confident pseudo-labels.

L = CE(w(x)) + lambda_u mean_u 1[max p(w(u)) >= tau] H(argmax p(w(u)), p(s(u)))

w is a weak view (flip, shifted crop), s a strong one (RandAugment and cutout); the mean is over all unlabeled
rows, and nothing flows back through the pseudo-labels. All views go through the network as one batch.
Defaults are the paper's: tau 0.95, lambda_u 1, SGD with Nesterov momentum at 0.03, cos(7/16 pi t), tested
with a moving average of 0.999. The paper has 64 labeled and 448 unlabeled images per step.

Deviations: RandAugment is that of the widely used PyTorch code, with three operations of any strength; the
labeled batch is balanced over classes; the average warms up (methods/classifier.py). CTAugment is not here.
FixMatch has no detector: its confidence serves as the score of in-class images.
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
    labeled_cross_entropy,
    masked_mean,
    weak_and_strong,
)
from ropaws.methods.method import check_share, check_weight
from ropaws.pool.augment import AugmentConfig, View


@dataclass(frozen=True, kw_only=True)
class FixMatch(ClassifierMethod):
    """Strong views learn the confident pseudo-labels of weak ones."""

    confidence: float = 0.95
    """Probability from which a pseudo-label is learned (tau)."""
    unlabeled_weight: float = 1.0
    """Weight of the unlabeled loss (lambda_u)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "confidence")
        check_weight(self, "unlabeled_weight")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        return weak_and_strong(augment)

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, Averaged)
        network = model.network
        features = network.features(batch.labeled.images, batch.views["weak"], batch.views["strong"])
        labeled, weak, strong = map(network.logits, features)
        known = labeled_cross_entropy(labeled, batch.labeled.classes)
        targets = hard_targets(weak.softmax(dim=1), self.confidence)
        pseudo = masked_mean(F.cross_entropy(strong, targets.classes, reduction="none"), targets.mask)
        total = known + self.unlabeled_weight * pseudo
        parts = {"cross_entropy": known.detach(), "pseudo_label": pseudo.detach()}
        return Losses(total, parts, targets.mask)
