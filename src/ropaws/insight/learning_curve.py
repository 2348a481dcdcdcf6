"""Would more labels help? Accuracy over labels per class, each time on images that were held out."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.insight.held_out import CLASSIFIERS, Measured, centered, share_error

LEAST = 3  # labels per class, in the median: two to learn from, and one to test on
MOST_DRAWS, LEAST_DRAWS = 20, 3
WORK = 40_000  # labels times classes that are drawn in all, about


class Series(NamedTuple):
    """One classifier on one set of images."""

    accuracy: list[Measured]  # one for each number of labels per class
    last: Measured | None  # what the last doubling added; None with a single number


class Curve(NamedTuple):
    """Accuracy of classifiers on one set of images."""

    labels_per_class: list[int]  # 1, 2, 4 ...
    images: int  # that were tested on, counted once
    draws: int  # random choices of labels that the figures are means of
    series: dict[str, Series]


def learning_curve(features: Tensor, labels: Tensor, *, classes: int) -> Curve | None:
    """Measure the curve on labeled images that were not learned from; None with too few labels.

    A class with fewer labels than asked for gives all but one.
    features (l, d), labels (l,)
    """
    if _median_size(labels) < LEAST:
        return None
    sizes = _doublings(_median_size(labels) - 1)
    inputs = _inputs(features, features)
    draws = _draws(labels, classes)
    random = torch.Generator().manual_seed(0)
    right: dict[str, list[list[Tensor]]] = {name: [] for name in CLASSIFIERS}
    tested = torch.zeros(len(labels), dtype=torch.bool)
    for _ in range(draws):
        order = _by_class(labels, random)
        # Whatever the number of labels, a draw is tested on the same images.
        out = torch.cat([rows[_learned(rows, sizes[-1]) :] for rows in order])
        tested[out] = True
        for name, classify in CLASSIFIERS.items():
            chosen = [torch.cat([rows[: _learned(rows, size)] for rows in order]) for size in sizes]
            points = inputs[name]
            found = [classify(points[rows], labels[rows], points[out], classes) for rows in chosen]
            right[name].append([guess == labels[out] for guess in found])
    images = int(tested.sum())
    return Curve(sizes, images, draws, {name: _series(found, images) for name, found in right.items()})


def curve_on_tests(
    features: Tensor, labels: Tensor, tests: Tensor, truth: Tensor, *, classes: int
) -> Curve | None:
    """Measure the curve on test images, so that all labels can be learned from.

    features (l, d), labels (l,), tests (t, d), truth (t,)
    """
    if _median_size(labels) < LEAST - 1 or len(truth) == 0:
        return None
    sizes, draws = _doublings(_median_size(labels)), _draws(labels, classes)
    inputs, queries = _inputs(features, features), _inputs(tests, features)
    random = torch.Generator().manual_seed(0)
    right: dict[str, list[list[Tensor]]] = {name: [] for name in CLASSIFIERS}
    for _ in range(draws):
        order = _by_class(labels, random)
        for name, classify in CLASSIFIERS.items():
            chosen = [torch.cat([rows[:size] for rows in order]) for size in sizes]
            points = inputs[name]
            found = [classify(points[rows], labels[rows], queries[name], classes) for rows in chosen]
            right[name].append([guess == truth for guess in found])
    series = {name: _series(found, len(truth)) for name, found in right.items()}
    return Curve(sizes, len(truth), draws, series)


def _inputs(rows: Tensor, labeled: Tensor) -> dict[str, Tensor]:
    """What each classifier is given."""
    return {"logistic": rows, "soft_nn": centered(rows, labeled)}


def _median_size(labels: Tensor) -> int:
    """Labels of the class in the middle; the lower one of two."""
    return int(labels.unique(return_counts=True)[1].median()) if len(labels) else 0


def _doublings(most: int) -> list[int]:
    return [1 << power for power in range(max(0, most).bit_length())]


def _draws(labels: Tensor, classes: int) -> int:
    return max(LEAST_DRAWS, min(MOST_DRAWS, WORK // (len(labels) * classes)))


def _by_class(labels: Tensor, random: torch.Generator) -> list[Tensor]:
    """The positions of each class, in random order: a larger draw holds the smaller ones."""
    found = [(labels == number).nonzero().squeeze(1) for number in labels.unique().tolist()]
    return [rows[torch.randperm(len(rows), generator=random)] for rows in found]


def _learned(rows: Tensor, size: int) -> int:
    return max(1, min(size, len(rows) - 1))


def _series(right: list[list[Tensor]], images: int) -> Series:
    """right: for each draw, for each number of labels, which images were right; images: distinct ones"""
    by_size = list(zip(*right, strict=True))
    last = None
    if len(by_size) > 1:
        pairs = zip(by_size[-2], by_size[-1], strict=True)
        last = _mean_of([more.double() - fewer.double() for fewer, more in pairs], images)
    return Series([_mean_accuracy(found, images) for found in by_size], last)


def _mean_accuracy(found: tuple[Tensor, ...], images: int) -> Measured:
    mean, spread = _over_draws(list(found))
    # Draws share images that they test on: no more than the distinct ones count.
    return Measured(mean, math.hypot(spread, share_error(mean, images)))


def _mean_of(changes: list[Tensor], images: int) -> Measured:
    mean, spread = _over_draws(changes)
    within = sum(float(change.var(correction=0)) for change in changes) / len(changes)
    return Measured(mean, math.hypot(spread, math.sqrt(within / images)))


def _over_draws(values: list[Tensor]) -> tuple[float, float]:
    """Mean over draws, and its standard error as far as it comes from the choice of labels."""
    means = torch.stack([value.double().mean() for value in values])
    return float(means.mean()), float(means.std(correction=1)) / math.sqrt(len(means))
