"""Wide residual networks for small images (Zagoruyko & Komodakis, 2016), pre-activation."""

import itertools

import torch.nn.functional as F
from torch import Tensor, nn


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
