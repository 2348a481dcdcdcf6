"""What a map is kept in, and which images are nearly the same."""

import hashlib
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ropaws.core.files import replacing

ALIKE = 0.985  # cosine of centered features from which on two images are near duplicates
SKETCH = 64  # dimensions in which candidates are found
DUPLICATE_BLOCK = 256


def write_map(path: Path, plane: NDArray[np.float32], points: Tensor) -> None:
    """Keep a map for the next start."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, plane=plane, made_from=np.array(_digest(points)))


def read_map(path: Path, points: Tensor) -> NDArray[np.float32] | None:
    """The map of an earlier start, if it is whole and of the same features."""
    if not path.is_file() or path.is_symlink():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
            plane, made_from = kept["plane"], str(kept["made_from"])
    except Exception:  # a damaged archive fails in many ways, and the map is only a cache: it is made anew
        return None
    fits = plane.shape == (len(points), 2) and plane.dtype == np.float32 and made_from == _digest(points)
    return plane if fits and np.isfinite(plane).all() else None


def _digest(points: Tensor) -> str:
    return hashlib.blake2b(points.contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def near_duplicates(points: Tensor) -> NDArray[np.int32]:
    """Group of each image that has near duplicates, numbered by its first image; -1 for the others.

    An image that has joined a group looks for no others: a thousand copies are found by the first.
    (n, d)  ->  (n,)
    """
    rows = F.normalize(points, dim=1)
    sketch, lengths = points[:, :SKETCH], points.norm(dim=1)
    squares = sketch.square().sum(dim=1)
    group = np.full(len(rows), -1, np.int32)
    for start in range(0, len(rows), DUPLICATE_BLOCK):
        part, rest = slice(start, start + DUPLICATE_BLOCK), slice(start, None)
        # In the first directions alone two rows are no farther apart than in all of them.
        apart = squares[part, None] + squares[None, rest] - 2 * sketch[part] @ sketch[rest].T
        near = (apart <= _squared_limit(lengths[part, None], lengths[None, rest]) + 1e-5).triu(diagonal=1)
        for row in near.any(dim=1).nonzero().squeeze(1).tolist():
            first = start + row
            if group[first] >= 0:
                continue
            others = near[row].nonzero().squeeze(1) + start
            alike = others[rows[others] @ rows[first] >= ALIKE].numpy()
            alike = alike[group[alike] < 0]
            if len(alike):
                group[first] = first
                group[alike] = first
    return group


def _squared_limit(a: Tensor, b: Tensor) -> Tensor:
    """Of the distance of two rows of these lengths whose cosine is ALIKE."""
    return a.square() + b.square() - 2 * ALIKE * a * b
