"""Where images stand on a map, and which of them are most alike: what `explore` shows and tables keep."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ropaws.insight.neighbors import OtherNeighbors, can_search, other_neighbors, tsne

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
