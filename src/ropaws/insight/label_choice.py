"""Known ways to choose what to label, to compare with `suggestions.suggest`; one signature for all.

An answered row counts as labeled whether it is of a class or out-of-class: neither is worth a second answer.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.classify.logistic import fit_logistic
from ropaws.core.labels import UNLABELED
from ropaws.insight.groups import k_means, nearest

LIKELY = 0.5  # in-class probability that gated random choice asks for
MOST_CLUSTERS, LEAST_SIZE, NEIGHBORS = 500, 5, 20  # of TypiClust, as its authors set them
PURITY = 0.95  # of the balls of ProbCover
SAMPLE = 4096  # rows that ProbCover compares with one another, at most
BISECTIONS = 12
BLOCK = 2048


class Situation(NamedTuple):
    """What is known when labels are chosen."""

    points: Tensor  # (n, d) unit rows, of all rows
    labels: Tensor  # (n,) a class, -1 unlabeled, -2 out-of-class
    classes: int
    in_class: Tensor  # (n,) probability of belonging to any class
    probs: Tensor  # (n, classes) of a classifier, given in-class; all alike without any label

    @property
    def unlabeled(self) -> Tensor:
        """Positions of the rows to choose from."""
        return (self.labels == UNLABELED).nonzero().squeeze(1)

    @property
    def answered(self) -> Tensor:
        return (self.labels != UNLABELED).nonzero().squeeze(1)


Strategy = Callable[[Situation, int, int], list[int]]  # situation, how many, seed -> positions, best first


def class_probs(points: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Probabilities of logistic regression on the labels; all alike without any.   ->  (n, classes)"""
    known = labels >= 0
    if not bool(known.any()):
        return points.new_full((len(points), classes), 1 / max(1, classes))
    with warnings.catch_warnings():  # of as many classes as labels, which is usual here
        warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
        fitted = fit_logistic(points[known], labels[known], classes=classes)
    return fitted(points).to(points)


def margins(probs: Tensor) -> Tensor:
    """Between the two likeliest classes.   (n, c)  ->  (n,)"""
    best = probs.topk(min(2, probs.shape[1]), dim=1).values
    return best[:, 0] - best[:, 1:].sum(dim=1)


def random_rows(situation: Situation, count: int, seed: int) -> list[int]:
    """Any rows."""
    return _shuffled(situation.unlabeled, seed)[:count].tolist()


def gated_random(situation: Situation, count: int, seed: int) -> list[int]:
    """Any rows that are likely in-class; where these are too few, the likeliest others."""
    rows = _shuffled(situation.unlabeled, seed)
    order = situation.in_class[rows].clamp_max(LIKELY).argsort(descending=True, stable=True)
    return rows[order[:count]].tolist()


def k_means_centers(situation: Situation, count: int, seed: int) -> list[int]:
    """The rows nearest to the centers of clusters without an answer, the largest cluster first."""
    return _by_cluster(situation, count, seed, most=len(situation.points), nearest_first=_to_center)


def typiclust(situation: Situation, count: int, seed: int) -> list[int]:
    """The most typical rows of clusters without an answer (Hacohen et al. 2022)."""
    return _by_cluster(situation, count, seed, most=MOST_CLUSTERS, nearest_first=_untypicality)


def probcover(situation: Situation, count: int, seed: int) -> list[int]:
    """Rows whose balls cover the most rows that no answer covers (Yehuda et al. 2022).

    The radius is the largest at which 95 % of the balls are of one k-means cluster, with a cluster per class.
    """
    points, rows = situation.points, _shuffled(situation.unlabeled, seed)[:SAMPLE]
    near = torch.cdist(points[rows], points[rows])  # (k, k)
    member = k_means(points[rows], situation.classes, seed=seed).member
    inside = near < _pure_radius(near, member)
    if len(situation.answered):
        radius = float(near[inside].max())
        inside[:, nearest(points[rows], points[situation.answered])[0] <= radius] = False
    chosen: list[int] = []
    left = torch.ones(len(rows), dtype=torch.bool)
    while len(chosen) < min(count, len(rows)):
        best = int(inside.sum(dim=1).masked_fill(~left, -1).argmax())
        chosen.append(int(rows[best]))
        inside[:, inside[best].clone()] = False
        left[best] = False
    return chosen


def smallest_margin(situation: Situation, count: int, seed: int) -> list[int]:
    """The rows whose two likeliest classes are closest; any rows without a label."""
    rows = _shuffled(situation.unlabeled, seed)
    return rows[margins(situation.probs[rows]).argsort(stable=True)[:count]].tolist()


def coreset(situation: Situation, count: int, seed: int) -> list[int]:
    """The rows farthest from all answers, one after the other (Sener and Savarese 2018)."""
    points, rows = situation.points, _shuffled(situation.unlabeled, seed)
    chosen: list[int] = []
    if len(situation.answered):
        far = nearest(points[rows], points[situation.answered])[0]
    else:
        far = torch.full((len(rows),), torch.inf)
    for _ in range(min(count, len(rows))):
        best = int(far.argmax())
        chosen.append(int(rows[best]))
        far = torch.minimum(far, torch.cdist(points[rows], points[rows[best : best + 1]]).squeeze(1))
        far[best] = -1.0
    return chosen


STRATEGIES: dict[str, Strategy] = {
    "random": random_rows,
    "gated-random": gated_random,
    "k-means": k_means_centers,
    "typiclust": typiclust,
    "probcover": probcover,
    "margin": smallest_margin,
    "coreset": coreset,
}


def _by_cluster(
    situation: Situation,
    count: int,
    seed: int,
    *,
    most: int,
    nearest_first: Callable[[Tensor, Tensor], Tensor],
) -> list[int]:
    """A row of each cluster in turn: clusters with the fewest answers first, then the largest.

    nearest_first: rows of a cluster (m, d) and its center (d,)  ->  (m,), the least is chosen first
    """
    points, rows = situation.points, situation.unlabeled
    clusters = k_means(points, min(len(situation.answered) + count, most), seed=seed)
    total = len(clusters.centers)
    sizes = torch.bincount(clusters.member, minlength=total)
    answers = torch.bincount(clusters.member[situation.answered], minlength=total)
    small = sizes < LEAST_SIZE
    order = sorted(range(total), key=lambda k: (bool(small[k]), int(answers[k]), -int(sizes[k])))
    queues = []
    for k in order:
        mine = rows[clusters.member[rows] == k]
        if len(mine):
            by = nearest_first(points[mine], clusters.centers[k])
            queues.append(mine[by.argsort(stable=True)].tolist())
    chosen: list[int] = []
    while len(chosen) < min(count, len(rows)):
        chosen += [queue.pop(0) for queue in queues if queue]
    return chosen[:count]


def _to_center(points: Tensor, center: Tensor) -> Tensor:
    return torch.cdist(points, center[None]).squeeze(1)


def _untypicality(points: Tensor, _: Tensor) -> Tensor:
    """Mean distance to the nearest neighbors.   (m, d)  ->  (m,)"""
    count = max(1, min(NEIGHBORS, len(points) // 2))
    parts = [torch.cdist(part, points) for part in points.split(BLOCK)]
    nearby = [part.topk(min(count + 1, len(points)), dim=1, largest=False).values for part in parts]
    return torch.cat(nearby).sum(dim=1) / count


def _pure_radius(near: Tensor, member: Tensor) -> float:
    """near (k, k) distances, member (k,)"""
    other = near.masked_fill(member[:, None] == member, torch.inf).amin(dim=1)  # the nearest of another
    low, high = 0.0, float(near.max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        pure = float((other >= middle).float().mean()) >= PURITY
        low, high = (middle, high) if pure else (low, middle)
    return max(low, 1e-6)


def _shuffled(rows: Tensor, seed: int) -> Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
