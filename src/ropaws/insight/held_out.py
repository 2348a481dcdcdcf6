"""Classifiers on features, how often they are right on held-out labels, and what more labels would bring."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.classify.classifier import ClassifierSettings, OpenSetClassifier
from ropaws.classify.head import LabeledRows, Points
from ropaws.classify.logistic import fit_logistic, unit_rows
from ropaws.classify.soft_nn import LabeledEmbeddings, class_probabilities


class Measured(NamedTuple):
    """A figure with its standard error."""

    value: float
    error: float


def accuracy(right: Tensor) -> Measured:
    """Share of images that were right.   (n,) bool, or how often each was right, from 0 to 1; n >= 1"""
    share = float(right.double().mean())
    return Measured(share, share_error(share, len(right)))


def share_error(share: float, images: int) -> float:
    """Standard error of a share of so many images.

    It is that with one more right and one more wrong image, so that 10 of 10 is not certain.
    """
    likely = (share * images + 1) / (images + 2)
    return math.sqrt(likely * (1 - likely) / images)


def difference(first: Tensor, second: Tensor) -> Measured:
    """Accuracy of the first minus that of the second, on the same images: only where they differ counts.

    both (n,) bool, n >= 1
    """
    change = first.double() - second.double()
    return Measured(float(change.mean()), math.sqrt(float(change.var(correction=0)) / len(change)))


TEMPERATURE = 0.1  # of soft nearest neighbors, as in the paper
FOLDS, FEWER_FOLDS = 10, 5  # at most; fewer from this many labels on
MANY = 500
REFITS = 5  # of everything, at most
REPEATS, WORK = 5, 1000  # of the folds at most, and how many labels that may take

# Features (l, d) and labels (l,) to learn from, features (n, d) to classify, number of classes  ->  (n,)
Classifier = Callable[[Tensor, Tensor, Tensor, int], Tensor]
Probabilities = Classifier  # the same, with probabilities (n, c)


def logistic(rows: Tensor, labels: Tensor, queries: Tensor, classes: int) -> Tensor:
    return fit_logistic(rows, labels, classes=classes)(queries).argmax(dim=1)


def logistic_probs(rows: Tensor, labels: Tensor, queries: Tensor, classes: int) -> Tensor:
    return fit_logistic(rows, labels, classes=classes)(queries)


def soft_nn(rows: Tensor, labels: Tensor, queries: Tensor, classes: int) -> Tensor:
    return soft_nn_probs(rows, labels, queries, classes, temperature=TEMPERATURE).argmax(dim=1)


def soft_nn_probs(
    rows: Tensor, labels: Tensor, queries: Tensor, classes: int, *, temperature: float
) -> Tensor:
    """Soft nearest neighbors; all classes count alike, however many labels they have.

    unit rows (l, d), labels (l,), unit queries (n, d)  ->  (n, c)
    """
    support = LabeledEmbeddings(rows, labels, classes)
    return class_probabilities(queries, support, temperature=temperature)


CLASSIFIERS: Mapping[str, Classifier] = {"logistic": logistic, "soft_nn": soft_nn}


def centered(rows: Tensor, labeled: Tensor) -> Tensor:
    """Unit rows around the mean of the labeled ones: what all images share tells no class.

    rows (n, d), labeled (l, d)  ->  (n, d)
    """
    return unit_rows(unit_rows(rows) - unit_rows(labeled).mean(dim=0))


def held_out(features: Tensor, labels: Tensor, classify: Classifier, *, classes: int) -> Tensor:
    """How often each labeled image was right, classified by those of other folds.   ->  (j,) from 0 to 1

    Every fold holds out as many of each class, at least one where there are so many: leaving out one image
    alone would make its class the one with the fewest labels. The folds are drawn several times. An image
    that is the only one of its class is left out, as no other could know it.
    features (l, d), labels (l,)
    """
    counts = torch.bincount(labels, minlength=classes)
    if int(counts.max()) < 2:
        raise ValueError("holding labels out needs a class with at least 2 of them")
    folds = min(FOLDS if len(labels) <= MANY else FEWER_FOLDS, int(counts.max()))
    repeats = max(1, min(REPEATS, WORK // len(labels)))
    random = torch.Generator().manual_seed(0)
    right = torch.zeros(len(labels), dtype=torch.float64)
    for _ in range(repeats):
        fold = _folds(labels, folds, random)
        for number in range(folds):
            out = fold == number
            found = classify(features[~out], labels[~out], features[out], classes)
            right[out] += (found == labels[out]).double()
    return right[counts[labels] > 1] / repeats


def held_out_refits(points: Tensor, labeled: LabeledRows, settings: ClassifierSettings) -> Tensor:
    """Whether each labeled image is right, classified by a fit of everything that has not seen its label.

    The prior, the head and the rest are fitted anew in every fold; the image stays in the pool, unlabeled. An
    image that is the only one of its class is left out.
    points (n, d) of all images  ->  (j,) bool
    """
    counts = torch.bincount(labeled.labels, minlength=labeled.classes)
    folds = min(REFITS, int(counts.max()))
    fold = _folds(labeled.labels, folds, torch.Generator().manual_seed(0))
    judged = counts[labeled.labels] > 1
    right = torch.zeros(len(judged), dtype=torch.bool)
    for number in range(folds):
        out = (fold == number) & judged
        if not out.any():
            continue
        rest = LabeledRows(labeled.rows[~out], labeled.labels[~out], labeled.classes)
        model = OpenSetClassifier(Points(points), rest, settings)
        right[out] = model.classify(points[labeled.rows[out]]).argmax(dim=1) == labeled.labels[out]
    return right[judged]


def held_out_probs(
    features: Tensor, labels: Tensor, *, classes: int, predict: Probabilities = logistic_probs
) -> Tensor:
    """Class probabilities of each labeled image, by a classifier that has learned from the other folds.

    Each class is spread evenly over up to ten folds, so each classifier has nearly all labels. An image that
    is the only one of its class gets 0 for it.
    features (l, d), labels (l,), at least 2 of them  ->  (l, c)
    """
    if len(labels) < 2:
        raise ValueError(f"holding labels out needs at least 2 of them, got {len(labels)}")
    folds = min(FOLDS if len(labels) <= MANY else FEWER_FOLDS, len(labels))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    fold = torch.empty_like(order)
    fold[order[labels[order].argsort(stable=True)]] = torch.arange(len(labels)) % folds
    probs = torch.zeros(len(labels), classes, dtype=torch.float64)
    for number in range(folds):
        out = fold == number
        probs[out] = predict(features[~out], labels[~out], features[out], classes).double()
    return probs


def _folds(labels: Tensor, folds: int, random: torch.Generator) -> Tensor:
    """The fold in which each label is held out.   (l,)  ->  (l,)"""
    fold = torch.empty_like(labels)
    for number in labels.unique().tolist():
        rows = (labels == number).nonzero().squeeze(1)
        fold[rows[torch.randperm(len(rows), generator=random)]] = torch.arange(len(rows)) % folds
    return fold


LEAST = 3  # labels per class, in the median: two to learn from, and one to test on
MOST_DRAWS, LEAST_DRAWS = 20, 3
DRAWN_WORK = 40_000  # labels times classes that are drawn in all, about


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
    return max(LEAST_DRAWS, min(MOST_DRAWS, DRAWN_WORK // (len(labels) * classes)))


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
