"""Pictures on disk in the place of a tensor of images: for sets that do not fit into memory."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from ropaws.data.cache import SquareCache
from ropaws.data.pictures import Picture, UnreadableError, read_or_error, read_squares

MOST_TRIES = 100  # neighbours that are tried in the place of an unreadable picture


class PictureStack:
    """Indexed like a tensor (n, 3, size, size) of uint8, but read when asked for."""

    def __init__(
        self,
        pictures: Sequence[Picture],
        size: int,
        *,
        cache: SquareCache | None = None,
        workers: int | None = None,
    ) -> None:
        self.pictures = tuple(pictures)
        self.size = size
        self.cache = cache
        self.workers = workers

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.pictures), 3, self.size, self.size))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """Read in worker processes; a picture that cannot be read is an error."""
        chosen = self._chosen(index)
        squares: list[NDArray[np.uint8]] = []
        results = read_squares(chosen, self.size, cache=self.cache, workers=self.workers)
        for picture, result in zip(chosen, results, strict=True):
            if isinstance(result, UnreadableError):
                raise ValueError(f"{picture} cannot be read any more ({result}); restore it")
            squares.append(result)
        return stack_squares(squares, self.size)

    def unreadable(self, index: Tensor) -> dict[int, str]:
        """Which of these positions cannot be read, and why."""
        results = read_squares(self._chosen(index), self.size, cache=self.cache, workers=self.workers)
        pairs = zip(index.tolist(), results, strict=True)
        return {position: str(result) for position, result in pairs if isinstance(result, UnreadableError)}

    def read(self, index: Tensor, *, strict: bool = False) -> tuple[Tensor, dict[str, str]]:
        """Read in this process, going on where a picture is bad: the next good one takes its place.

        A rule without chance, so that a run that is resumed sees the same pictures.
        ->  images (k, 3, size, size), and the unreadable ones with the reason of each
        """
        images = torch.empty(len(index), self.size, self.size, 3, dtype=torch.uint8)
        if get_worker_info() is not None:
            images.share_memory_()  # filled where it will be sent from: one copy less
        failures: dict[str, str] = {}
        for place, position in zip(images.numpy(), index.tolist(), strict=True):
            for step in range(MOST_TRIES):
                picture = self.pictures[(position + step) % len(self.pictures)]
                result = read_or_error(picture, self.size, self.cache)
                if not isinstance(result, UnreadableError):
                    place[:] = result
                    break
                if strict:
                    raise ValueError(f"{picture} cannot be read any more ({result}); restore it")
                failures[str(picture)] = str(result)
            else:
                raise ValueError(f"{MOST_TRIES} pictures in a row cannot be read, the last is {picture}")
        return images.permute(0, 3, 1, 2), failures

    def digest(self) -> str:
        """A fingerprint from names and file sizes: reading every picture for it would take too long."""
        state = hashlib.blake2b(str(self.size).encode(), digest_size=16)
        for picture in self.pictures:
            state.update(os.fsencode(str(picture)))
            state.update(str(picture.stat().st_size if isinstance(picture, Path) else "").encode())
        return state.hexdigest()

    def _chosen(self, index: Tensor | slice) -> Sequence[Picture]:
        if isinstance(index, slice):
            return self.pictures[index]
        return [self.pictures[position] for position in index.tolist()]


def stack_squares(squares: Iterable[NDArray[np.uint8]], size: int) -> Tensor:
    """(size, size, 3) each  ->  (n, 3, size, size), the channels of a pixel side by side in memory"""
    listed = list(squares)
    stacked = np.empty((len(listed), size, size, 3), np.uint8)
    for place, square in zip(stacked, listed, strict=True):
        place[:] = square
    return torch.from_numpy(stacked).permute(0, 3, 1, 2)
