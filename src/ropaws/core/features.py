"""Features of images in the place of their pixels: rows in memory, or in the segments of a cache on disk."""

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

CHECKED = 1 << 14  # rows that are looked at together: copies of all would take too much memory
MODERATE = 1e9  # size of features, and its inverse, up to which they can be squared and summed in float32
DIRECTIONS = 128  # main directions that are kept of points
DIRECTIONS_SAMPLE = 20_000  # rows that they are fitted to, at most
IN_MEMORY = 1 << 29  # bytes of the features of a run up to which they are held


class Features(ABC):
    """What a backbone says of images, indexed like the images: a center view and random views of each."""

    made_from: str = ""  # digest of backbone and views; empty for features that a person brings

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Images and features of each.   (n, d)"""

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        """Features of the center views.   (k,)  ->  (k, d) float32"""

    @property
    @abstractmethod
    def view_count(self) -> int:
        """Views of each image to learn from: random ones; below two of them, the center view too."""

    @abstractmethod
    def views(self, index: Tensor, kind: object = None, chosen: Tensor | None = None) -> Tensor:
        """Features of the views to learn from, the center view first if it is one.   (k,)  ->  (k, v, d)

        kind: of view, where there are several kinds; see SeveralKinds. chosen (k, m): the views to read of
        each image, by default all of them.
        """

    @abstractmethod
    def digest(self) -> str:
        """A short fingerprint; other features, or the same in another order, give another one."""


class FeatureRows(Features):
    """Features in memory.

    Args:
        center: Of the center views (n, d).
        views: Of random views (n, v, d), if there are any.

    Raises:
        ValueError: They are not finite, or do not fit each other.
    """

    def __init__(self, center: Tensor, views: Tensor | None = None) -> None:
        check_features(center)
        if views is not None and (views.ndim != 3 or views.shape[::2] != center.shape or not views.shape[1]):
            raise ValueError(
                f"views must be (n, views, d) with n and d of features {tuple(center.shape)},"
                f" got {tuple(views.shape)}"
            )
        if views is not None:
            check_features(views.flatten(1), "views")
        self.center = center.float()
        self.random_views = None if views is None else views

    @property
    def shape(self) -> torch.Size:
        return self.center.shape

    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        return self.center[index]

    @property
    def view_count(self) -> int:
        return 1 if self.random_views is None else max(2, self.random_views.shape[1])

    def views(self, index: Tensor, kind: object = None, chosen: Tensor | None = None) -> Tensor:
        if self.random_views is not None and self.random_views.shape[1] > 1:
            every = torch.arange(self.view_count).expand(len(index), -1)
            return self.random_views[index[:, None], every if chosen is None else chosen].float()
        views = self.center[index][:, None]
        if self.random_views is not None:
            views = torch.cat([views, self.random_views[index].float()], dim=1)
        return views if chosen is None else views[torch.arange(len(index))[:, None], chosen]

    def digest(self) -> str:
        state = hashlib.blake2b(str(tuple(self.shape)).encode(), digest_size=16)
        for part in (self.center, self.random_views):
            if part is not None:
                state.update(part.contiguous().numpy().data)
        return state.hexdigest()


class FeatureBank(Features):
    """Features in the segments of a cache, memory-mapped: beyond IN_MEMORY, memory does not grow with them.

    Args:
        segments: Arrays (m, v + 1, d) of float16, the center view first.
        where: Segment and row of each image (n, 2).
        made_from: Digest of backbone and views.
    """

    def __init__(self, segments: Sequence[NDArray[np.float16]], where: NDArray[np.int64], made_from: str):
        self.segments = segments
        self.where = where
        self.made_from = made_from

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.where), self.segments[0].shape[2] if self.segments else 0))

    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        return self._read(index, slice(0, 1))[:, 0]

    @property
    def view_count(self) -> int:
        return self._views if self._views > 1 else self._views + 1

    def views(self, index: Tensor, kind: object = None, chosen: Tensor | None = None) -> Tensor:
        first = 1 if self._views > 1 else 0
        if chosen is None:
            return self._read(index, slice(first, None))
        if self._held is not None:
            return self._held[index[:, None], chosen + first].float()
        rows = torch.arange(len(index))[:, None]
        return self._read(index, slice(first, None))[rows, chosen]

    def digest(self) -> str:
        state = hashlib.blake2b(f"{self.made_from} {tuple(self.shape)}".encode(), digest_size=16)
        for rows in torch.arange(len(self)).split(4096):
            state.update(self._read(rows, slice(None)).numpy().data)
        return state.hexdigest()

    @functools.cached_property
    def _held(self) -> Tensor | None:
        """All of them in memory, where they are few: a step then reads what it draws, and nothing else."""
        if len(self) * (self._views + 1) * self.shape[1] * 2 > IN_MEMORY or len(self) == 0:
            return None
        held = np.empty((len(self), self._views + 1, self.shape[1]), np.float16)
        for number, mine in _by_segment(self.where):
            held[mine] = self.segments[number][self.where[mine, 1]]
        return torch.from_numpy(held)

    @property
    def _views(self) -> int:
        return self.segments[0].shape[1] - 1 if self.segments else 0

    def _read(self, index: Tensor | slice, views: slice) -> Tensor:
        chosen = self.where[index if isinstance(index, slice) else index.cpu().numpy()]
        count = len(range(self._views + 1)[views])
        found = np.empty((len(chosen), count, self.shape[1]), np.float32)
        for number, mine in _by_segment(chosen):
            found[mine] = self.segments[number][chosen[mine, 1], views]
        return torch.from_numpy(found)


def _by_segment(where: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each segment that is named, and the positions that name it.   where (n, 2)"""
    if not len(where):
        return
    order = np.argsort(where[:, 0], kind="stable")
    numbers = where[order, 0]
    ends = np.flatnonzero(np.diff(numbers)) + 1
    for mine in np.split(order, ends):
        yield int(where[mine[0], 0]), mine


class SeveralKinds(Features):
    """Features of weak and strong views, each of its own.

    Args:
        kinds: The features by kind of view (see kind_of); the center view is that of the first.
    """

    def __init__(self, kinds: Mapping[Any, Features]) -> None:
        self.kinds: dict[object, Features] = dict(kinds)
        self.first = next(iter(kinds.values()))
        self.made_from = self.first.made_from

    @property
    def shape(self) -> torch.Size:
        return self.first.shape

    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        return self.first[index]

    @property
    def view_count(self) -> int:
        return self.first.view_count

    def views(self, index: Tensor, kind: object = None, chosen: Tensor | None = None) -> Tensor:
        return self.kinds[kind].views(index, chosen=chosen)

    def digest(self) -> str:
        state = hashlib.blake2b(digest_size=16)
        for features in self.kinds.values():
            state.update(features.digest().encode())
        return state.hexdigest()


def check_features(values: Tensor, name: str = "features") -> None:
    """Raise an error unless these are rows of finite numbers."""
    if values.ndim != 2 or 0 in values.shape[1:] or not values.is_floating_point():
        raise ValueError(
            f"{name} must be an array (n, d) of floating-point numbers, got {values.dtype}"
            f" {tuple(values.shape)}"
        )
    if all(bool(part.sum().isfinite()) for part in values.split(CHECKED)):
        return  # one value that is not finite would show in the sum
    parts = [(~part.isfinite()).any(dim=1) for part in values.split(CHECKED)]
    bad = torch.cat(parts).nonzero()
    if len(bad):
        raise ValueError(
            f"{name}: row {int(bad[0])} is not finite ({len(bad)} such rows); repair or remove them"
        )


def moderate_rows(values: Tensor) -> Tensor:
    """Features that a person brings, of any scale: only their direction counts.

    Rows whose squares float32 cannot hold are scaled to 1 at most; all others stay as they are, bit by bit.
    (..., d)  ->  (..., d)
    """
    if len(values) == 0:
        return values
    largest = torch.cat([part.abs().amax(dim=-1, keepdim=True) for part in values.split(CHECKED)])
    return moderate_by(values, largest) if bool(_is_extreme(largest).any()) else values


def moderate_by(values: Tensor, largest: Tensor) -> Tensor:
    """moderate_rows, with the largest magnitude of each row.   (..., d), (..., 1)  ->  (..., d)"""
    return torch.where(_is_extreme(largest), values / largest, values)


def _is_extreme(largest: Tensor) -> Tensor:
    return (largest > 0) & ((largest > MODERATE) | (largest < 1 / MODERATE))


def unit_mean(features: Features, *, block: int = 2048) -> Tensor:
    """Mean of the center features, scaled to unit length.   ->  (d,) float64"""
    total = torch.zeros(features.shape[1], dtype=torch.float64)
    for start in range(0, len(features), block):
        total += F.normalize(features[start : start + block], dim=1).sum(dim=0)
    return total / max(1, len(features))


def principal_components(features: Features, count: int, *, block: int = 2048) -> tuple[Tensor, Tensor]:
    """Mean and main directions of the center features, scaled to unit length, from one pass over them.

    Directions are unit rows by falling variance, each with its largest entry positive; rows of zeros where
    there are fewer directions than asked for.   ->  (d,), (count, d) float64
    """
    dims = features.shape[1]
    total, products = torch.zeros(dims, dtype=torch.float64), torch.zeros(dims, dims, dtype=torch.float64)
    first = F.normalize(features[: min(block, len(features))], dim=1)
    offset = first.mean(dim=0)  # so that float32 is enough
    if 0 < 4 * len(features) < dims and len(features) <= block:
        # Few rows of many values: their singular vectors cost far less than a decomposition of all products.
        return _oriented(offset.double(), torch.linalg.svd((first - offset).double()).Vh, count)
    for start in range(0, len(features), block):
        unit = F.normalize(features[start : start + block], dim=1) if start else first
        centered = unit - offset
        total += centered.sum(dim=0)
        products += centered.T @ centered
    shift = total / max(1, len(features))
    _, vectors = torch.linalg.eigh(products / max(1, len(features)) - torch.outer(shift, shift))
    return _oriented(offset.double() + shift, vectors.T.flip(0), count)


def _oriented(mean: Tensor, directions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As principal_components returns them.   (d,), (d, d) by falling variance  ->  (d,), (count, d)"""
    components = directions[:count]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    components = torch.where(largest < 0, -components, components)
    missing = torch.zeros(max(0, count - len(directions)), len(mean), dtype=torch.float64)
    return mean, torch.cat([components, missing])


def main_directions(features: Tensor, mean: Tensor, components: Tensor | None) -> Tensor:
    """Unit rows around the mean, in their main directions, or as they are.   (..., inputs)  ->  (..., d)"""
    centered = F.normalize(features, dim=-1) - mean
    return centered if components is None else centered @ components.T


class Lift(NamedTuple):
    """Rows around their mean, with one more entry that is their typical length.

    The direction of such a row says how long it was, which the cosine forgets: measurements of a flower with
    small and of one with large petals have the same direction.
    """

    scale: float  # the largest entry in size, so that squares stay finite
    mean: NDArray[np.float64]  # (d,) of scaled rows
    length: float

    def __call__(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """(..., d)  ->  (..., d + 1)"""
        centered = rows.astype(np.float64) / self.scale - self.mean
        return np.concatenate([centered, np.full((*rows.shape[:-1], 1), self.length)], axis=-1)


def lift_of(rows: NDArray[Any]) -> Lift:
    """rows (n, d), read in blocks"""
    blocks = [rows[start : start + CHECKED] for start in range(0, len(rows), CHECKED)]
    scale = float(max(np.abs(block).max() for block in blocks)) or 1.0
    mean = sum((block.astype(np.float64) / scale).sum(axis=0) for block in blocks) / len(rows)
    squares = sum(float(((block.astype(np.float64) / scale - mean) ** 2).sum()) for block in blocks)
    return Lift(scale, mean, math.sqrt(squares / len(rows)) or 1.0)


def main_points(features: Tensor, *, dims: int = DIRECTIONS, seed: int = 0) -> Tensor:
    """Centered unit rows in their main directions.   (n, d) of any length  ->  (n, at most dims)"""
    check_features(features)
    rows = features[sample_rows(len(features), DIRECTIONS_SAMPLE, seed)].float()
    mean, components = principal_components(FeatureRows(rows), min(dims, features.shape[1]))
    mean, components = mean.float(), components.float()
    parts = [main_directions(part.float(), mean, components) for part in features.split(CHECKED)]
    return F.normalize(torch.cat(parts), dim=1)


def sample_rows(count: int, most: int, seed: int) -> Tensor:
    """At most so many positions, in order.   ->  (k,)"""
    if count <= most:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:most].sort().values


class ArrayRows(Features):
    """Rows of an array (n, d), memory-mapped or not. Nothing is held beside the rows that are asked for.

    Args:
        array: The array.
        convert: Makes float32 features (k, d) of k of its rows.
        rows: (m,) the rows of the array that count, in this order; None for all.
        dims: Features of a row that is made, where these are not those of the array.
    """

    def __init__(
        self,
        array: NDArray[Any],
        convert: Callable[[NDArray[Any]], Tensor],
        rows: NDArray[np.int64] | None = None,
        dims: int | None = None,
    ) -> None:
        self.array = array
        self.dims = array.shape[1] if dims is None else dims
        self.convert = convert
        self.rows = rows

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.array if self.rows is None else self.rows), self.dims))

    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        chosen = index if isinstance(index, slice) else index.cpu().numpy()
        return self.convert(self.array[chosen if self.rows is None else self.rows[chosen]])

    @property
    def view_count(self) -> int:
        return 1

    def views(self, index: Tensor, kind: object = None, chosen: Tensor | None = None) -> Tensor:
        center = self[index][:, None]
        return center if chosen is None else center.expand(-1, chosen.shape[1], -1)

    def digest(self) -> str:
        """Digest of the rows; the same for rows in memory."""
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
