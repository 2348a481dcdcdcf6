"""The same network and classifier on the labelled images alone: what unlabelled data must beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ropaws import equations as eq
from ropaws.batch import Losses, Support, Views
from ropaws.methods.protocol import Network, check_positive, check_share
from ropaws.methods.supports import may_vote, smooth


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """Labelled images only: each is classified by its soft nearest neighbours among the others."""

    temperature: float = 0.1
    """Of the similarity kernel."""
    label_smoothing: float = 0.1
    """Share of a support's label spread over all classes."""

    needs_unlabeled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive(self, "temperature")
        check_share(self, "label_smoothing")

    def step(self, model: Network, views: Views, support: Support) -> Losses:
        (supports,) = model([support.images])
        votes = (eq.cosine(supports.z, supports.z) / self.temperature).masked_fill(
            ~may_vote(support), -torch.inf
        )
        labels = smooth(support.labels, self.label_smoothing)
        loss = eq.cross_entropy(labels, votes.softmax(dim=1) @ labels).mean()
        return Losses(loss, {"cross_entropy": loss.detach()})
