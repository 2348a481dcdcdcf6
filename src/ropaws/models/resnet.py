"""ResNet-18 and ResNet-50 with torchvision's parameter names, so that its weight files fit."""

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
