"""Images on disk in the place of a tensor of images: for sets that do not fit into memory."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropaws.core.cores import own_cores
from ropaws.pool.content import ImageRef, UnreadableError
from ropaws.pool.decoding import ReadBatch, ReadRequest, read_batch, read_or_error, read_squares
from ropaws.pool.square_cache import Found, SquareCache, Wanted
from ropaws.pool.whole_images import Crop

MOST_TRIES = 100  # neighbors that are tried in the place of an unreadable image


class Completed(NamedTuple):
    """Images that were read, each bad one replaced by the next good one."""

    images: Tensor  # (k, 3, size, size) uint8
    aspects: Tensor | None  # (k,) of whole images; None for central squares
    positions: Tensor  # (k,) of the images that are shown
    failures: dict[str, str]  # unreadable files, and why


class ImageStack:
    """Indexed like a tensor (n, 3, size, size) of central squares of uint8, but read when asked for.

    crop: what random views are made of; where it is "whole", a request may ask for whole images.
    """

    def __init__(
        self,
        files: Sequence[ImageRef],
        size: int,
        *,
        crop: Crop = "center",
        cache: SquareCache | None = None,
        workers: int | None = None,
    ) -> None:
        self.crop = crop
        self.files = tuple(files)
        self.size = size
        self.cache = cache
        self.workers = workers

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.files), 3, self.size, self.size))

    @property
    def worker_count(self) -> int:
        return self.workers or own_cores()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """Read in worker processes; an image that cannot be read is an error."""
        chosen = self._chosen(index)
        squares: list[NDArray[np.uint8]] = []
        results = read_squares(chosen, self.size, cache=self.cache, workers=self.workers)
        for file, result in zip(chosen, results, strict=True):
            if isinstance(result, UnreadableError):
                raise _gone(file, result)
            squares.append(result)
        return stack_squares(squares, self.size)

    def unreadable(self, index: Tensor) -> dict[int, str]:
        """Which of these positions cannot be read, and why."""
        results = read_squares(self._chosen(index), self.size, cache=self.cache, workers=self.workers)
        pairs = zip(index.tolist(), results, strict=True)
        return {position: str(result) for position, result in pairs if isinstance(result, UnreadableError)}

    def request(self, index: Tensor, wanted: Wanted = "center") -> ReadRequest:
        """What read_batch needs for these positions, in any process."""
        return ReadRequest(self._chosen(index), self.size, wanted)

    def read(self, index: Tensor) -> tuple[Tensor, dict[str, str]]:
        """Read in this process.   ->  squares (k, 3, size, size), and the reasons of unreadable ones"""
        found = self.complete(index, read_batch(self.request(index), self.cache))
        return found.images, found.failures

    def complete(self, index: Tensor, result: ReadBatch, *, strict_from: int | None = None) -> Completed:
        """What was read, with the next good image in the place of each bad one.

        The rule needs no random choice, so a resumed run sees the same images. From row strict_from on a bad
        image is an error.
        """
        failures: dict[str, str] = {}
        positions = index.clone()
        for row, reason in result.unreadable.items():
            position = int(index[row])
            if strict_from is not None and row >= strict_from:
                raise _gone(self.files[position], reason)
            failures[str(self.files[position])] = reason
            wanted: Wanted = "center" if result.aspects is None else "whole"
            positions[row], found = self._next_good(position, failures, wanted)
            result.squares[row] = found.square
            if result.aspects is not None:
                result.aspects[row] = found.aspect
        aspects = None if result.aspects is None else torch.from_numpy(result.aspects)
        return Completed(torch.from_numpy(result.squares).permute(0, 3, 1, 2), aspects, positions, failures)

    def _next_good(self, position: int, failures: dict[str, str], wanted: Wanted) -> tuple[int, Found]:
        for step in range(1, MOST_TRIES):
            following = (position + step) % len(self.files)
            file = self.files[following]
            found = read_or_error(file, wanted, self.size, self.cache)
            if not isinstance(found, UnreadableError):
                return following, found
            failures[str(file)] = str(found)
        raise ValueError(f"{MOST_TRIES} images in a row cannot be read, the last is {file}")

    def digest(self) -> str:
        """A fingerprint from names and file sizes: reading every image for it would take too long.

        A name is that of the file and of its folder, so that images may be moved together.
        """
        state = hashlib.blake2b(str(self.size).encode(), digest_size=16)
        for file in self.files:
            state.update(os.fsencode("/".join(str(file).rsplit(os.sep, 2)[-2:])))
            state.update(str(file.stat().st_size if isinstance(file, Path) else "").encode())
        return state.hexdigest()

    def _chosen(self, index: Tensor | slice) -> list[ImageRef]:
        if isinstance(index, slice):
            return list(self.files[index])
        return [self.files[position] for position in index.tolist()]


def _gone(file: ImageRef, reason: object) -> ValueError:
    return ValueError(f"{file} cannot be read any more ({reason}); restore it")


def stack_squares(squares: Iterable[NDArray[np.uint8]], size: int) -> Tensor:
    """(size, size, 3) each  ->  (n, 3, size, size), the channels of a pixel side by side in memory"""
    listed = list(squares)
    stacked = np.empty((len(listed), size, size, 3), np.uint8)
    for place, square in zip(stacked, listed, strict=True):
        place[:] = square
    return torch.from_numpy(stacked).permute(0, 3, 1, 2)
