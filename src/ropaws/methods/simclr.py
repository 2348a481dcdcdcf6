"""SimCLR (Chen et al., ICML 2020): two views of an image attract each other and repel all other images.

L = mean over all views i of  -log( exp(z_i z_j / T) / sum_{k != i} exp(z_i z_k / T) ),  j the other view of i

z are unit rows after the projection head, k runs over the views of the whole batch in all processes. The
paper's CIFAR settings: T 0.5, batch 512, LARS at 1.0 for that batch with weight decay 1e-4, 1000 epochs,
views by crop, flip, jitter of strength 0.5 and grayscale, no blur. On ImageNet T is 0.1, with blur.

Deviations: the head has three layers as in SimCLR v2, of the width of `--model.projection-hidden`, with
batch norm between them only; no warm-up, which the paper has for 10 epochs (`--optim.warmup`); the rate does
not grow with the batch. Predictions are those of soft nearest neighbors on z. There is no detector:
similarity to the labeled images scores in-class images. On data that are features the head is trained.

MoCo-v2, BYOL, SwAV and others share its two views, its loss, and a slow copy of a network. They train the
encoder: backbone and projection head, or the projection head alone on data that are features. Another run
takes it over by `--init RUN/model.safetensors`, or `ropaws finetune RUN`.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.core.distributed import all_gather
from ropaws.core.records import Batch, Losses
from ropaws.embedding.backbones import Encoder
from ropaws.methods.method import Method, check_positive
from ropaws.pool.augment import AugmentConfig, View
from ropaws.pool.rand_augment import WeakView


def nt_xent(first: Tensor, second: Tensor, *, temperature: float) -> Tensor:
    """Normalized cross-entropy of finding the other view of an image.   both (n, d) unit rows  ->  ()"""
    views = torch.cat([first, second])
    itself = torch.eye(len(views), dtype=torch.bool, device=views.device)
    similarities = (views @ views.T / temperature).masked_fill(itself, -torch.inf)
    partner = torch.arange(len(views), device=views.device).roll(len(first))
    return F.cross_entropy(similarities, partner)


def with_contrast(
    losses: Losses, first: Tensor, second: Tensor, *, weight: float, temperature: float
) -> Losses:
    """Add the contrast of the two views to the losses; with weight 0 they stay as they were.

    first, second (u, d): unit rows of this process; those of all processes repel
    """
    if weight == 0:
        return losses
    contrast = nt_xent(all_gather(first), all_gather(second), temperature=temperature)
    parts = {**losses.parts, "contrast": contrast.detach()}
    return losses._replace(total=losses.total + weight * contrast, parts=parts)


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


@dataclass(frozen=True, kw_only=True)
class SimCLR(TwoViewMethod):
    """Pretraining without labels: views of an image attract, all others repel."""

    temperature: float = 0.5
    """Of the similarities; lower looks at the nearest images only (T)."""

    optim: ClassVar[Mapping[str, Any]] = {"name": "lars", "peak": 1.0, "weight_decay": 1e-4}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "temperature")

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        first, second = model([batch.views["first"], batch.views["second"]])
        loss = nt_xent(all_gather(first.h), all_gather(second.h), temperature=self.temperature)
        return Losses(loss, {"contrast": loss.detach()})
