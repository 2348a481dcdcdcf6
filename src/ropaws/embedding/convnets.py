"""ResNet-18 and ResNet-50 with torchvision's parameter names, so that its weight files fit."""

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

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
