"""Groups of feature rows: k-means, and how many kinds there are among rows that belong to no class."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropaws.core.features import main_points, sample_rows

if TYPE_CHECKING:
    from sklearn.cluster import KMeans

SAMPLE = 20_000  # rows that k-means is fitted to, at most
BLOCK = 8192  # rows that are worked on at a time
ROUNDS = 50  # of k-means, at most
DIMS = 24  # main directions in which out-of-class rows are compared
TREE = 4000  # rows that are joined to a tree, at most: its time is quadratic
LEAST = 10  # rows that a new class needs
LEAST_VARIED, MOST_VARIED = 0.1, 0.5  # by which kinds may be wider or narrower than the classes
RANDOM_STARTS = 5  # of k-means, beside that from Ward's tree
TRIED = 24  # numbers of kinds whose clusters are compared
ENOUGH = 0.97  # of the best silhouette
PULL = 0.3  # to the likely number: of the best silhouette, for a number e times as large


class Clusters(NamedTuple):
    """Groups of rows."""

    member: Tensor  # (n,) cluster of each row
    centers: Tensor  # (k, d)
    distance: Tensor  # (n,) of each row to the center of its cluster


class NewClass(NamedTuple):
    """A group of rows that are likely out-of-class, and likely of one kind."""

    members: Tensor  # (m,) positions, the most typical first
    typicality: Tensor  # (m,) 1 at the center of the group, 0 where another group is as near


class Kinds(NamedTuple):
    """How many kinds there may be."""

    fewest: int
    likely: int  # as many as are as large as the classes
    most: int


def k_means(points: Tensor, count: int, *, weights: Tensor | None = None, seed: int = 0) -> Clusters:
    """At most `count` clusters; where rows are many, they are fitted to a sample.

    points (n, d), weights (n,) of the rows, all alike by default
    """
    from sklearn.cluster import KMeans  # slow to load

    rows = sample_rows(len(points), max(SAMPLE, 20 * count), seed)
    distinct = len(torch.unique(points[rows], dim=0)) if count > 1 else 1
    found = KMeans(min(count, distinct), n_init=1, max_iter=ROUNDS, random_state=seed)
    found.fit(points[rows].numpy(), sample_weight=None if weights is None else weights[rows].numpy())
    return _around(points, torch.from_numpy(found.cluster_centers_).to(points))


def _around(points: Tensor, centers: Tensor) -> Clusters:
    distance, member = nearest(points, centers)
    return Clusters(member, centers, distance)


def nearest(points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Distance to the nearest center, and which one it is.   (n, d), (k, d)  ->  (n,), (n,)"""
    found = [torch.cdist(part, centers).min(dim=1) for part in points.split(BLOCK)]
    return torch.cat([part.values for part in found]), torch.cat([part.indices for part in found])


def new_classes(
    features: Tensor,
    labels: Tensor,
    in_class: Tensor,
    probs: Tensor,
    *,
    threshold: float = 0.5,
    groups: int | None = None,
    seed: int = 0,
) -> list[NewClass]:
    """Groups of rows that are likely out-of-class, the largest first.

    Args:
        features: (n, d) frozen features of all rows.
        labels: (n,) a class, UNLABELED or OUT_OF_CLASS.
        in_class: (n,) probability of belonging to any class.
        probs: (n, c) of the classes, given in-class.
        threshold: Of in_class: rows below it are grouped.
        groups: How many; by default as many kinds as there seem to be.
        seed: Of the samples, where rows are many.
    """
    outside = (labels < 0) & (in_class < threshold)
    rows = outside.nonzero().squeeze(1)
    if len(rows) < (LEAST if groups is None else groups):
        return []
    # In the directions in which these rows differ from one another, and not from the classes.
    points = main_points(features[rows], dims=DIMS, seed=seed)
    tree = Tree(points, seed)
    if groups is None:
        groups = tree.best(yardstick(features, labels, in_class, probs, outside, seed=seed))
    clusters = tree.means(groups, seed=seed)
    typicality = _typicality(points, clusters)
    found = []
    for number in range(len(clusters.centers)):
        mine = (clusters.member == number).nonzero().squeeze(1)
        order = mine[typicality[mine].argsort(descending=True, stable=True)]
        found.append(NewClass(rows[order], typicality[order]))
    return sorted(found, key=lambda group: -len(group.members))


def yardstick(
    features: Tensor, labels: Tensor, in_class: Tensor, probs: Tensor, outside: Tensor, *, seed: int = 0
) -> Kinds:
    """The number of kinds, from how large the known classes are in the same features.

    k-means with as many centers as there are classes leaves rows of the classes at some mean squared distance
    to their center. So many kinds as leave the out-of-class rows at the same distance are as large as the
    classes. Rows that are likely in-class are the typical ones, and give the most kinds; all rows, each with
    its in-class probability as weight, have the others too, and give the fewest. Distances in both groups
    are those of k-means, so that centers which follow the rows shorten both alike.

    As for new_classes; outside (n,): the rows to group.
    """
    from sklearn.cluster import KMeans

    points = main_points(features, dims=DIMS, seed=seed)
    weights = torch.where(labels >= 0, 1.0, in_class.float())
    classes = torch.where(labels >= 0, labels, probs.argmax(dim=1))[~outside]
    known, tree = Tree(points[~outside], seed), Tree(points[outside], seed)
    count = len(classes.unique())
    some = sample_rows(len(points), SAMPLE, seed)
    wide = KMeans(count, init=known.starts(count), n_init=1, max_iter=ROUNDS)
    wide.fit(points[some].double().numpy(), sample_weight=weights[some].numpy())
    loose = float(wide.inertia_) / max(float(weights[some].sum()), 1e-12)
    tight, varied = known.spread(count), _variation(points[~outside], classes)
    if tree.spread(1) <= tight * (1 + varied):
        return Kinds(1, 1, 1)
    ends = max(loose, tight) * (1 + varied), tight, min(loose, tight) * (1 - varied)
    return Kinds(*map(tree.kinds, ends))


def _variation(points: Tensor, classes: Tensor) -> float:
    """How much the classes differ in spread: standard deviation over mean.   (n, d), (n,)"""
    parts = [points[classes == number] for number in classes.unique().tolist()]
    spreads = torch.stack(
        [part.var(dim=0).sum() for part in parts if len(part) > 1] or [points.var(dim=0).sum()]
    )
    if len(spreads) < 2:
        return LEAST_VARIED
    return float((spreads.std() / spreads.mean()).clamp(LEAST_VARIED, MOST_VARIED))


class Tree:
    """Ward's tree of rows, whose branches k-means starts from: it ends better than from random rows.

    points (n, d); where rows are many, the tree is that of a sample
    """

    def __init__(self, points: Tensor, seed: int = 0) -> None:
        from scipy.cluster.hierarchy import linkage  # slow to load

        self.points = points
        self.some = points[sample_rows(len(points), SAMPLE, seed)].double().numpy()
        self.sample = points[sample_rows(len(points), TREE, seed)].double().numpy()
        self.joined = linkage(self.sample, "ward") if len(self.sample) > 1 else None
        self.fitted: dict[int, KMeans] = {}

    def starts(self, count: int) -> NDArray[np.float64]:
        """Means of so many branches.   ->  (at most count, d)"""
        from scipy.cluster.hierarchy import fcluster

        branch = np.zeros(len(self.sample), int)
        if self.joined is not None:
            branch = fcluster(self.joined, count, "maxclust") - 1
        return np.stack([self.sample[branch == number].mean(axis=0) for number in range(branch.max() + 1)])

    def means(self, count: int, *, seed: int = 0) -> Clusters:
        """At most so many clusters: the tightest of those from the branches, and of some from random rows."""
        from sklearn.cluster import KMeans

        found = self._fit(count)
        if len(found.cluster_centers_) == count:
            drawn = KMeans(count, n_init=RANDOM_STARTS, max_iter=ROUNDS, random_state=seed).fit(self.some)
            found = min(found, drawn, key=lambda fitted: float(fitted.inertia_))
        return _around(self.points, torch.from_numpy(found.cluster_centers_).to(self.points))

    def spread(self, count: int) -> float:
        """Mean squared distance to the nearest of so many centers: SS / (n - k)."""
        fitted = self._fit(count)
        left = len(self.some) - len(fitted.cluster_centers_)
        return float(fitted.inertia_) / left if left > 0 else 0.0

    def kinds(self, spread: float) -> int:
        """How many centers leave the rows at this mean squared distance."""
        low, high = 1, max(2, len(self.points) // LEAST)
        if self.spread(low) <= spread:
            return low
        while high - low > 1:  # the distance falls with their number
            middle = min(max(round((low * high) ** 0.5), low + 1), high - 1)
            low, high = (middle, high) if self.spread(middle) > spread else (low, middle)
        return low if self.spread(low) * self.spread(high) < spread**2 else high

    def best(self, kinds: Kinds) -> int:
        """The smallest number of clusters that are about as far apart for their size, by their silhouette, as
        any: one kind that is cut in two is nearly as far apart. It is drawn to the likely number, which
        counts where there are many kinds: their silhouettes are all alike.
        """
        if kinds.most < 2:
            return 1
        numbers = np.geomspace(max(2, kinds.fewest), kinds.most, TRIED).round().astype(int)
        tried: list[int] = np.unique(numbers).tolist()
        apart = np.array([self._apart(count) for count in tried])
        worth = apart / max(float(abs(apart.max())), 1e-12)
        worth -= PULL * np.log(np.divide(tried, kinds.likely)) ** 2
        return tried[int((worth >= worth.max() - (1 - ENOUGH)).argmax())]

    def _apart(self, count: int) -> float:
        from sklearn.metrics import silhouette_score

        found = self._fit(count).predict(self.sample)
        clusters = len(np.unique(found))
        return float(silhouette_score(self.sample, found)) if 1 < clusters < len(found) else -1.0

    def _fit(self, count: int) -> "KMeans":
        from sklearn.cluster import KMeans

        if count not in self.fitted:
            starts = self.starts(count)
            self.fitted[count] = KMeans(len(starts), init=starts, n_init=1, max_iter=ROUNDS).fit(self.some)
        return self.fitted[count]


def _typicality(points: Tensor, clusters: Clusters) -> Tensor:
    """1 - distance to the own center over that to the nearest other one.   ->  (n,)"""
    if len(clusters.centers) == 1:
        return 1 - clusters.distance / clusters.distance.max().clamp_min(1e-12)
    two = torch.cat(
        [torch.cdist(part, clusters.centers).topk(2, largest=False).values for part in points.split(BLOCK)]
    )
    return 1 - two[:, 0] / two[:, 1].clamp_min(1e-12)
