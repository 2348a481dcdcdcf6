"""UDA, Unsupervised Data Augmentation (Xie et al., NeurIPS 2020): consistency with sharpened predictions.

L = CE(w(x)) + lambda mean_u 1[max p(w(u)) >= beta] KL(softmax(z(w(u)) / T) || p(s(u)))

z are logits and p = softmax(z); w is a weak view, s a strong one (RandAugment and cutout). The confidence is
that of the prediction before it is sharpened, the mean is over all unlabeled rows, and nothing flows back
through the targets. With training signal annealing (TSA) labeled rows count only while the probability of
their class is at most eta(t) = 1/C + a(t) (1 - 1/C), where a(t) with t = step / steps is t (linear),
exp(5 (t - 1)) (exp, for few labels) or 1 - exp(-5 t) (log); CE is the mean over those that count.
Defaults are those for CIFAR-10: T 0.4, beta 0.8, lambda 1, no TSA, SGD with Nesterov momentum at 0.03.
The released code has 64 labeled and 320 unlabeled images per step.

Deviations: the rate falls by cos(7/16 pi t) instead of to zero, tests use a moving average of 0.999, and
RandAugment is that of FixMatch, all three as in the USB benchmark; the labeled batch is balanced over
classes. Where features alone are given, without views, w and s are the same and only sharpening is learned.
UDA has no detector: its confidence serves as the score of in-class images.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.core.records import Batch, Losses
from ropaws.methods.classifier import (
    Averaged,
    ClassifierMethod,
    hard_targets,
    kept_mean,
    kl_divergence,
    labeled_cross_entropy,
    masked_mean,
    weak_and_strong,
)
from ropaws.methods.method import check_positive, check_share, check_weight
from ropaws.pool.augment import AugmentConfig, View

Annealing = Literal["none", "linear", "exp", "log"]


def annealed_threshold(progress: float, classes: int, annealing: Annealing) -> float:
    """Probability of its class above which a labeled row is left out; progress from 0 to 1."""
    shares = {
        "none": 1.0,
        "linear": progress,
        "exp": math.exp(5 * (progress - 1)),
        "log": 1 - math.exp(-5 * progress),
    }
    return 1 / classes + shares[annealing] * (1 - 1 / classes)


def annealed_cross_entropy(logits: Tensor, classes: Tensor, threshold: float) -> Tensor:
    """Mean over the rows whose class is not more likely than the threshold.   logits (s, c), classes (s,)"""
    losses = F.cross_entropy(logits, classes, reduction="none")
    return kept_mean(losses, ((-losses).exp() <= threshold).to(losses.dtype).detach())


@dataclass(frozen=True, kw_only=True)
class UDA(ClassifierMethod):
    """Strong views learn the sharpened predictions of weak ones, where those are confident."""

    temperature: float = 0.4
    """Of the softmax that makes the targets; lower is sharper (T)."""
    confidence: float = 0.8
    """Probability from which a prediction is learned (beta)."""
    unlabeled_weight: float = 1.0
    """Weight of the unlabeled loss (lambda)."""
    annealing: Annealing = "none"
    """Leave out labeled rows above a probability that grows to 1 in this way: linear, exp, log, or none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "temperature")
        check_share(self, "confidence")
        check_weight(self, "unlabeled_weight")
        if self.annealing not in (known := get_args(Annealing)):
            raise ValueError(f"method.annealing must be one of {', '.join(known)}, got {self.annealing}")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        return weak_and_strong(augment)

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, Averaged)
        network = model.network
        features = network.features(batch.labeled.images, batch.views["weak"], batch.views["strong"])
        labeled, weak, strong = map(network.logits, features)
        known = self.labeled_loss(labeled, batch)
        mask = hard_targets(weak.softmax(dim=1), self.confidence).mask
        consistency = masked_mean(kl_divergence(weak / self.temperature, strong), mask)
        total = known + self.unlabeled_weight * consistency
        parts = {"cross_entropy": known.detach(), "consistency": consistency.detach()}
        return Losses(total, parts, mask)

    def labeled_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of the labeled rows, or of those that annealing leaves.   (s, c)  ->  ()"""
        if self.annealing == "none":
            return labeled_cross_entropy(logits, batch.labeled.classes)
        threshold = annealed_threshold(batch.step / batch.steps, logits.shape[1], self.annealing)
        return annealed_cross_entropy(logits, batch.labeled.classes, threshold)
