"""CCSSL (Yang et al., CVPR 2022) on FixMatch: contrast between pseudo-classes, as far as they are sure.

L = L_FixMatch + lambda_c mean_i (sum_{j != i} W_ij l_ij / sum_{j != i} W_ij)
l_ij = -log(exp(z_i z_j / T) / sum_{k != i} exp(z_i z_k / T))

i, j and k run over two views of all unlabeled images: the strong one of FixMatch and one as in SimCLR, both
projected to unit vectors z. W_ij = c_i c_j if both images have the same pseudo-label, else 0, where c is the
confidence in the weak view; two views of one image have W = 1. With `push` (the paper's T_push) an image
below that confidence is drawn to its own other view alone, as in instance discrimination: it may be
out-of-class. Defaults are the paper's for CIFAR-10: tau 0.95, lambda_u 1, lambda_c 1, T 0.07, no push,
weight decay 0.001, 64 labeled and 448 unlabeled images per step, else as in FixMatch. For Semi-iNat it has
tau 0.6, push 0.9, lambda_c 2.

Deviations: those of fixmatch.py. W = 1 between two views of one image is the paper's equation; the published
code has c_i c_i there. The view of SimCLR is normalized like all others, which the published settings leave
out. Confidences are not aligned with a uniform distribution, which the paper has as an option.
With a frozen backbone the third view is one of those that the cache keeps, like the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.core.distributed import all_gather, gather_constants, share
from ropaws.core.records import Batch, Losses
from ropaws.methods.classifier import (
    FIXMATCH_OPTIM,
    Averaged,
    hard_targets,
    labeled_cross_entropy,
    masked_mean,
)
from ropaws.methods.fixmatch import FixMatch
from ropaws.methods.method import check_positive, check_share, check_weight
from ropaws.pool.augment import AugmentConfig, View

PROJECTED = 64  # dimensions


def positive_weights(classes: Tensor, confidence: Tensor, *, push: float) -> Tensor:
    """How much two images are to be drawn together.

    W_ij = c_i c_j where y_i = y_j and both c reach push, else 0; W_ii = 1
    classes y (n,), confidence c (n,)  ->  (n, n)
    """
    foreground = confidence * (confidence >= push)
    weights = torch.outer(foreground, foreground) * (classes[:, None] == classes)
    return weights.fill_diagonal_(1)


def contrastive_loss(
    anchors: Tensor, rows: Tensor, weights: Tensor, own: Tensor, *, temperature: float
) -> Tensor:
    """Contrast of each anchor with all rows but itself, with weighted positives.

    -sum_j W_ij log softmax_j(z_i z_j / T) / sum_j W_ij
    anchors (a, d), rows (n, d), weights W (a, n), own (a,) where an anchor is among the rows  ->  (a,)
    """
    itself = F.one_hot(own, len(rows)).bool()
    logits = (anchors @ rows.T / temperature).masked_fill(itself, -torch.inf)
    log_probs = logits.log_softmax(dim=1).masked_fill(itself, 0)
    weights = weights.masked_fill(itself, 0)
    return -(weights * log_probs).sum(dim=1) / weights.sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class CCSSL(FixMatch):
    """FixMatch, and a contrastive loss whose positives are pseudo-classes weighted by confidence."""

    contrast_weight: float = 1.0
    """Weight of the contrastive loss (lambda_c)."""
    temperature: float = 0.07
    """Of the contrastive loss (T)."""
    push: float = 0.0
    """Confidence below which an image is drawn to its own other view alone; 0: none is."""

    optim: ClassVar[Mapping[str, Any]] = {**FIXMATCH_OPTIM, "weight_decay": 1e-3}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weight(self, "contrast_weight")
        check_positive(self, "temperature")
        check_share(self, "push")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        simclr = AugmentConfig(
            size=augment.size,
            scale=(0.08, 1.0),
            grayscale=0.2,
            solarize=0.0,
            equalize=0.0,
            interpolation=augment.interpolation,
        )
        return {**super().views(augment), "contrast": simclr}

    def heads(self, dims: int, classes: int) -> dict[str, nn.Module]:
        projection = nn.Sequential(nn.Linear(dims, dims), nn.ReLU(), nn.Linear(dims, PROJECTED))
        return super().heads(dims, classes) | {"projection": projection}

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, Averaged)
        network = model.network
        views = (batch.views[role] for role in ("weak", "strong", "contrast"))
        labeled, weak, strong, other = network.features(batch.labeled.images, *views)
        known = labeled_cross_entropy(network.logits(labeled), batch.labeled.classes)
        probs = network.logits(weak).softmax(dim=1)
        targets = hard_targets(probs, self.confidence)
        wrong = F.cross_entropy(network.logits(strong), targets.classes, reduction="none")
        pseudo = masked_mean(wrong, targets.mask)
        projected = [F.normalize(network.heads["projection"](part), dim=1) for part in (strong, other)]
        contrast = self.contrast(projected, targets.classes, probs.amax(dim=1))
        total = known + self.unlabeled_weight * pseudo + self.contrast_weight * contrast
        parts = {
            "cross_entropy": known.detach(),
            "pseudo_label": pseudo.detach(),
            "contrast": contrast.detach(),
        }
        return Losses(total, parts, targets.mask)

    def contrast(self, views: list[Tensor], classes: Tensor, confidence: Tensor) -> Tensor:
        """Contrast of this process's rows with all.   views (u, d), classes (u,), confidence (u,)  ->  ()"""
        everyone = [all_gather(view) for view in views]
        count = len(everyone[0])
        own = torch.arange(count, device=classes.device)[share(count)]
        weights = positive_weights(gather_constants(classes), gather_constants(confidence), push=self.push)
        return contrastive_loss(
            torch.cat(views),
            torch.cat(everyone),
            weights[own].repeat(2, 2),
            torch.cat([own, own + count]),
            temperature=self.temperature,
        ).mean()
