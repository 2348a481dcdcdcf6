"""Classifiers on features, and how often they are right on labeled images that were held out."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ropaws import equations as eq
from ropaws.evaluation.logistic import fit_logistic, unit_rows
from ropaws.methods.soft_nn import LabeledEmbeddings, class_probabilities

TEMPERATURE = 0.1  # of soft nearest neighbors, as in the paper
FOLDS, FEWER_FOLDS = 10, 5  # at most; fewer from this many labels on
MANY = 500
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


def mixed(dims: int, temperature: float, regression_share: float) -> Classifier:
    """The classifier of a run: soft nearest neighbors in its embedding, with a say of logistic regression.

    Its rows are the embedding, of so many dimensions, with the features to the right of it. The two are mixed
    by a geometric mean in which logistic regression on the features has this share; 0 for none.
    """

    def classify(rows: Tensor, labels: Tensor, queries: Tensor, classes: int) -> Tensor:
        near = soft_nn_probs(rows[:, :dims], labels, queries[:, :dims], classes, temperature=temperature)
        if regression_share == 0:
            return near.argmax(dim=1)
        said = fit_logistic(rows[:, dims:], labels, classes=classes)(queries[:, dims:])
        one, other = (probs.double().clamp_min(eq.TINY).log() for probs in (near, said))
        return torch.lerp(one, other, regression_share).argmax(dim=1)

    return classify


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
