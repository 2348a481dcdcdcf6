"""ProSub (Wallin et al., ECCV 2024): known classes live in the subspace that their prototypes span.

L = CE(w(x)) + w_pl mean_u 1[id] 1[max p(w(u)) >= tau] H(argmax p(w(u)), p(s(u)))
    + w_sub mean_u (1[not id] - 1[id]) s(u) + w_s mean_u (1 - cos(h(f(s(u))), f(w(u))))

The score s(u) = |Q^T f| / |f| of the weak view's features f is 1 inside of the subspace; Q is an orthonormal
basis of the prototypes, which are moving averages of the labeled features of each class. The scores of known
and of other classes are two Beta distributions (beta_mixture.py), whose shares are a setting. An image is
taken as known by chance at every step: where a random number is at most pi f1 / (pi f1 + (1 - pi) f2 + 0.1).
The last term is DoubleMatch's, with a linear layer h; nothing flows back through its target. The two terms
with id start after a phase of pretraining. At test time s ranks images.

Defaults are the paper's for CIFAR-10: pi 0.5, tau 0.95, w_pl 1, w_sub 1, w_s 10 (CIFAR-100 15, ImageNet 20 to
50), 50,000 of 2^19 steps of pretraining, averages of 0.999, SGD at 0.03 as FixMatch.

Deviations: the phase of pretraining is a share of the run; the averages of prototypes and Beta parameters
warm up as that of the weights (methods/classifier.py); directions of prototypes that do not exist yet are
left out instead of filled up by a QR decomposition, and the Beta parameters wait for the first ones; scores
keep 1e-4
away from 0 and 1. With as many classes as dimensions of the features, the subspace is everything and the
score says nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.classify.soft_nn import LabeledEmbeddings
from ropaws.core.distributed import gather_constants, place, share
from ropaws.core.records import Batch, Losses, Outputs
from ropaws.embedding.backbones import Encoder
from ropaws.methods.classifier import (
    Averaged,
    ClassifierMethod,
    Network,
    hard_targets,
    labeled_cross_entropy,
    linear,
    masked_mean,
    warmed_decay,
    weak_and_strong,
)
from ropaws.methods.method import check_share, check_weight
from ropaws.pool.augment import AugmentConfig, View

EDGE = 1e-4  # scores stay so far from 0 and 1, where densities may be infinite
LEAST_VARIANCE = 1e-6


def beta_density(scores: Tensor, shape: Tensor) -> Tensor:
    """x^(a - 1) (1 - x)^(b - 1) / B(a, b).   scores (n,), shape (2,) = a, b  ->  (n,)"""
    a, b = shape
    x = scores.clamp(EDGE, 1 - EDGE)
    scale = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    logarithm: Tensor = scale + (a - 1) * x.log() + (b - 1) * (-x).log1p()
    return logarithm.exp()


def beta_of_moments(scores: Tensor, weights: Tensor) -> Tensor:
    """The Beta distribution with the weighted mean m and variance v of scores.   both (n,)  ->  (2,) = a, b

    a = m (m (1 - m) / v - 1),  b = (1 - m) (m (1 - m) / v - 1); uniform where all weights are 0.
    """
    total = weights.sum()
    if total <= 0:
        return scores.new_ones(2)
    x = scores.clamp(EDGE, 1 - EDGE)
    mean = (weights * x).sum() / total
    variance = ((weights * (x - mean).square()).sum() / total).clamp_min(LEAST_VARIANCE)
    both = mean * (1 - mean) / variance - 1
    return torch.stack([mean * both, (1 - mean) * both])


def inside_probability(
    scores: Tensor, inside: Tensor, outside: Tensor, *, prior: float, doubt: float = 1e-8
) -> Tensor:
    """pi f1 / (pi f1 + (1 - pi) f2 + doubt): with doubt it is small where neither density is large.

    scores (n,), inside and outside (2,)  ->  (n,)
    """
    known, other = prior * beta_density(scores, inside), (1 - prior) * beta_density(scores, outside)
    return known / (known + other + doubt)


class BetaMixture(nn.Module):
    """The two distributions, as buffers; they start as Beta(10, 2) and Beta(2, 10)."""

    inside: Tensor
    outside: Tensor

    def __init__(self, prior: float) -> None:
        super().__init__()
        self.prior = prior
        self.register_buffer("inside", torch.tensor([10.0, 2.0]))
        self.register_buffer("outside", torch.tensor([2.0, 10.0]))

    @torch.no_grad()
    def forward(self, scores: Tensor, *, doubt: float = 1e-8) -> Tensor:
        """Probability of belonging to a known class.   (n,)  ->  (n,)"""
        found = inside_probability(
            _wide(scores), _wide(self.inside), _wide(self.outside), prior=self.prior, doubt=doubt
        )
        return found.to(scores)

    @torch.no_grad()
    def update(self, labeled: Tensor, unlabeled: Tensor, decay: float) -> None:
        """Move towards the moments of scores, weighted by what they belong to.   (s,), (u,) of all processes

        decay: share of the present parameters that is kept
        """
        probs = self(unlabeled)
        scores = torch.cat([labeled, unlabeled])
        inside = beta_of_moments(_wide(scores), _wide(torch.cat([torch.ones_like(labeled), probs])))
        outside = beta_of_moments(_wide(unlabeled), _wide(1 - probs))
        self.inside.lerp_(inside.to(self.inside), 1 - decay)
        self.outside.lerp_(outside.to(self.outside), 1 - decay)


def _wide(values: Tensor) -> Tensor:
    return values.detach().cpu().double()


DOUBT = 0.1  # keeps an image from being taken as known where neither density is large
SMALLEST = 1e-5  # singular value that counts as a direction, against the largest


def subspace_basis(prototypes: Tensor) -> Tensor:
    """Orthonormal rows that span the prototypes, and zeros for directions that they lack.   both (c, d)"""
    _, sizes, directions = torch.linalg.svd(prototypes, full_matrices=False)
    basis: Tensor = directions * (sizes > SMALLEST * sizes.amax())[:, None]
    return basis


def subspace_scores(features: Tensor, basis: Tensor) -> Tensor:
    """Cosine between features and their part in the subspace.   (n, d), (c, d)  ->  (n,) from 0 to 1"""
    scores: Tensor = torch.linalg.vector_norm(F.normalize(features, dim=1) @ basis.T, dim=1)
    return scores


def averaged_prototypes(prototypes: Tensor, features: Tensor, classes: Tensor, decay: float) -> Tensor:
    """Moved towards the mean features of each class that has rows.   (c, d), (s, d), (s,)  ->  (c, d)"""
    members = F.one_hot(classes, len(prototypes)).to(features)
    counts = members.sum(dim=0)[:, None]
    means = members.T @ features / counts.clamp_min(1)
    return torch.where(counts > 0, prototypes.lerp(means, 1 - decay), prototypes)


def id_draw(probs: Tensor, seed: int) -> Tensor:
    """1.0 with the given probability, else 0.0; the draws of a step are those of the whole batch.   (u,)"""
    rows = len(probs) * place().size
    drawn = torch.rand(rows, generator=torch.Generator().manual_seed(seed))[share(rows)]
    return (drawn.to(probs) <= probs).to(probs)


class SubspaceModel(Averaged):
    """The network, its average, the prototypes of the classes and the distributions of the scores."""

    prototypes: Tensor

    def __init__(self, network: Network, decay: float, *, classes: int, prior: float) -> None:
        super().__init__(network, decay)
        self.mixture = BetaMixture(prior)
        self.register_buffer("prototypes", torch.zeros(classes, network.encoder.trained_dims))


@dataclass(frozen=True, kw_only=True)
class ProSub(ClassifierMethod):
    """FixMatch on images that a draw takes as known, by their angle to the subspace of the prototypes."""

    known_share: float = 0.5
    """Share of the pool that belongs to known classes (pi), which must be guessed."""
    confidence: float = 0.95
    """Probability from which a pseudo-label is learned (tau)."""
    pseudo_weight: float = 1.0
    """Weight of the pseudo-label loss (w_pl)."""
    subspace_weight: float = 1.0
    """Weight of the loss that pulls known images into the subspace and pushes others out (w_sub)."""
    self_weight: float = 10.0
    """Weight of the self-supervised loss of DoubleMatch (w_s)."""
    pretraining: float = 0.1
    """Share of the run before the pseudo-label and subspace losses start."""
    statistics: float = 0.999
    """Share of the averages of prototypes and Beta parameters that is kept at each step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "known_share", "confidence", "pretraining", "statistics")
        check_weight(self, "pseudo_weight", "subspace_weight", "self_weight")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        return weak_and_strong(augment)

    def heads(self, dims: int, classes: int) -> dict[str, nn.Module]:
        return {"classes": linear(dims, classes), "self": linear(dims, dims)}

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        network = Network(encoder, self.heads(encoder.trained_dims, classes))
        return SubspaceModel(network, self.ema, classes=classes, prior=self.known_share)

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, SubspaceModel)
        network = model.network
        images = (batch.labeled.images, batch.views["weak"], batch.views["strong"])
        labeled, weak, strong = network.features(*images)
        known = labeled_cross_entropy(network.logits(labeled), batch.labeled.classes)
        basis = subspace_basis(model.prototypes)
        scores = subspace_scores(weak, basis)
        inside = id_draw(model.mixture(scores, doubt=DOUBT), batch.seed)
        targets = hard_targets(network.logits(weak).softmax(dim=1), self.confidence)
        mask = targets.mask * inside
        pseudo = masked_mean(F.cross_entropy(network.logits(strong), targets.classes, reduction="none"), mask)
        subspace = ((1 - 2 * inside) * scores).mean()
        own = (1 - F.cosine_similarity(network.heads["self"](strong), weak.detach(), dim=1)).mean()
        started = float(batch.step >= self.pretraining * batch.steps)
        total = known + self.self_weight * own
        total = total + started * (self.pseudo_weight * pseudo + self.subspace_weight * subspace)
        self._learn_statistics(model, batch, labeled, scores, basis)
        parts = {"cross_entropy": known, "pseudo_label": pseudo, "subspace": subspace, "self_supervised": own}
        return Losses(total, {name: value.detach() for name, value in parts.items()}, started * mask)

    @torch.no_grad()
    def _learn_statistics(
        self, model: SubspaceModel, batch: Batch, labeled: Tensor, scores: Tensor, basis: Tensor
    ) -> None:
        """Prototypes and Beta parameters move towards those of the batch of all processes."""
        decay = warmed_decay(self.statistics, batch.step)
        labeled, classes = gather_constants(labeled), gather_constants(batch.labeled.classes)
        if basis.any():  # before the first prototypes, scores are all zero and say nothing
            model.mixture.update(subspace_scores(labeled, basis), gather_constants(scores), decay)
        model.prototypes.copy_(averaged_prototypes(model.prototypes, labeled, classes, decay))

    def predict(self, model: nn.Module, images: Tensor, support: LabeledEmbeddings) -> Outputs:
        """Classes by the linear layer; in-domain by the Beta mixture, ranked by the subspace score."""
        assert isinstance(model, SubspaceModel)
        features = model.predictor(images)
        probs = model.predictor.logits(features).softmax(dim=1)
        scores = subspace_scores(features, subspace_basis(model.prototypes))
        return Outputs(F.normalize(features, dim=1), probs, model.mixture(scores, doubt=DOUBT), scores)
