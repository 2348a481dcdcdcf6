"""A residual convnet that trains in minutes on a laptop, for images of about 28 to 64 pixels."""

import torch.nn.functional as F
from torch import Tensor, nn


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
