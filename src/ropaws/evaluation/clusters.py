"""Feature rows in their main directions, and clusters of them; both for a hundred thousand rows and more."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws.data.features import FeatureRows, check_features, principal_components
from ropaws.models.heads import main_directions

DIMS = 128  # main directions that are kept
SAMPLE = 20_000  # rows that main directions and clusters are fitted to, at most
BLOCK = 8192  # rows that are worked on at a time
ROUNDS = 50  # of k-means, at most


class Clusters(NamedTuple):
    """Groups of rows."""

    member: Tensor  # (n,) cluster of each row
    centers: Tensor  # (k, d)
    distance: Tensor  # (n,) of each row to the center of its cluster


def main_points(features: Tensor, *, dims: int = DIMS, seed: int = 0) -> Tensor:
    """Centered unit rows in their main directions.   (n, d) of any length  ->  (n, at most dims)"""
    check_features(features)
    rows = features[sample_rows(len(features), SAMPLE, seed)].float()
    mean, components = principal_components(FeatureRows(rows), min(dims, features.shape[1]))
    mean, components = mean.float(), components.float()
    parts = [main_directions(part.float(), mean, components) for part in features.split(BLOCK)]
    return F.normalize(torch.cat(parts), dim=1)


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


def sample_rows(count: int, most: int, seed: int) -> Tensor:
    """At most so many positions, in order.   ->  (k,)"""
    if count <= most:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:most].sort().values
