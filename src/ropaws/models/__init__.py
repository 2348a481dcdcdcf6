"""Networks, and the settings that choose one."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ropaws.models.encoder import Encoder
from ropaws.models.heads import prediction_head, projection_head
from ropaws.models.resnet import resnet18, resnet50
from ropaws.models.small_convnet import SmallConvNet
from ropaws.models.wide_resnet import WideResNet
from ropaws.naming import nearest

__all__ = ["BACKBONES", "Encoder", "ModelConfig", "backbone_builder", "build_encoder"]

BACKBONES: dict[str, Callable[[int], nn.Module]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "small": lambda channels: SmallConvNet(channels=channels),
    "wrn-28-2": lambda channels: WideResNet(28, 2, channels),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    backbone: str = "wrn-28-2"
    """small (or small-WIDTH; 24), wrn-DEPTH-WIDTH, resnet18 or resnet50."""
    projection_hidden: int = 128
    """Width of the projection head's two hidden layers."""
    projection_dims: int = 128
    """Dimensions of the embedding."""
    prediction_hidden: int | None = None
    """Hidden width of the prediction head; None for no such head (then z = h)."""

    def __post_init__(self) -> None:
        for name in ("projection_hidden", "projection_dims", "prediction_hidden"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.{name} must be at least 1, got {value}")
        backbone_builder(self.backbone)


def backbone_builder(name: str) -> Callable[[int], nn.Module]:
    """The function that makes a backbone for a number of image channels."""
    if name in BACKBONES:
        return BACKBONES[name]
    if match := re.fullmatch(r"wrn-(\d+)-(\d+)", name):
        depth, width = map(int, match.groups())
        return lambda channels: WideResNet(depth, width, channels)
    if match := re.fullmatch(r"small-([1-9]\d*)", name):
        first = int(match[1])
        return lambda channels: SmallConvNet((first, 2 * first, 4 * first), channels)
    raise ValueError(
        f"model.backbone: unknown backbone {name!r}, did you mean {nearest(name, BACKBONES)!r}?"
        f" Known: {', '.join(BACKBONES)}"
    )


def build_encoder(config: ModelConfig, *, channels: int, autocast: bool = False) -> Encoder:
    """A new network with random weights from torch's global generator."""
    backbone = backbone_builder(config.backbone)(channels)
    features = int(backbone.features)  # type: ignore[arg-type]
    projection = projection_head(features, config.projection_hidden, config.projection_dims)
    prediction: nn.Module = nn.Identity()
    if config.prediction_hidden is not None:
        prediction = prediction_head(config.projection_dims, config.prediction_hidden)
    encoder = Encoder(backbone, projection, prediction, autocast=autocast)
    return encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
