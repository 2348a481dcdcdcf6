"""Classifiers on features, and how often they are right on labeled images that were held out."""

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
