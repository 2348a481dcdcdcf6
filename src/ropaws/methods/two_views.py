"""What SimCLR, MoCo-v2 and BYOL share: two strong views of each image, no labels, a slow copy of a network.

They train the encoder: backbone and projection head, or the projection head alone on data that are features.
Another run takes it over by `--init RUN/model.safetensors`, or `ropaws finetune RUN`.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ropaws.data.augment import AugmentConfig, View
from ropaws.data.rand_augment import WeakView
from ropaws.methods.method import Method
from ropaws.models import Encoder

GRAYSCALE = 0.2  # of views without color, in all of these papers


@dataclass(frozen=True, kw_only=True)
class TwoViewMethod(Method):
    """Pretraining with two views of each image; predicts with soft nearest neighbors."""

    smallest_crop: float = 0.08
    """Least share of the image's area that a view shows."""

    uses_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.smallest_crop <= 1:
            raise ValueError(f"method.smallest_crop must be above 0 and at most 1, got {self.smallest_crop}")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        view = simclr_view(augment, self.smallest_crop)
        return {"first": view, "second": view}

    def labeled_view(self, augment: AugmentConfig) -> View:
        """The cheapest one: labeled images are seen as a part of the pool."""
        return WeakView(size=augment.size)


def simclr_view(augment: AugmentConfig, smallest_crop: float) -> AugmentConfig:
    """SimCLR's view: crop, flip, jitter, grayscale. All but crop and grayscale is as the settings say."""
    scale = (smallest_crop, 1.0)
    return replace(augment, scale=scale, grayscale=GRAYSCALE, solarize=0.0, equalize=0.0)


def slow_copy(encoder: Encoder) -> Encoder:
    """A copy that is not trained and follows the encoder by `follow`.

    Unlike models.ema.EMA it has the momentum of the papers from the first step on, and in training its batch
    norm has the statistics of the batch.
    """
    return copy.deepcopy(encoder).requires_grad_(False)


@torch.no_grad()
def follow(slow: nn.Module, network: nn.Module, momentum: float) -> None:
    """Weights of the copy <- momentum times its own + (1 - momentum) times the network's; no statistics."""
    pairs = list(zip(slow.parameters(), network.parameters(), strict=True))
    trained = [pair for pair in pairs if pair[1].requires_grad]  # a frozen backbone is the same in both
    copies: list[Tensor] = [copied for copied, _ in trained]
    weights: list[Tensor] = [weight for _, weight in trained]
    torch._foreach_lerp_(copies, weights, 1 - momentum)
