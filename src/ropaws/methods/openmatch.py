"""OpenMatch (Saito et al., NeurIPS 2021): FixMatch on the images that one-vs-all detectors let in.

L = CE(w(x)) + L_ova(w(x)) + lambda_em L_em + lambda_oc L_oc + lambda_u L_fix
L_em = mean_u (h(w1(u)) + h(w2(u))) / 2,  L_oc = mean_u |o(w1(u)) - o(w2(u))|^2
L_fix = mean_{inliers} 1[max p(w1(u)) >= tau] H(argmax p(w1(u)), p(s(u)))

o are one-vs-all detectors on the features and h is their entropy: they learn from labels, to
be sure, and to say the same of two weak views. Before each pass through the pool the averaged network scores
all of it: u is an inlier if o_k > 0.5 for its most likely class k. FixMatch begins with the first pass after
a share of the run. Defaults are the paper's: lambda_em 0.1, lambda_oc 0.5 (CIFAR-100: 1), lambda_u 1, tau 0
(every inlier teaches, however unsure its class), from epoch 10 of 512 on, 64 labeled and 128 unlabeled
images per step (`--train.batch 128`), SGD and average as in FixMatch.

Deviations: those of fixmatch.py. The paper draws a batch of inliers beside the one of all images; here L_fix
looks at the inliers among the rows of the one batch. Its mean is over them, so that few inliers make a mean
of few rows, and none a loss of 0. All views go through the network as one batch. The labeled images are part
of the pool. The pool is scored on center views.

With few labels the detectors may reject nearly everything: see `inliers` in the log, the share of the pool
that was let in. A run shorter than one pass through the pool after `fixmatch_start` has no L_fix at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.classify.soft_nn import LabeledEmbeddings
from ropaws.core.records import Batch, Losses, Outputs
from ropaws.embedding.backbones import Encoder
from ropaws.methods.classifier import Averaged, Network, hard_targets, labeled_cross_entropy, linear, row_mean
from ropaws.methods.fixmatch import FixMatch
from ropaws.methods.method import check_share, check_weight
from ropaws.pool.augment import AugmentConfig, View
from ropaws.pool.rand_augment import StrongView, WeakView
from ropaws.training.loaders import PoolPass


class Decisions(NamedTuple):
    """Log-probabilities of the two outcomes for each class."""

    outside: Tensor  # (n, c)
    inside: Tensor  # (n, c)


def one_vs_all_head(dims: int, classes: int) -> nn.Linear:
    """A linear layer without bias.   (n, dims)  ->  (n, 2 c)"""
    return linear(dims, 2 * classes, bias=False)


def decisions(scores: Tensor) -> Decisions:
    """A softmax over the two outcomes of each class.   (n, 2 c)"""
    outside, inside = scores.unflatten(1, (2, -1)).log_softmax(dim=1).unbind(dim=1)
    return Decisions(outside, inside)


def inside_probs(scores: Tensor) -> Tensor:
    """o_k = P(in class k).   (n, 2 c)  ->  (n, c); rows do not sum to 1"""
    return decisions(scores).inside.exp()


def one_vs_all_loss(scores: Tensor, classes: Tensor) -> Tensor:
    """The own class is taught, and of all others the one that is most wrongly sure.

    -log o_y + max_{k != y} -log(1 - o_k)
    scores (n, 2 c), classes (n,)  ->  (n,)
    """
    outside, inside = decisions(scores)
    own = F.one_hot(classes, inside.shape[1]).bool()
    hardest = (-outside).masked_fill(own, 0).amax(dim=1)  # 0 where there is one class alone
    return hardest - inside.gather(1, classes[:, None]).squeeze(1)


def decision_entropy(scores: Tensor) -> Tensor:
    """Mean over the classes of the entropy of their two outcomes.   (n, 2 c)  ->  (n,)"""
    outside, inside = decisions(scores)
    return -(outside.exp() * outside + inside.exp() * inside).mean(dim=1)


def decision_distance(scores: Tensor, other: Tensor) -> Tensor:
    """Squared difference between two views, summed over classes and outcomes.   both (n, 2 c)  ->  (n,)"""
    # The two outcomes of a class differ by the same amount.
    return 2 * (inside_probs(scores) - inside_probs(other)).square().sum(dim=1)


INLIER = 0.5  # probability above which the detector of the most likely class lets an image in


def inlier_probs(logits: Tensor, scores: Tensor) -> Tensor:
    """What the detector of the most likely class says.   logits (n, c), scores (n, 2 c)  ->  (n,)"""
    return inside_probs(scores).gather(1, logits.argmax(dim=1, keepdim=True)).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class OpenMatch(FixMatch):
    """One-vs-all detectors choose the images on which FixMatch is trained."""

    confidence: float = 0.0
    """Probability from which the pseudo-label of an inlier is learned (tau)."""
    entropy_weight: float = 0.1
    """Weight of the detectors' entropy (lambda_em)."""
    consistency_weight: float = 0.5
    """Weight of the difference between two weak views in the eyes of the detectors (lambda_oc)."""
    fixmatch_start: float = 10 / 512
    """Share of the steps after which inliers are chosen and FixMatch begins."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weight(self, "entropy_weight", "consistency_weight")
        check_share(self, "fixmatch_start")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        weak = WeakView(size=augment.size)
        return {"weak1": weak, "weak2": weak, "strong": StrongView(size=augment.size)}

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        return OpenMatchModel(Network(encoder, self.heads(encoder.trained_dims, classes)), self.ema, pool)

    def heads(self, dims: int, classes: int) -> dict[str, nn.Module]:
        return super().heads(dims, classes) | {"one_vs_all": one_vs_all_head(dims, classes)}

    def before_epoch(self, model: nn.Module, pool: PoolPass) -> None:
        """The averaged network chooses the inliers among all images."""
        assert isinstance(model, OpenMatchModel)
        network = model.predictor

        def inside(images: Tensor) -> Tensor:
            features = network(images)
            return inlier_probs(network.logits(features), network.heads["one_vs_all"](features))

        model.inliers.copy_(pool.map(inside) > INLIER)
        model.chosen_at.fill_(pool.step)

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, OpenMatchModel)
        network, classes = model.network, batch.labeled.classes
        detect = network.heads["one_vs_all"]
        begun = int(model.chosen_at) >= self.fixmatch_start * batch.steps
        chosen = model.inliers[batch.pool_index] & begun
        first, second, strong = (batch.views[role] for role in ("weak1", "weak2", "strong"))
        features = network.features(batch.labeled.images, first, second, strong[chosen])
        known = labeled_cross_entropy(network.logits(features[0]), classes)
        labeled, *weak = map(detect, features[:3])
        detectors = row_mean(one_vs_all_loss(labeled, classes))
        entropy = torch.stack([decision_entropy(scores) for scores in weak]).mean()
        consistency = decision_distance(*weak).mean()
        targets = hard_targets(network.logits(features[1][chosen]).softmax(dim=1), self.confidence)
        wrong = F.cross_entropy(network.logits(features[3]), targets.classes, reduction="none")
        pseudo = row_mean(wrong * targets.mask)
        total = known + detectors + self.entropy_weight * entropy
        total = total + self.consistency_weight * consistency + self.unlabeled_weight * pseudo
        parts = {
            "cross_entropy": known.detach(),
            "one_vs_all": detectors.detach(),
            "entropy": entropy.detach(),
            "consistency": consistency.detach(),
            "pseudo_label": pseudo.detach(),
            "inliers": model.inliers.to(total.dtype).mean(),
        }
        selected = torch.zeros_like(chosen, dtype=total.dtype)
        selected[chosen] = targets.mask
        return Losses(total, parts, selected)

    def predict(self, model: nn.Module, images: Tensor, support: LabeledEmbeddings) -> Outputs:
        assert isinstance(model, OpenMatchModel)
        network = model.predictor
        features = network(images)
        logits = network.logits(features)
        inside = inlier_probs(logits, network.heads["one_vs_all"](features))
        return Outputs(F.normalize(features, dim=1), logits.softmax(dim=1), inside, inside)


class OpenMatchModel(Averaged):
    """The network, its average, and which images of the pool were let in."""

    inliers: Tensor
    chosen_at: Tensor

    def __init__(self, network: Network, decay: float, pool: int) -> None:
        super().__init__(network, decay)
        self.register_buffer("inliers", torch.zeros(pool, dtype=torch.bool))
        self.register_buffer("chosen_at", torch.tensor(-1))  # step of the pass that chose them
