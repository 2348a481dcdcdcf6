"""Images that are copies of one another in another size or quality, found by their thumbnails.

Thousands of look-alikes make millions of pairs. So pairs are never listed: blocks of images are compared, and
those that are alike are joined to groups. Memory grows with the number of images alone.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

THUMB = 16  # pixels per side of a thumbnail
# Images whose thumbnails correlate like this, with the same brightness, are taken for copies of one
# another. Flat ones have no structure to compare.
ALIKE, SAME_BRIGHTNESS, FLAT = 0.99, 10.0, 4.0
BLOCK = 1024  # images that are compared with as many others at a time


class Look(NamedTuple):
    """What one image is like."""

    path: str
    side: int  # shorter side in pixels; 0 if it cannot be read
    mark: str  # equal for images with the same pixels
    thumb: bytes  # THUMB x THUMB gray pixels
    reason: str  # why it cannot be read


class Groups:
    """Positions 0 to n - 1, joined to groups."""

    def __init__(self, count: int) -> None:
        self._leader = np.arange(count)  # of the group of each, or a step on the way to it

    def join(self, rows: NDArray[np.int64], columns: NDArray[np.int64], alike: NDArray[np.bool_]) -> None:
        """Join each position in rows with each in columns where alike (r, c) says so."""
        from scipy.sparse import coo_matrix  # slow to load
        from scipy.sparse.csgraph import connected_components

        row, column = alike.nonzero()
        if len(row) == 0:
            return
        # One step from each member to the first of its part is enough, whatever the number of pairs.
        ends = (len(rows) + len(columns),) * 2
        _, part = connected_components(
            coo_matrix((np.ones(len(row), np.int8), (row, len(rows) + column)), ends), directed=False
        )
        places = np.concatenate([rows, columns])
        joined = np.zeros(len(places), bool)
        joined[row], joined[len(rows) + column] = True, True
        first: dict[int, int] = {}
        for place, number in zip(places[joined].tolist(), part[joined].tolist(), strict=True):
            self._join_pair(first.setdefault(number, place), place)

    def _join_pair(self, one: int, other: int) -> None:
        one, other = self._find(one), self._find(other)
        self._leader[max(one, other)] = min(one, other)

    def _find(self, position: int) -> int:
        while (leader := int(self._leader[position])) != position:
            self._leader[position] = self._leader[leader]  # halves the way for the next one
            position = leader
        return position

    def listed(self) -> list[list[int]]:
        """Groups of two or more, each in order."""
        found: dict[int, list[int]] = {}
        for position in range(len(self._leader)):
            found.setdefault(self._find(position), []).append(position)
        return [group for group in found.values() if len(group) > 1]


class Tile(NamedTuple):
    """Some images against some others."""

    rows: NDArray[np.int64]  # (r,) positions
    columns: NDArray[np.int64]  # (c,)
    alike: NDArray[np.bool_]  # (r, c) nearly the same, but not the very same pixels


def near_copies(some: Sequence[Look], others: Sequence[Look]) -> Iterator[Tile]:
    """Which images are much like which others, a block at a time; blocks without any are left out."""
    marks = {look.mark: number for number, look in enumerate(others)}
    left, right = _structure(some, marks), _structure(others, marks)
    for rows in _blocks(len(some)):
        pattern = left.pattern(rows)
        for columns in _blocks(len(others)):
            alike = pattern @ right.pattern(columns).T > ALIKE
            alike &= abs(left.brightness[rows, None] - right.brightness[columns]) < SAME_BRIGHTNESS
            alike &= left.mark[rows, None] != right.mark[columns]
            if alike.any():
                yield Tile(rows, columns, alike)


def _blocks(count: int) -> list[NDArray[np.int64]]:
    return [np.arange(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK)]


class _Structure(NamedTuple):
    thumbs: NDArray[np.uint8]  # (n, THUMB^2)
    brightness: NDArray[np.float32]  # (n,)
    mark: NDArray[np.int64]  # (n,) equal for the same pixels, -1 for pixels that no other has

    def pattern(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Unit rows, or zero for flat images. Computed when asked for: of all they take a kilobyte each.

        (r,)  ->  (r, THUMB^2)
        """
        pattern = self.thumbs[rows].astype(np.float32)
        pattern -= self.brightness[rows, None]
        length = np.linalg.norm(pattern, axis=1, keepdims=True)
        pattern /= np.where(length < FLAT * THUMB, np.inf, length)  # FLAT is a standard deviation
        return pattern


def _structure(looks: Sequence[Look], marks: dict[str, int]) -> _Structure:
    empty = bytes(THUMB * THUMB)
    pixels = np.frombuffer(b"".join(look.thumb or empty for look in looks), np.uint8)
    thumbs = pixels.reshape(len(looks), THUMB * THUMB)
    brightness = np.empty(len(looks), np.float32)
    for rows in _blocks(len(looks)):
        brightness[rows] = thumbs[rows].astype(np.float32).mean(axis=1)
    return _Structure(thumbs, brightness, np.array([marks.get(look.mark, -1) for look in looks], np.int64))
