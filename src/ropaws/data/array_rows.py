"""Features in an array that may be larger than memory: a block at a time is read and converted."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropaws.data.augment import View
from ropaws.data.features import CHECKED, Features


class ArrayRows(Features):
    """Rows of an array (n, d), memory-mapped or not. Nothing is held beside the rows that are asked for.

    Args:
        array: The array.
        convert: Makes float32 features (k, d) of k of its rows.
        rows: (m,) the rows of the array that count, in this order; None for all.
    """

    def __init__(
        self,
        array: NDArray[Any],
        convert: Callable[[NDArray[Any]], Tensor],
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        self.array = array
        self.convert = convert
        self.rows = rows

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.array if self.rows is None else self.rows), self.array.shape[1]))

    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        chosen = index if isinstance(index, slice) else index.cpu().numpy()
        return self.convert(self.array[chosen if self.rows is None else self.rows[chosen]])

    @property
    def view_count(self) -> int:
        return 1

    def views(self, index: Tensor, kind: View | None = None, chosen: Tensor | None = None) -> Tensor:
        center = self[index][:, None]
        return center if chosen is None else center.expand(-1, chosen.shape[1], -1)

    def digest(self) -> str:
        """That of the same rows in memory."""
        state = hashlib.blake2b(str(tuple(self.shape)).encode(), digest_size=16)
        for part in self.blocks():
            state.update(part.contiguous().numpy().data)
        return state.hexdigest()

    def blocks(self, size: int = CHECKED) -> Iterator[Tensor]:
        """All rows in their order.   ->  (at most size, d) each"""
        for start in range(0, len(self), size):
            yield self[start : start + size]


def unreadable_rows(array: NDArray[Any], *, block: int = CHECKED) -> NDArray[np.int64]:
    """Rows with values that are not finite, found without a copy of the array.   (n, d)  ->  (k,)"""
    parts = [
        start + np.flatnonzero(~np.isfinite(array[start : start + block]).all(axis=1))
        for start in range(0, len(array), block)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
