"""Whole images as squares, so that they can be stacked: squeezed along their longer side."""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Crop = Literal["whole", "center"]

GAP = 3  # times the target that a side may have before it is reduced by a whole factor, which is faster


class Whole(NamedTuple):
    """A whole image, squeezed to a square. The image of a square is its central square, bit by bit."""

    pixels: NDArray[np.uint8]  # (size, size, 3)
    aspect: float  # width / height of the image


def squeeze(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """All of an RGB image, each side resized on its own with an antialiased filter.   ->  (size, size, 3)

    By torch, which is faster than Pillow at this. It is loaded here and not above: workers that read
    central squares alone start faster without it.
    """
    import torch
    import torch.nn.functional as F

    factors = tuple(max(1, side // (size * GAP)) for side in image.size)
    if factors != (1, 1):
        image = image.reduce(factors)  # type: ignore[arg-type]
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]  # channels of a pixel side by side
    squeezed = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    found: NDArray[np.uint8] = squeezed[0].permute(1, 2, 0).contiguous().numpy()
    return found
