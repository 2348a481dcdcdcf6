"""Nearest neighbors by cosine, in blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

from ropaws import equations as eq

BLOCK_BYTES = 1 << 27


class Neighbors(NamedTuple):
    similarity: Tensor  # (n, k) descending
    position: Tensor  # (n, k) among the points


def nearest(queries: Tensor, points: Tensor, count: int) -> Neighbors:
    """The most similar points of each query.   queries (n, d), points (m, d)  ->  (n, min(count, m)) each"""
    count = min(count, len(points))
    block = max(1, BLOCK_BYTES // (4 * len(points)))
    parts = [eq.cosine(part, points).topk(count, dim=1) for part in queries.split(block)]
    return Neighbors(torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts]))
