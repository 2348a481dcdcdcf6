"""DS3L, Safe Deep Semi-Supervised Learning (Guo et al., ICML 2020): learned weights of unlabeled images.

L = CE(w(x)) + c(t) sum_u g(u) l(u) / sum_u g(u),   l(u) = mean_c (p_c(w'(u)) - p_c(w(u)))^2

w and w' are two weak views (a pi-model); nothing flows back through p(w(u)). g, a small network on p(w(u))
with a sigmoid, gives every unlabeled image a weight. It is trained for what its weights do: with theta' =
theta - rate dL / dtheta, a step of plain SGD that is only tried, g descends on CE(w(x); theta'), the loss of
the same labeled images after that step; the derivative goes through the step.
Defaults are the paper's: 100 hidden units, trial rate 1e-3, c(t) = 10 exp(-5 (1 - t)^2) up to the end of the
run, Adam at 3e-4; 50 labeled and 50 unlabeled images per step.

Cost: a backward pass that keeps its graph, the labeled rows forward and backward once more, and a backward
pass through the first one: about three times a plain method, in time and memory.

Deviations: one optimizer and rate for the network and for g (the released code has an Adam for each, that of
g at 3e-4 or 6e-5 depending on its version, and asks to tune it); the gradient through the network of g's
input is left out in the trial, as it is in the real step; its sum of weights is that of the real step (the
released code divides by single weights in the trial); no consistency of labeled rows, which the released code
masks to zero; no noise on the images. Tests use a moving average of 0.999; confidence serves as the score of
in-class images. Several processes on CUDA do not work: torch's synchronized batch norm has no second
derivative. Where features alone are given, without views, both views are equal and only labels are learned.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ropaws.core.distributed import all_sum, place
from ropaws.core.records import Batch, Losses
from ropaws.embedding.backbones import Encoder
from ropaws.methods.classifier import (
    Averaged,
    ClassifierMethod,
    Network,
    gaussian_ramp,
    handed_over,
    labeled_cross_entropy,
    logits_with,
    slopes_of,
    stepped,
    trained_weights,
)
from ropaws.methods.method import check_positive, check_weight
from ropaws.pool.augment import AugmentConfig, View
from ropaws.pool.rand_augment import WeakView


def squared_distances(probs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared difference over the classes.   both (u, c)  ->  (u,)"""
    return (probs - targets).square().mean(dim=1)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """sum w v / sum w over the rows of all processes, with gradient to both.   both (u,)  ->  ()

    The mean over processes of what this returns is that of all rows.
    """
    return (weights * values).sum() * place().size / all_sum(weights.sum())


def weight_net(classes: int, hidden: int) -> nn.Sequential:
    """Weights from 0 to 1 of class probabilities.   (u, c)  ->  (u, 1)"""
    return nn.Sequential(nn.Linear(classes, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Sigmoid())


class WeighedModel(Averaged):
    """The network, its average, and the network that gives weights."""

    def __init__(self, network: Network, decay: float, weigher: nn.Sequential) -> None:
        super().__init__(network, decay)
        self.weigher = weigher


@dataclass(frozen=True, kw_only=True)
class DS3L(ClassifierMethod):
    """Consistency of two weak views, with weights that are trained to help on the labeled images."""

    unlabeled_weight: float = 10.0
    """Weight of the unlabeled loss at the end of the run (c)."""
    trial_rate: float = 1e-3
    """Learning rate of the step through which the weights are judged."""
    hidden: int = 100
    """Hidden units of the network that gives weights."""

    optim: ClassVar[Mapping[str, Any]] = {"name": "adam", "peak": 3e-4, "weight_decay": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "trial_rate", "hidden")
        check_weight(self, "unlabeled_weight")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        weak = WeakView(size=augment.size)
        return {"weak1": weak, "weak2": weak}

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        network = Network(encoder, self.heads(encoder.trained_dims, classes))
        return WeighedModel(network, self.ema, weight_net(classes, self.hidden))

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, WeighedModel)
        _refuse_torch_sync(model)
        network, shown = model.network, batch.labeled
        features = network.features(shown.images, batch.views["weak1"], batch.views["weak2"])
        labeled, first, second = map(network.logits, features)
        known = labeled_cross_entropy(labeled, shown.classes)
        targets = first.softmax(dim=1).detach()
        weights = model.weigher(targets).squeeze(1)
        consistency = weighted_mean(squared_distances(second.softmax(dim=1), targets), weights)
        inner = known + self.unlabeled_weight * gaussian_ramp(batch.step, batch.steps) * consistency
        trained, weighing = trained_weights(network), trained_weights(model.weigher)
        slopes = slopes_of(inner, trained, create_graph=True)
        moved = stepped(trained, slopes, self.trial_rate)
        outer = labeled_cross_entropy(logits_with(network, moved, shown.images), shown.classes)
        # Both gradients are known by now: no third pass through the network.
        total = inner.detach() + handed_over(trained, slopes)
        total = total + handed_over(weighing, slopes_of(outer, weighing))
        parts = {"cross_entropy": known, "consistency": consistency, "after_trial": outer}
        return Losses(total, {name: value.detach() for name, value in parts.items()}, weights.detach())


def _refuse_torch_sync(model: nn.Module) -> None:
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
        raise ValueError(
            "ds3l: torch's SyncBatchNorm has no second derivative, which the weights are trained with;"
            " train with a single process"
        )
