"""Fine-tuning and linear probe as in the paper: a linear classifier on the first projection layer."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.data.augment import AugmentConfig, Normalization, augment, centre_view
from ropaws.data.corpus import Images
from ropaws.data.randomness import FINE_TUNE, generator
from ropaws.models import Encoder

FIRST_LAYER = 3  # of the projection head: Linear, BN, ReLU
HELD_OUT = 0.2  # share of the labelled images on which settings are chosen


@dataclass(frozen=True, kw_only=True)
class FineTuneConfig:
    """SGD with Nesterov momentum on the labelled images, random crops and flips."""

    rate: float = 0.05
    """Learning rate of the first step; falls to zero on a cosine."""
    epochs: int = 30
    """Times through the labelled images."""
    batch: int = 1024
    """Images a step; fewer where there are fewer."""
    linear: bool = False
    """Train the linear layer alone and leave the network as it is."""

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be positive, got {self.rate}")
        for name in ("epochs", "batch"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class LabeledImages(NamedTuple):
    images: Tensor  # (n, channels, h, w) uint8
    labels: Tensor  # (n,) class


class Classifier(nn.Module):
    """The backbone and first projection layer of an encoder, and a linear layer that starts at zero."""

    def __init__(self, encoder: Encoder, classes: int, *, linear: bool) -> None:
        super().__init__()
        encoder = copy.deepcopy(encoder)
        layers = list(encoder.projection.children())[:FIRST_LAYER]
        self.features = nn.Sequential(encoder.backbone, *layers)
        self.linear = nn.Linear(int(layers[0].out_features), classes)  # type: ignore[arg-type]
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.frozen = linear
        self.features.requires_grad_(not linear)

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        if self.frozen:
            self.features.eval()  # its batch statistics stay too
        return self

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.features(images.contiguous(memory_format=torch.channels_last)))
        return logits


def fine_tune(
    encoder: Encoder,
    data: LabeledImages,
    config: FineTuneConfig,
    *,
    classes: int,
    view: AugmentConfig,
    normalize: Normalization,
    seed: int,
) -> Classifier:
    """Train a copy of the encoder's backbone with a new classifier; the encoder is left alone."""
    device = next(encoder.parameters()).device
    model = Classifier(encoder, classes, linear=config.linear).to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=config.rate, momentum=0.9, nesterov=True)
    steps = list(_batches(len(data.labels), config, seed))
    for step, rows in enumerate(steps):
        optimizer.param_groups[0]["lr"] = config.rate * (1 + math.cos(math.pi * step / len(steps))) / 2
        images = data.images[rows].to(device)
        views = augment(images, view, normalize, generator(seed, FINE_TUNE, step + 2))
        loss = F.cross_entropy(model(views), data.labels[rows].to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return model.eval()


def _batches(count: int, config: FineTuneConfig, seed: int) -> Iterator[Tensor]:
    """Every image once an epoch; a last batch of one is left out, as it has no batch statistics."""
    random = generator(seed, FINE_TUNE, 0)
    for _ in range(config.epochs):
        for rows in torch.randperm(count, generator=random).split(config.batch):
            if len(rows) > 1 or count == 1 or config.linear:
                yield rows


@torch.no_grad()
def class_probabilities(
    model: Classifier, images: Images, *, size: int, normalize: Normalization, batch: int = 512
) -> Tensor:
    """Of the central squares.   (n, channels, h, w) uint8  ->  (n, classes) on the CPU"""
    device = next(model.parameters()).device
    parts = [
        model(centre_view(images[start : start + batch].to(device), size, normalize)).softmax(dim=1).cpu()
        for start in range(0, len(images), batch)
    ]
    return torch.cat(parts)


def hold_out(labels: Tensor, *, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows to choose settings on: a fifth of each class that has two or more."""
    random = generator(seed, FINE_TUNE, 1)
    kept, held = [], []
    for label in labels.unique():
        rows = (labels == label).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=random)]
        count = max(1, round(HELD_OUT * len(rows))) if len(rows) > 1 else 0
        held.append(rows[:count])
        kept.append(rows[count:])
    return torch.cat(kept), torch.cat(held)


def plain_view(config: AugmentConfig) -> AugmentConfig:
    """Random crop and flip of the large views, and nothing else."""
    return AugmentConfig(size=config.size, scale=config.scale, jitter=0.0, solarize=0.0, equalize=0.0)
