"""PAWS (Assran et al., 2021): views of an image agree on soft nearest-neighbour predictions."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ropaws import equations as eq
from ropaws.batch import Losses, Support, Views
from ropaws.methods.protocol import Network, check_positive, check_share
from ropaws.methods.supports import anchor_predictions, gather_support, global_mean


@dataclass(frozen=True, kw_only=True)
class PAWS:
    """PAWS: trusts the nearest labels, also for images that belong to no class."""

    temperature: float = 0.1
    """Of the similarity kernel."""
    sharpen_temperature: float = 0.25
    """Of the targets; lower is sharper."""
    label_smoothing: float = 0.1
    """Share of a support's label spread over all classes."""

    needs_unlabeled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(self, "temperature", "sharpen_temperature")
        check_share(self, "label_smoothing")

    def step(self, model: Network, views: Views, support: Support) -> Losses:
        supports, first, second, *crops = model([support.images, views.first, views.second, *views.crops])
        known = gather_support(supports, support, self.label_smoothing)
        anchors = anchor_predictions([first, second, *crops], known.z, known.labels, self.temperature)
        with torch.no_grad():
            targets = torch.stack(
                [
                    eq.soft_nn(view.h, known.h, known.labels, temperature=self.temperature)
                    for view in (first, second)
                ]
            )
        mean = global_mean(anchors, None, self.sharpen_temperature)
        return eq.paws_loss(anchors, targets, sharpen_temperature=self.sharpen_temperature, mean=mean)
