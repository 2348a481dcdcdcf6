"""Which rows are most alike by cosine: nearest neighbors, near duplicates, and maps that keep them near."""

import importlib.util
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ropaws import equations as eq

BLOCK_BYTES = 1 << 27
EXACT = 100_000  # rows up to which all pairs are compared for neighbors; an index is for more
TRAINED_WITH = 40  # rows for each list of the index
LEADERS = 256  # rows that look for their near duplicates at a time
RECALL_ROWS = 200  # whose neighbors are also found exactly, to state what share the index finds
NEEDS_FAISS = f"above {EXACT:,} images neighbors need an index; pip install 'ropaws[index]'"

ALIKE = 0.985  # cosine from which on two images are near duplicates
SKETCH = 32  # dimensions in which candidates are found
LEAF, TILE = 512, 2048  # rows that are compared with so many others at a time
ROUNDING = 1e-5  # of products in float32


class Lists(NamedTuple):
    """How an index is cut into lists of alike rows."""

    number: int  # times the square root of the number of rows
    probed: int  # that a query looks into


FOR_NEIGHBORS, FOR_ALIKE = Lists(4, 32), Lists(2, 4)  # near duplicates are seldom in another list


class Neighbors(NamedTuple):
    similarity: Tensor  # (n, k) descending
    position: Tensor  # (n, k) among the points


def nearest(queries: Tensor, points: Tensor, count: int) -> Neighbors:
    """The most similar points of each query.   queries (n, d), points (m, d)  ->  (n, min(count, m)) each"""
    count = min(count, len(points))
    block = max(1, BLOCK_BYTES // (4 * len(points)))
    parts = [eq.cosine(part, points).topk(count, dim=1) for part in queries.split(block)]
    return Neighbors(torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts]))


class OtherNeighbors(NamedTuple):
    """The most similar other rows of each row."""

    similarity: Tensor  # (n, k) descending
    position: Tensor  # (n, k)
    recall: float  # share of the true neighbors that are found: 1, or as measured where an index is used


def can_search(count: int) -> bool:
    """Can other_neighbors be asked for so many rows here?"""
    return count <= EXACT or importlib.util.find_spec("faiss") is not None


def other_neighbors(points: Tensor, count: int) -> OtherNeighbors:
    """The most similar other rows of each row: by all pairs up to EXACT rows, else by an index.

    (n, d)  ->  (n, min(count, n - 1)) each

    Raises:
        ValueError: There are more rows, and no faiss.
    """
    count = min(count, len(points) - 1)
    if len(points) <= EXACT:
        rows = F.normalize(points, dim=1)
        itself = torch.arange(len(rows))
        return OtherNeighbors(*_without_itself(nearest(rows, rows, count + 1), itself), recall=1.0)
    index, found = _index(points, FOR_NEIGHBORS), []
    for rows, numbers in _unit_parts(points):
        near = Neighbors(*map(torch.from_numpy, index.search(rows.numpy(), count + 1)))
        found.append(_without_itself(near, numbers))
    similarity, position = (torch.cat(part) for part in zip(*found, strict=True))
    sample = _drawn(len(points), RECALL_ROWS)
    true = _without_itself(_nearest_in_parts(points[sample], points, count + 1), sample)
    same = (position[sample][:, :, None] == true.position[:, None]).any(dim=1)
    return OtherNeighbors(similarity, position, recall=float(same.float().mean()))


def _unit_parts(points: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Unit rows and their numbers, a part at a time: the points may be a file on disk."""
    for numbers in torch.arange(len(points)).split(TILE):
        yield F.normalize(points[numbers[0] : numbers[-1] + 1], dim=1), numbers


def _nearest_in_parts(queries: Tensor, points: Tensor, count: int) -> Neighbors:
    """As nearest, of rows of any length, with a part of the points in memory at a time."""
    queries = F.normalize(queries, dim=1)
    best = Neighbors(queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.long))
    for rows, numbers in _unit_parts(points):
        found = nearest(queries, rows, count)
        similarity = torch.cat([best.similarity, found.similarity], dim=1)
        position = torch.cat([best.position, numbers[found.position]], dim=1)
        similarity, order = similarity.topk(min(count, similarity.shape[1]), dim=1)
        best = Neighbors(similarity, position.gather(1, order))
    return best


def _drawn(count: int, most: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most]


def _without_itself(found: Neighbors, queries: Tensor) -> Neighbors:
    """One neighbor less: the row itself, or the last, where as many copies as were asked for come first."""
    rows, wider = found.position.shape
    itself = found.position == queries[:, None]
    last = torch.arange(wider) == wider - 1
    drop = torch.where(itself.any(dim=1, keepdim=True), itself, last)
    return Neighbors(*(part[~drop].reshape(rows, wider - 1) for part in found))


def _index(points: Tensor, lists: Lists) -> Any:
    """Rows in lists of alike ones, in half precision; a query looks into the lists that are most like it."""
    try:
        import faiss
    except ImportError:
        raise ValueError(NEEDS_FAISS) from None
    faiss.omp_set_num_threads(torch.get_num_threads())
    count = round(lists.number * math.sqrt(len(points)))
    index: Any = faiss.index_factory(points.shape[1], f"IVF{count},SQfp16", faiss.METRIC_INNER_PRODUCT)
    index.nprobe = lists.probed
    index.train(F.normalize(points[_drawn(len(points), TRAINED_WITH * count)], dim=1).numpy())
    for rows, _ in _unit_parts(points):
        index.add(rows.numpy())
    return index


def near_duplicates(points: Tensor) -> NDArray[np.int32]:
    """Groups of rows whose cosine to one row of the group, its leader, is at least ALIKE.   (n, d)  ->  (n,)

    The number of a group is the row of its leader, -1 for rows without near duplicates. A row that has joined
    a group looks for no others: a thousand copies are found by the first. Up to EXACT rows, or without faiss,
    no pair is missed; above that an index misses a few (benchmarks/near_duplicates.py says how many).
    """
    group = torch.full((len(points),), -1)
    if len(points) > EXACT and can_search(len(points)):
        _groups_by_index(points, group)
    elif len(points):
        _groups_by_boxes(points, group)
    return group.numpy().astype(np.int32)


def _groups_by_index(points: Tensor, group: Tensor) -> None:
    """As near_duplicates, in place; a row is compared with the lists that are most like it."""
    index = _index(points, FOR_ALIKE)
    for part in torch.arange(len(points)).split(LEADERS):
        rows = part[group[part] < 0]
        if len(rows) == 0:
            continue
        ends, _, found = index.range_search(F.normalize(points[rows], dim=1).numpy(), ALIKE)
        for number in np.flatnonzero(np.diff(ends) > 1).tolist():
            near = torch.from_numpy(found[int(ends[number]) : int(ends[number + 1])])
            _join(group, rows[number], near[near != rows[number]])


def _groups_by_boxes(points: Tensor, group: Tensor) -> None:
    """As near_duplicates, in place. No pair is missed: rows are sorted into boxes of alike ones, boxes that
    are too far apart are not compared, and in the first dimensions alone two rows are no farther apart than
    in all of them. Fastest where the first dimensions hold the most.
    """
    lengths = points.norm(dim=1).clamp_min(torch.finfo(points.dtype).tiny)
    sketch = points[:, :SKETCH] / lengths[:, None]
    boxes = _Boxes(sketch)
    # |a - b|^2 <= 2 - 2 ALIKE as one product: a b - |a|^2 / 2 - |b|^2 / 2 >= ALIKE - 1.
    half = sketch.square().sum(dim=1, keepdim=True) / 2
    left, right = (torch.cat([sketch, *ends], dim=1) for ends in ((-half, half**0), (half**0, -half)))
    for part, others in boxes.near(2 - 2 * ALIKE):
        rows = part[group[part] < 0]
        for columns in others[group[others] < 0].split(TILE):
            near = left[rows] @ right[columns].T
            if near.numel() == 0 or float(near.max()) < ALIKE - 1 - ROUNDING:
                continue
            near = near >= ALIKE - 1 - ROUNDING
            near &= boxes.rank[rows][:, None] < boxes.rank[columns]  # each pair once
            alike = _alike(points, lengths, rows, columns, near)
            for number in alike.any(dim=1).nonzero().squeeze(1).tolist():
                _join(group, rows[number], columns[alike[number]])


class _Boxes:
    """Rows in boxes of at most LEAF, halved again and again where they vary most."""

    def __init__(self, sketch: Tensor) -> None:
        order, values = np.arange(len(sketch)), sketch.numpy()
        parts, waiting = [], [(0, len(order))]
        while waiting:
            start, stop = waiting.pop()
            if stop - start <= LEAF:
                parts.append((start, stop))
                continue
            part, middle = values[order[start:stop]], (stop - start) // 2
            widest = int(part.var(axis=0).argmax())
            order[start:stop] = order[start:stop][np.argpartition(part[:, widest], middle)]
            waiting += [(start, start + middle), (start + middle, stop)]
        rows = torch.from_numpy(order)
        self.parts = [rows[start:stop].sort().values for start, stop in sorted(parts)]
        self.low = torch.stack([sketch[part].amin(dim=0) for part in self.parts])
        self.high = torch.stack([sketch[part].amax(dim=0) for part in self.parts])
        self.rank = torch.empty(len(rows), dtype=torch.long)  # in the order of the boxes
        self.rank[torch.cat(self.parts)] = torch.arange(len(rows))

    def near(self, squared: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of each box, and those of itself and later boxes that may be so near."""
        for number, rows in enumerate(self.parts):
            apart = torch.maximum(
                self.low[number:] - self.high[number], self.low[number] - self.high[number:]
            )
            near = apart.clamp_min(0).square().sum(dim=1) <= squared + ROUNDING
            yield rows, torch.cat([self.parts[number + int(k)] for k in near.nonzero().squeeze(1)])


def _alike(points: Tensor, lengths: Tensor, rows: Tensor, columns: Tensor, near: Tensor) -> Tensor:
    """Which candidates are near duplicates in all dimensions.   near (r, c)  ->  (r, c)"""
    if int(near.sum()) > near.numel() // 16:
        cosine = (points[rows] @ points[columns].T) / lengths[rows][:, None] / lengths[columns]
        return near & (cosine >= ALIKE)
    row, column = near.nonzero().unbind(dim=1)
    one, other = rows[row], columns[column]
    near[row, column] = (points[one] * points[other]).sum(dim=1) / lengths[one] / lengths[other] >= ALIKE
    return near


def _join(group: Tensor, leader: Tensor, alike: Tensor) -> None:
    """A row that is in no group, or leads one, takes those that are like it and in none."""
    if group[leader] in (-1, leader):
        found = alike[group[alike] < 0]
        if len(found):
            group[leader] = leader
            group[found] = leader


def tsne(embeddings: Tensor, *, seed: int = 0) -> NDArray[np.float32]:
    """t-SNE by cosine distance.   (n, d), n >= 4  ->  (n, 2)"""
    if len(embeddings) < 4:
        raise ValueError(f"t-SNE needs at least 4 points, got {len(embeddings)}")
    from sklearn.manifold import TSNE  # slow to load

    perplexity = min(30.0, (len(embeddings) - 1) / 3)
    # A network may have collapsed to a point, which has no principal components.
    init = "pca" if bool((embeddings != embeddings[0]).any()) else "random"
    points = TSNE(metric="cosine", init=init, perplexity=perplexity, random_state=seed).fit_transform(
        embeddings.numpy()
    )
    return np.asarray(points, np.float32)


LANDMARKS = 3000  # images that t-SNE places; the others stand among the landmarks that are most like them
NEIGHBORS = 5
SHARPNESS = 0.05  # of the cosine, in which a neighbor's say falls by e
JITTER = 0.006  # of the width of the map: images with the same neighbors do not hide each other
BLOCK = 2048
SHOWN_NEIGHBORS = 10  # of each image in a table


class PoolMap(NamedTuple):
    """Columns of a table that can be looked at as a map."""

    plane: NDArray[np.float32]  # (n, 2)
    neighbors: OtherNeighbors | None  # None where there are too many images for exact search, and no index


def quick_map(points: Tensor) -> NDArray[np.float32]:
    """The two main directions: at once, and rough.   (n, d)  ->  (n, 2) within -1 and 1"""
    plane = torch.zeros(len(points), 2)
    plane[:, : min(2, points.shape[1])] = points[:, :2]
    return _fitted(plane.numpy())


def full_map(points: Tensor) -> NDArray[np.float32]:
    """t-SNE of a sample, and all others beside the images of the sample that are most like them.

    (n, d)  ->  (n, 2) within -1 and 1
    """
    if len(points) < 4:
        return quick_map(points)
    random = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(points), generator=random)[:LANDMARKS]
    sample = F.normalize(points[chosen], dim=1)
    landmarks = torch.from_numpy(_fitted(tsne(sample)))
    parts = []
    for part in points.split(BLOCK):  # one by one: the points may be a file on disk
        near, where = (F.normalize(part, dim=1) @ sample.T).topk(min(NEIGHBORS, len(chosen)), dim=1)
        weights = (near / SHARPNESS).softmax(dim=1)
        parts.append((weights[:, :, None] * landmarks[where]).sum(dim=1))
    placed = torch.cat(parts)
    placed += JITTER * torch.randn(placed.shape, generator=random)
    placed[chosen] = landmarks
    return _fitted(placed.numpy())


def _fitted(plane: NDArray[np.float32]) -> NDArray[np.float32]:
    """Centered, the larger side from -1 to 1."""
    low, high = plane.min(axis=0, initial=0.0), plane.max(axis=0, initial=0.0)
    if len(plane):
        low, high = plane.min(axis=0), plane.max(axis=0)
    half = max(float((high - low).max()) / 2, 1e-9)
    return np.asarray((plane - (low + high) / 2) / half, np.float32)


def pool_map(points: Tensor, plane: NDArray[np.float32] | None = None) -> PoolMap:
    """The map of a pool, and the neighbors of each image by cosine.

    points (n, d); plane (n, 2): of a map that was made before
    """
    placed = full_map(points) if plane is None else plane
    return PoolMap(placed, other_neighbors(points, SHOWN_NEIGHBORS) if can_search(len(points)) else None)
