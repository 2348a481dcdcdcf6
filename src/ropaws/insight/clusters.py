"""Clusters of feature rows, for a hundred thousand rows and more."""

from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.core.features import sample_rows

SAMPLE = 20_000  # rows that clusters are fitted to, at most
BLOCK = 8192  # rows that are worked on at a time
ROUNDS = 50  # of k-means, at most


class Clusters(NamedTuple):
    """Groups of rows."""

    member: Tensor  # (n,) cluster of each row
    centers: Tensor  # (k, d)
    distance: Tensor  # (n,) of each row to the center of its cluster


def k_means(points: Tensor, count: int, *, weights: Tensor | None = None, seed: int = 0) -> Clusters:
    """At most `count` clusters; where rows are many, they are fitted to a sample.

    points (n, d), weights (n,) of the rows, all alike by default
    """
    from sklearn.cluster import KMeans  # slow to load

    rows = sample_rows(len(points), max(SAMPLE, 20 * count), seed)
    distinct = len(torch.unique(points[rows], dim=0)) if count > 1 else 1
    found = KMeans(min(count, distinct), n_init=1, max_iter=ROUNDS, random_state=seed)
    found.fit(points[rows].numpy(), sample_weight=None if weights is None else weights[rows].numpy())
    centers = torch.from_numpy(found.cluster_centers_).to(points)
    distance, member = nearest(points, centers)
    return Clusters(member, centers, distance)


def nearest(points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Distance to the nearest center, and which one it is.   (n, d), (k, d)  ->  (n,), (n,)"""
    found = [torch.cdist(part, centers).min(dim=1) for part in points.split(BLOCK)]
    return torch.cat([part.values for part in found]), torch.cat([part.indices for part in found])
