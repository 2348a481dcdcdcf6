"""OpenCoS (Park et al., 2021): a contrastive encoder splits the pool, then FixMatch learns.

L = CE + lambda_u mean_I 1[max p(w(u)) >= tau] H(argmax p(w(u)), p(s(u))) + lambda_s mean_O H(q(u), p'(w(u)))

Starts from a SimCLR run on all images. Once, before the first step, its projections z tell the in-class part
I of the pool from the rest O: I has max_c cos(z, prototype_c) above mean - 2 std of the labeled images' own
scores. The top 10 % of I by a logistic regression on the features (L2 1e-4) get its class as a label. O
learns soft targets q = softmax(cos(z, prototypes) / 0.1), through batch norms p' of its own. w is a weak
view, s SimCLR's.

    ropaws train ... --method simclr --out runs/simclr
    ropaws train ... --method opencos --init runs/simclr/model.safetensors --out runs/opencos

Defaults are the paper's: tau 0.95, lambda_u 1, lambda_s 0.5, a moving average of 0.999, SGD without weight
decay and cos(7/16 pi t). Its rate is 0.03 / 7 for 50,000 steps with as many unlabeled as labeled images;
0.03 here, as FixMatch has, for shorter runs.

Deviations: scores of labeled images are those that they would have without their own label, where the
paper's prototypes contain them, which sets the threshold too high with few labels; an image that is alone in
its class is compared with the other classes. Prototypes are means of unit rows. Pseudo-labeled images join
the cross-entropy, as rows like the labeled ones, whenever they are in the unlabeled batch, instead of
becoming a part of the labeled set. I and O come in one unlabeled batch, so their numbers vary from step to
step; a step with a single image of O leaves it out. FixMatch is the learner; the paper's best one is
ReMixMatch. With a frozen backbone, or features, the projection head is trained, and the batch norms in it
are doubled; a backbone or a head without batch norm has nothing to double, and O goes through the same
network. The confidence serves as the score of in-class images.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from ropaws.core.distributed import sum_constants
from ropaws.core.records import Batch, Losses
from ropaws.embedding.backbones import Encoder
from ropaws.embedding.weight_files import PROJECTIONS
from ropaws.methods.classifier import (
    Averaged,
    ClassifierMethod,
    Network,
    hard_targets,
    row_mean,
    soft_cross_entropy,
)
from ropaws.methods.method import check_positive, check_share, check_weight
from ropaws.methods.simclr import simclr_view
from ropaws.pool.augment import AugmentConfig, View
from ropaws.pool.rand_augment import WeakView
from ropaws.training.loaders import PoolPass


class AuxiliaryNorms(nn.Module):
    """Weights and statistics of all batch norms of the trained part, which start as copies of the network's.

    The trained part is the backbone, or the projection head on a frozen one. Without any batch norm there, as
    in a linear head or a transformer, the network is called as it is.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        part = "projection" if network.encoder.frozen else "backbone"
        norms = {
            f"encoder.{part}.{name}": copy.deepcopy(module)
            for name, module in network.encoder.get_submodule(part).named_modules()
            if isinstance(module, _BatchNorm)
        }
        # Names of modules have no dots. As modules they are synchronized between processes like the others.
        self.norms = nn.ModuleDict({name.replace(".", "/"): norm for name, norm in norms.items()})

    def forward(self, network: Network, images: Tensor) -> Tensor:
        """Features by the network with these norms, whose statistics it updates.   ->  (n, d)"""
        own = {
            f"{name.replace('/', '.')}.{key}": value
            for name, norm in self.norms.items()
            for key, value in (*norm.named_parameters(), *norm.named_buffers())
        }
        features: Tensor = functional_call(network, own, (images,))
        return features


NOT_CHOSEN = -1  # pseudo-label of an image that has none
LBFGS_STEPS, FLAT = 200, 1e-7  # most iterations, and slope of the loss at which they end


def prototypes(embedded: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean of each class as a unit row; zeros without a label.   (l, d), (l,)  ->  (c, d)"""
    one_hot = F.one_hot(labels, classes).to(embedded.dtype)
    return F.normalize(one_hot.T @ embedded, dim=1)


def held_out_scores(embedded: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Highest cosine of each labeled image to a prototype, were it not labeled itself.

    An image that is alone in its class has the prototypes of the other classes left; without any, -inf.
    embedded (l, d) unit rows, labels (l,)  ->  (l,)
    """
    one_hot = F.one_hot(labels, classes).to(embedded.dtype)
    sums, counts = one_hot.T @ embedded, one_hot.sum(dim=0)
    cosines = (embedded @ F.normalize(sums, dim=1).T).masked_fill(counts == 0, -torch.inf)
    own = (embedded * F.normalize(sums[labels] - embedded, dim=1)).sum(dim=1)
    own = own.masked_fill(counts[labels] == 1, -torch.inf)
    return cosines.scatter(1, labels[:, None], own[:, None]).amax(dim=1)


def score_threshold(scores: Tensor, deviations: float) -> float:
    """mean - deviations * standard deviation of labeled images' scores; -1, the least cosine, without any."""
    known = scores[scores.isfinite()]
    if len(known) == 0:
        return -1.0
    return float(known.mean() - deviations * known.std(correction=0))


@torch.enable_grad()  # type: ignore[no-untyped-call, untyped-decorator, unused-ignore]
def fit_probe(features: Tensor, labels: Tensor, classes: int, *, penalty: float) -> Tensor:
    """Logistic regression by L-BFGS on the CPU in float64; the last row is the bias, without penalty.

    features (l, f), labels (l,)  ->  (f + 1, c)
    """
    rows, labels = _with_one(features.detach().cpu().double()), labels.cpu()
    weights = rows.new_zeros(rows.shape[1], classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=LBFGS_STEPS,
        tolerance_grad=FLAT,
        tolerance_change=FLAT**2,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(rows @ weights, labels) + penalty / 2 * weights[:-1].square().sum()
        value.backward()  # type: ignore[no-untyped-call, unused-ignore]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call, unused-ignore]
    return weights.detach()


def probe_probabilities(features: Tensor, weights: Tensor) -> Tensor:
    """(n, f), (f + 1, c)  ->  (n, c)"""
    return (_with_one(features) @ weights.to(features)).softmax(dim=1)


def top_pseudo_labels(probs: Tensor, eligible: Tensor, share: float) -> Tensor:
    """The likeliest class of the most confident share of the eligible rows, else NOT_CHOSEN.

    probs (n, c), eligible (n,) bool  ->  (n,)
    """
    confidence, classes = probs.max(dim=1)
    count = int(share * int(eligible.sum()))
    chosen = confidence.masked_fill(~eligible, -1.0).topk(count).indices
    labels = torch.full_like(classes, NOT_CHOSEN)
    labels[chosen] = classes[chosen]
    return labels


def _with_one(features: Tensor) -> Tensor:
    return F.pad(features, (0, 1), value=1.0)


SMALLEST_CROP = 0.08  # of the strong view, as in SimCLR
PROBE_PENALTY = 1e-4
FEWEST_ROWS = 2  # from which batch norm has statistics


@dataclass(frozen=True, kw_only=True)
class OpenCoS(ClassifierMethod):
    """FixMatch on the part of the pool that a SimCLR run takes for in-class, soft labels for the rest."""

    confidence: float = 0.95
    """Probability from which a pseudo-label is learned (tau)."""
    unlabeled_weight: float = 1.0
    """Weight of the loss of in-class images (lambda_u)."""
    soft_weight: float = 0.5
    """Weight of the soft labels of out-of-class images (lambda_s)."""
    soft_temperature: float = 0.1
    """Of the similarities to the prototypes that become soft labels."""
    deviations: float = 2.0
    """Standard deviations below the labeled images' mean score from which an image is out-of-class."""
    top_share: float = 0.1
    """Share of the in-class images, the most confident ones, that are learned like labeled ones."""

    optim: ClassVar[Mapping[str, Any]] = {
        "name": "sgd", "schedule": "fixmatch", "peak": 0.03, "weight_decay": 0.0,
    }  # fmt: skip
    init: ClassVar[tuple[str, ...]] = ("backbone", "projection")
    needs_init: ClassVar[str] = "the encoder of a SimCLR run (train one with --method simclr)"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "confidence", "top_share")
        check_weight(self, "unlabeled_weight", "soft_weight", "deviations")
        check_positive(self, "soft_temperature")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        return {"weak": WeakView(size=augment.size), "strong": simclr_view(augment, SMALLEST_CROP)}

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        network = Network(encoder, self.heads(encoder.trained_dims, classes))
        return SplitPoolModel(network, self.ema, classes=classes, pool=pool)

    def start(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        if not any(name.startswith(PROJECTIONS) for name in weights):
            raise ValueError(
                "model.init: opencos splits the pool by the projections of a SimCLR run, and this file has no"
                " projection head; train one with --method simclr and give its model.safetensors"
            )

    def before_epoch(self, model: nn.Module, pool: PoolPass) -> None:
        """Before the first step, split the pool by what the pretrained network says of it."""
        assert isinstance(model, SplitPoolModel)
        if pool.step > 0:
            return
        encoder, classes = model.encoder, model.soft.shape[1]
        rows, labels = pool.data.labeled_indices, pool.data.labels.to(pool.device)
        embedded = pool.map(lambda images: _projected(encoder, encoder.features(images)), rows)
        means = prototypes(embedded, labels, classes)
        least = score_threshold(held_out_scores(embedded, labels, classes), self.deviations)
        probe = fit_probe(pool.map(encoder.features, rows), labels, classes, penalty=PROBE_PENALTY)

        def look(images: Tensor) -> Tensor:
            features = encoder.features(images)
            cosines = _projected(encoder, features) @ means.T
            return torch.cat([cosines, probe_probabilities(features, probe)], dim=1)

        cosines, probs = pool.map(look).split(classes, dim=1)
        in_class = cosines.amax(dim=1) > least
        in_class[rows.to(in_class.device)] = False  # their labels are known
        model.pseudo.copy_(top_pseudo_labels(probs, in_class, self.top_share))
        in_class[rows.to(in_class.device)] = True
        model.in_class.copy_(in_class)
        model.soft.copy_((cosines / self.soft_temperature).softmax(dim=1))

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, SplitPoolModel)
        inside = model.in_class[batch.pool_index]
        weak, strong = batch.views["weak"], batch.views["strong"]
        network = model.network
        features = network.features(batch.labeled.images, weak[inside], strong[inside])
        labeled, sure, learner = map(network.logits, features)
        pseudo = model.pseudo[batch.pool_index[inside]]
        top = pseudo != NOT_CHOSEN
        known = row_mean(
            F.cross_entropy(
                torch.cat([labeled, sure[top]]),
                torch.cat([batch.labeled.classes, pseudo[top]]),
                reduction="none",
            )
        )
        targets = hard_targets(sure.softmax(dim=1), self.confidence)
        consistency = row_mean(F.cross_entropy(learner, targets.classes, reduction="none") * targets.mask)
        outside = self.outside_loss(model, weak[~inside], model.soft[batch.pool_index[~inside]])
        total = known + self.unlabeled_weight * consistency + self.soft_weight * outside
        parts = {"cross_entropy": known, "pseudo_label": consistency, "soft_label": outside}
        selected = inside.to(targets.mask.dtype)
        selected[inside] = torch.maximum(targets.mask, top.to(targets.mask.dtype))
        return Losses(total, {name: value.detach() for name, value in parts.items()}, selected)

    def outside_loss(self, model: "SplitPoolModel", images: Tensor, targets: Tensor) -> Tensor:
        """Loss of the out-of-class images through their own batch norms; 0 where these have no statistics."""
        if int(sum_constants(torch.tensor(len(images), device=images.device))) < FEWEST_ROWS:
            return targets.sum() * 0.0
        logits = model.network.logits(model.auxiliary(model.network, images))
        return row_mean(soft_cross_entropy(targets, logits))


class SplitPoolModel(Averaged):
    """A network with its average, batch norms for out-of-class images, and the split of the pool."""

    in_class: Tensor  # (pool,) bool
    pseudo: Tensor  # (pool,) class of a confident image, or NOT_CHOSEN
    soft: Tensor  # (pool, c)

    def __init__(self, network: Network, decay: float, *, classes: int, pool: int) -> None:
        super().__init__(network, decay)
        self.auxiliary = AuxiliaryNorms(network)
        self.register_buffer("in_class", torch.ones(pool, dtype=torch.bool))
        self.register_buffer("pseudo", torch.full((pool,), NOT_CHOSEN))
        self.register_buffer("soft", torch.full((pool, classes), 1 / classes))


def _projected(encoder: Encoder, features: Tensor) -> Tensor:
    """Unit rows after the projection head.   (n, f)  ->  (n, d)"""
    return F.normalize(encoder.projection(features), dim=1)
