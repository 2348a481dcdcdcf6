"""Images in memory of which random views may show every part."""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

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


class WholeImages:
    """Indexed like the tensor of central squares; the whole images that are not square are kept besides.

    Args:
        squares: Central squares (n, channels, size, size), uint8.
        wholes: The whole images that are not square, squeezed to squares (m, channels, size, size).
        place: Row of each image in wholes, -1 for square images (n,).
        aspects: Width / height of each image (n,).
    """

    def __init__(self, squares: Tensor, wholes: Tensor, place: Tensor, aspects: Tensor) -> None:
        self.squares = squares
        self.wholes = wholes
        self.place = place.cpu()
        self.aspects = aspects.cpu()  # views are drawn there

    @property
    def shape(self) -> torch.Size:
        return self.squares.shape

    def __len__(self) -> int:
        return len(self.squares)

    def __getitem__(self, index: Any, /) -> Tensor:
        """Central squares.   (k,)  ->  (k, channels, size, size)"""
        return self.squares[index]

    def whole(self, index: Tensor) -> "WholeBatch":
        """Whole images."""
        device, index = self.squares.device, index.cpu()
        pixels = self.squares[index.to(device)]
        place = self.place[index]
        rows = (place >= 0).nonzero().squeeze(1)
        pixels.index_copy_(0, rows.to(device), self.wholes[place[rows].to(device)])
        return WholeBatch(pixels, self.aspects[index])

    def to(self, device: torch.device) -> "WholeImages":
        return WholeImages(self.squares.to(device), self.wholes.to(device), self.place, self.aspects)

    def followed_by(self, squares: Tensor) -> "WholeImages":
        """Append other images, of which there are squares alone."""
        place, ones = self.place.new_full((len(squares),), -1), self.aspects.new_ones(len(squares))
        return WholeImages(
            torch.cat([self.squares, squares]),
            self.wholes,
            torch.cat([self.place, place]),
            torch.cat([self.aspects, ones]),
        )

    def chosen(self, index: Tensor) -> "WholeImages":
        """These images alone."""
        return WholeImages(self.squares[index], self.wholes, self.place[index], self.aspects[index])


class WholeBatch(NamedTuple):
    """Images of which random views are made."""

    pixels: Tensor  # (k, channels, h, w) uint8
    aspects: Tensor | None = None  # (k,) width / height, on the CPU; None: as h and w say
