"""What to label next: rows that stand for the most rows that are likely in-class and have no label near.

Geometry is that of frozen features: in those of a run that was trained on a few labels, everything has been
pulled onto these labels. Known ways to choose are here too, to compare with `suggest`; one signature for all.
To them an answered row counts as labeled, of a class or out-of-class: neither is worth a second answer.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.classify.logistic import fit_logistic
from ropaws.classify.pool_prior import in_class_probability
from ropaws.core.features import main_points
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


OURS = "coverage"
# Temperature of the kernel that says how far a label reaches, on centered unit features; less before there is
# any answer: then dense places are found, and a wide kernel would take what is between them.
REACH, FIRST_REACH = 0.7, 0.3
DOUBT = 0.5  # exponent of 1 - margin in the weight of a row
LEAST = 1e-6  # weight: where all else is covered, any row is better than none
MOST = 4096  # rows that are compared with one another, at most
LOOKED_AT = 64  # rows whose gain is computed anew at a time


class Suggestion(NamedTuple):
    """A row that is worth a label."""

    position: int
    in_class: float  # probability of belonging to any class
    stands_for: int  # unlabeled rows that are nearer to it than to any answer or other suggestion
    predicted: int  # the likeliest class, -1 without any label
    margin: float  # between the probabilities of the two likeliest classes; 0 without any label


def suggest(
    features: Tensor,
    labels: Tensor,
    *,
    classes: int,
    count: int,
    in_class: Tensor | None = None,
    probs: Tensor | None = None,
    strategy: str = OURS,
    seed: int = 0,
) -> list[Suggestion]:
    """The rows most worth a label, best first; all that are left where they are fewer than `count`.

    Args:
        features: (n, d) frozen features of all rows.
        labels: (n,) a class, -1 unlabeled, -2 out-of-class.
        classes: How many there are.
        count: How many rows to suggest.
        in_class: (n,) probability of belonging to any class; from the features by default.
        probs: (n, classes) of the current classifier, given in-class; logistic regression by default.
        strategy: "coverage", or one of label_choice.STRATEGIES.
        seed: Of what is drawn by chance: samples of many rows, and clusters.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    choose = _strategy(strategy)
    points = main_points(features)
    if in_class is None:
        in_class = in_class_probability(features, labels, classes=classes)
    if probs is None:
        probs = class_probs(points, labels, classes)
    situation = Situation(points, labels, classes, in_class.to(points), probs)
    if len(situation.unlabeled) == 0:
        return []
    return _described(choose(situation, count, seed), situation)


def coverage(situation: Situation, count: int, seed: int) -> list[int]:
    """Greedy generalized coverage: each pick adds the most to  sum_i w_i max_j k(x_i, x_j).

    i: unlabeled rows, w_i = p(in | x_i) sqrt(1 - margin_i), 1 without any label; j: answers and picks;
    k(x, x') = exp((cos(x, x') - 1) / reach).
    """
    points, rows = situation.points, situation.unlabeled
    weights = row_weights(situation)[rows]
    most = max(MOST, count)
    if len(rows) > most:  # draws by weight have the same weight
        random = torch.Generator().manual_seed(seed)
        rows = rows[weights.multinomial(most, generator=random).sort().values]
        weights = torch.ones(most)
    reach = REACH if len(situation.answered) else FIRST_REACH
    kernel = ((points[rows] @ points[rows].T - 1) / reach).exp()  # (k, k)
    covered = torch.zeros(len(rows))
    if len(situation.answered):
        covered = (((points[rows] @ points[situation.answered].T).amax(dim=1) - 1) / reach).exp()
    gain = torch.full((len(rows),), torch.inf)  # at least: what a row adds only falls with each pick
    picks: list[int] = []
    for _ in range(min(count, len(rows))):
        best = _largest_gain(gain, kernel, covered, weights)
        picks.append(int(rows[best]))
        covered = torch.maximum(covered, kernel[best])
        gain[best] = -1
    return picks


def _largest_gain(gain: Tensor, kernel: Tensor, covered: Tensor, weights: Tensor) -> int:
    """Position of the row that adds most; only gains that may be the largest are computed anew, in place.

    gain (k,) of earlier rounds, at least those of this one; kernel (k, k), covered (k,), weights (k,)
    """
    old = gain >= 0
    while old[best := int(gain.argmax())]:
        likely = gain.where(old, -torch.inf).topk(min(LOOKED_AT, len(gain))).indices
        likely = likely[old[likely]]
        gain[likely] = (kernel[likely] - covered).clamp_min_(0) @ weights
        old[likely] = False
    return best


def row_weights(situation: Situation) -> Tensor:
    """How much it matters that a label is near.   ->  (n,)"""
    weights = situation.in_class
    if bool((situation.labels >= 0).any()):
        weights = weights * (1 - margins(situation.probs)).clamp_min(0).to(weights) ** DOUBT
    return weights.clamp_min(LEAST)


def _strategy(name: str) -> Strategy:
    if name == OURS:
        return coverage
    if name not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join((OURS, *STRATEGIES))}, got {name}")
    return STRATEGIES[name]


def _described(picks: list[int], situation: Situation) -> list[Suggestion]:
    centers = torch.cat([torch.tensor(picks), situation.answered])
    _, member = nearest(situation.points[situation.unlabeled], situation.points[centers])
    sizes = torch.bincount(member, minlength=len(centers))
    any_label = bool((situation.labels >= 0).any())
    probs = situation.probs[picks]
    margin = margins(probs) if any_label else torch.zeros(len(picks))
    predicted = probs.argmax(dim=1) if any_label else torch.full((len(picks),), -1)
    return [
        Suggestion(row, float(situation.in_class[row]), int(sizes[i]), int(predicted[i]), float(margin[i]))
        for i, row in enumerate(picks)
    ]
