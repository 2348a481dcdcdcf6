"""The same network and classifier on the labelled images alone: what unlabelled data must beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ropaws import equations as eq
from ropaws.batch import Losses, Support, Views
from ropaws.methods.protocol import Network, check_positive, check_share
from ropaws.methods.supports import gather_support, may_vote


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
        known = gather_support(supports, support, self.label_smoothing)
        # Of all processes in every one of them: there are few labelled images.
        votes = (eq.cosine(known.z, known.z) / self.temperature).masked_fill(
            ~may_vote(known.labelled), -torch.inf
        )
        loss = eq.cross_entropy(known.labels, votes.softmax(dim=1) @ known.labels).mean()
        return Losses(loss, {"cross_entropy": loss.detach()})
