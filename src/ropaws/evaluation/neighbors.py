"""Nearest neighbours by cosine, in blocks."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
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


def leave_one_out(support: Tensor, labels: Tensor, *, classes: int, temperature: float) -> Tensor:
    """Soft nearest-neighbour probabilities of each labelled point, from all the others.

    support (s, d), labels (s,)  ->  (s, c), rows sum to 1; needs two points
    """
    if len(support) < 2:
        raise ValueError(f"leaving one out needs at least 2 labelled points, got {len(support)}")
    votes = F.one_hot(labels, classes).to(support.dtype)
    parts = []
    for rows in torch.arange(len(support)).split(max(1, BLOCK_BYTES // (4 * len(support)))):
        kernel = eq.cosine(support[rows], support) / temperature
        kernel[torch.arange(len(rows)), rows] = -torch.inf
        parts.append(kernel.softmax(dim=1) @ votes)
    return torch.cat(parts)
