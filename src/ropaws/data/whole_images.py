"""Images in memory of which random views may show every part."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


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
        """With other images behind them, of which there are squares alone."""
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
