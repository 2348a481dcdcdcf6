"""IOMatch (Li et al., ICCV 2023): inliers and outliers are learned together, as c + 1 classes.

L = CE(phi(w(x))) + lambda_mb L_mb(chi(w(x))) + lambda_u L_ui + lambda_op L_op
L_ui = mean_u 1[max p >= tau_p] 1[q_{c+1} < 0.5] H(p, phi(s(u)))
L_op = mean_u 1[max q >= tau_q] H(q, psi(s(u))),  q_k = p_k o_k,  q_{c+1} = sum_k p_k (1 - o_k)

phi is the classifier on the features. On a projection of them stand the one-vs-all detectors chi, which say
o_k = P(in class k), and the open-set classifier psi over c + 1 classes. p and o are those of the weak view;
both targets are soft, and nothing flows back through them. L_mb (openmatch.py) learns from labels alone.
Defaults are the paper's for CIFAR-10: tau_p 0.95, tau_q 0.5, all weights 1, no L_op in the first of 256
epochs, no distribution alignment (128 on CIFAR-100, 32 on ImageNet-30), 64 labeled and 448 unlabeled images
per step, SGD and average as in FixMatch.

Deviations: those of fixmatch.py. The warm-up is a share of the run's steps. The mean for the alignment is
over the batches seen so far; the published code counts those to come as zeros. Whether an image is an outlier
is psi's decision, as in the paper: q_{c+1} against the largest of the others; the class of a known one is
always phi's, where the paper's open-set accuracy takes psi's. The rotation head is not here.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.classify.soft_nn import LabeledEmbeddings
from ropaws.core.distributed import gather_constants
from ropaws.core.records import Batch, Losses, Outputs
from ropaws.embedding.backbones import Encoder
from ropaws.methods.classifier import (
    Averaged,
    Network,
    labeled_cross_entropy,
    linear,
    masked_mean,
    row_mean,
    soft_cross_entropy,
)
from ropaws.methods.fixmatch import FixMatch
from ropaws.methods.method import check_share, check_weight
from ropaws.methods.openmatch import inside_probs, one_vs_all_head, one_vs_all_loss

SMALL = 1e-6  # added to both distributions


class Alignment(nn.Module):
    """The mean predictions of the last batches; called with the predictions of the next one.

    Args:
        classes: Number of classes.
        length: Number of batches that are remembered.
    """

    means: Tensor
    batches: Tensor

    def __init__(self, classes: int, length: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(length, classes))
        self.register_buffer("batches", torch.tensor(0))  # that were seen so far

    @torch.no_grad()
    def forward(self, probs: Tensor) -> Tensor:
        """Remember the mean over all processes, then align.   (u, c)  ->  (u, c), rows sum to 1"""
        length = len(self.means)
        self.means[int(self.batches) % length] = gather_constants(probs).mean(dim=0).to(self.means)
        self.batches += 1
        return aligned(probs, self.means.sum(dim=0) / min(int(self.batches), length))


def aligned(probs: Tensor, mean: Tensor) -> Tensor:
    """Predictions as if their mean were uniform.   probs (u, c), mean (c,)  ->  (u, c), rows sum to 1"""
    weighted = probs * (1 / probs.shape[1] + SMALL) / (mean + SMALL)
    return weighted / weighted.sum(dim=1, keepdim=True)


PROJECTED = 128  # dimensions
OUTLIER = 0.5  # probability of being one from which an image teaches no known class


def open_set_targets(probs: Tensor, inside: Tensor) -> Tensor:
    """Classes as likely as both heads say, and what is left for outliers.

    q_k = p_k o_k,  q_{c+1} = sum_k p_k (1 - o_k)
    probs p (u, c), inside o (u, c)  ->  (u, c + 1), rows sum to 1
    """
    outlier = (probs * (1 - inside)).sum(dim=1, keepdim=True)
    return torch.cat([probs * inside, outlier], dim=1)


@dataclass(frozen=True, kw_only=True)
class IOMatch(FixMatch):
    """FixMatch on likely inliers, and a classifier over the classes and outliers that learns from all."""

    open_confidence: float = 0.5
    """Probability from which a target of the open-set classifier is learned (tau_q)."""
    detector_weight: float = 1.0
    """Weight of the one-vs-all loss of labeled images (lambda_mb)."""
    open_weight: float = 1.0
    """Weight of the open-set loss (lambda_op)."""
    warmup: float = 1 / 256
    """Share of the steps before the open-set loss counts."""
    alignment: int = 0
    """Batches whose mean prediction is aligned with a uniform one; 0: no alignment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "open_confidence", "warmup")
        check_weight(self, "detector_weight", "open_weight", "alignment")

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        network = Network(encoder, self.heads(encoder.trained_dims, classes))
        return IOMatchModel(network, self.ema, Alignment(classes, self.alignment) if self.alignment else None)

    def heads(self, dims: int, classes: int) -> dict[str, nn.Module]:
        return {
            "classes": linear(dims, classes),
            "projection": nn.Sequential(nn.Linear(dims, dims), nn.ReLU(), nn.Linear(dims, PROJECTED)),
            "one_vs_all": one_vs_all_head(PROJECTED, classes),
            "open_set": linear(PROJECTED, classes + 1),
        }

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, IOMatchModel)
        heads = model.network.heads
        views = batch.views["weak"], batch.views["strong"]
        labeled, weak, strong = model.network.features(batch.labeled.images, *views)
        classes = batch.labeled.classes
        known = labeled_cross_entropy(heads["classes"](labeled), classes)
        detectors = row_mean(one_vs_all_loss(heads["one_vs_all"](heads["projection"](labeled)), classes))
        probs, targets = self.targets(model, weak)
        mask = ((probs.amax(dim=1) >= self.confidence) & (targets[:, -1] < OUTLIER)).to(probs.dtype)
        pseudo = masked_mean(soft_cross_entropy(probs, heads["classes"](strong)), mask)
        sure = (targets.amax(dim=1) >= self.open_confidence).to(probs.dtype)
        open_logits = heads["open_set"](heads["projection"](strong))
        open_set = masked_mean(soft_cross_entropy(targets, open_logits), sure)
        total = known + self.detector_weight * detectors + self.unlabeled_weight * pseudo
        if batch.step >= self.warmup * batch.steps:
            total = total + self.open_weight * open_set
        parts = {
            "cross_entropy": known.detach(),
            "one_vs_all": detectors.detach(),
            "pseudo_label": pseudo.detach(),
            "open_set": open_set.detach(),
        }
        return Losses(total, parts, mask)

    @torch.no_grad()
    def targets(self, model: "IOMatchModel", weak: Tensor) -> tuple[Tensor, Tensor]:
        """Targets of phi and of psi, from features of weak views.   (u, d)  ->  (u, c), (u, c + 1)"""
        heads = model.network.heads
        probs = model.network.logits(weak).softmax(dim=1)
        if model.alignment is not None:
            probs = model.alignment(probs)
        inside = inside_probs(heads["one_vs_all"](heads["projection"](weak)))
        return probs, open_set_targets(probs, inside)

    def predict(self, model: nn.Module, images: Tensor, support: LabeledEmbeddings) -> Outputs:
        """in_domain is at least one half where the open-set classifier prefers a known class."""
        assert isinstance(model, IOMatchModel)
        network = model.predictor
        features = network(images)
        logits = network.heads["open_set"](network.heads["projection"](features))
        best, outlier = logits[:, :-1].amax(dim=1), logits[:, -1]
        return Outputs(
            F.normalize(features, dim=1),
            network.logits(features).softmax(dim=1),
            torch.sigmoid(best - outlier),  # q_best / (q_best + q_outlier)
            1 - logits.softmax(dim=1)[:, -1],
        )


class IOMatchModel(Averaged):
    """The network, its average, and the predictions that alignment remembers."""

    def __init__(self, network: Network, decay: float, alignment: Alignment | None) -> None:
        super().__init__(network, decay)
        self.alignment = alignment
