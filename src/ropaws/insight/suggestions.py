"""What to label next: rows that stand for the most rows that are likely in-class and have no label near.

Geometry is that of frozen features: in those of a run that was trained on a few labels, everything has been
pulled onto these labels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.classify.pool_prior import in_class_probability
from ropaws.core.features import main_points
from ropaws.insight.groups import nearest
from ropaws.insight.label_choice import STRATEGIES, Situation, Strategy, class_probs, margins

OURS = "coverage"
# Temperature of the kernel that says how far a label reaches, on centered unit features; less before there is
# any answer: then dense places are found, and a wide kernel would take what is between them.
REACH, FIRST_REACH = 0.7, 0.3
DOUBT = 0.5  # exponent of 1 - margin in the weight of a row
LEAST = 1e-6  # weight: where all else is covered, any row is better than none
MOST = 4096  # rows that are compared with one another, at most


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
    left = torch.ones(len(rows), dtype=torch.bool)
    picks: list[int] = []
    for _ in range(min(count, len(rows))):
        gain = (kernel - covered).clamp_min_(0) @ weights
        best = int(gain.masked_fill(~left, -1).argmax())
        picks.append(int(rows[best]))
        covered = torch.maximum(covered, kernel[best])
        left[best] = False
    return picks


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
