"""BYOL (Grill et al., NeurIPS 2020): one view predicts what a slow copy of the network says of the other.

L = mean_u [ 2 - 2 cos(p(z_1), z'_2) ] + [ 2 - 2 cos(p(z_2), z'_1) ]

z is the projection by the trained encoder, z' the one by its slow copy without gradient, p the predictor.
The share of the copy that is kept rises from m to 1: 1 - (1 - m) (cos(pi step / steps) + 1) / 2. Settings
that are usual on CIFAR: m 0.99, 4096 units in the predictor, LARS at 1.0 with trust 0.02 for a batch of 256
and weight decay 1e-5, the second view solarized with probability 0.2. On ImageNet: m 0.996, LARS at 0.2
batch / 256, weight decay 1.5e-6.

Deviations: the predictor takes unit rows z; both views go through a network as one batch, so batch norm has
the statistics of both; the projection head has three layers; thresholds of solarize are random; no blur; no
warm-up, which the paper has for 10 epochs (`--optim.warmup`). Predictions are those of soft nearest
neighbors on z. On data that are features the head is trained.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ropaws.core.records import Batch, Losses
from ropaws.embedding.backbones import Encoder
from ropaws.methods.method import check_positive, check_share
from ropaws.methods.simclr import TwoViewMethod, follow, simclr_view, slow_copy
from ropaws.pool.augment import AugmentConfig, View

SOLARIZE = 0.2  # of the second view


def distance(predicted: Tensor, target: Tensor) -> Tensor:
    """2 - 2 cos of each row: the squared distance of unit rows.   both (u, d)  ->  (u,)"""
    return 2 - 2 * torch.cosine_similarity(predicted, target, dim=1)


def rising_momentum(step: int, steps: int, *, start: float) -> float:
    """A momentum from start at the first step to 1 after the last, by half a cosine."""
    return 1 - (1 - start) * (math.cos(math.pi * step / steps) + 1) / 2


@dataclass(frozen=True, kw_only=True)
class BYOL(TwoViewMethod):
    """Pretraining without labels or negatives: a view predicts a slow copy's projection of the other."""

    momentum: float = 0.99
    """Share of the copy's weights that is kept at the first step; rises to 1 (m)."""
    predictor_hidden: int = 4096
    """Width of the predictor's hidden layer."""

    optim: ClassVar[Mapping[str, Any]] = {"name": "lars", "peak": 1.0, "trust": 0.02, "weight_decay": 1e-5}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "momentum")
        check_positive(self, "predictor_hidden")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        view = simclr_view(augment, self.smallest_crop)
        return {"first": view, "second": replace(view, solarize=SOLARIZE)}

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        return OnlineAndTarget(encoder, self.predictor_hidden)

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, OnlineAndTarget)
        views = [batch.views["first"], batch.views["second"]]
        first, second = model.encoder(views)
        predicted = model.predictor(torch.cat([first.h, second.h]))
        with torch.no_grad():
            target1, target2 = model.target(views)
        # Both directions of an image: twice the mean over all views.
        loss = 2 * distance(predicted, torch.cat([target2.h, target1.h])).mean()
        return Losses(loss, {"distance": loss.detach()})

    def after_step(self, model: nn.Module, batch: Batch) -> None:
        assert isinstance(model, OnlineAndTarget)
        momentum = rising_momentum(batch.step, batch.steps, start=self.momentum)
        follow(model.target, model.encoder, momentum)


class OnlineAndTarget(nn.Module):
    """The trained encoder, its predictor, and the slow copy that is predicted."""

    def __init__(self, encoder: Encoder, hidden: int) -> None:
        super().__init__()
        dims = encoder.embedding_dims
        self.encoder = encoder
        self.predictor = nn.Sequential(
            nn.Linear(dims, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, dims)
        )
        self.target = slow_copy(encoder)
