"""Suspected label errors: labeled images that the other labels contradict."""

from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.evaluation.answers import OUT_OF_CLASS
from ropaws.evaluation.leave_one_out import main_directions, ridge, soft_nn

# Chosen on other data than those of the table in docs/analysis.md; see benchmarks/label_errors.py.
NEIGHBOR_SHARE = 0.3  # of soft nearest neighbors, beside ridge regression
RIVAL_SHARE = 0.5  # how much the best other class counts against a label, beside the label's own probability
# A label is suspected if another class is more likely by a factor of half the number of classes, 4 at most.
# The more classes there are, the smaller is the probability that noise leaves to a wrong label.
MOST_ODDS = 4.0


class SuspectedError(NamedTuple):
    """One label, and what the other labeled images say."""

    position: int  # among the labeled images
    label: int  # as given
    suspected: int  # the class that the others vote for
    own: float  # probability of the label given
    other: float  # probability of the class suspected


def rank_label_errors(features: Tensor, labels: Tensor, *, classes: int) -> list[SuspectedError]:
    """The labels that the other labels contradict, the most suspect first.

    An image that is the only one with its label is left out: no other could confirm it.

    Args:
        features: Frozen features of the labeled images, (l, d), of any length.
        labels: Their labels, (l,): class numbers, or OUT_OF_CLASS, which is judged like one more class.
        classes: Number of classes.

    Returns:
        Labels for which another class is more likely, with many classes much more.
    """
    numbers, log_probs = _judged(features, labels, classes)
    probs = log_probs.exp()
    own = probs.gather(1, numbers[:, None]).squeeze(1)
    other, suspected = probs.max(dim=1)
    odds = min(MOST_ODDS, len(numbers.unique()) / 2)
    contradicted = (suspected != numbers) & (other >= odds * own)
    found = (contradicted & _confirmable(numbers)).nonzero().squeeze(1)
    ranked = found[_quality(log_probs, numbers)[found].argsort(stable=True)]
    as_given = [*range(classes), OUT_OF_CLASS]
    return [
        SuspectedError(i, int(labels[i]), as_given[int(suspected[i])], float(own[i]), float(other[i]))
        for i in ranked.tolist()
    ]


def label_quality(features: Tensor, labels: Tensor, *, classes: int) -> Tensor:
    """How well the other labels agree with each label; only the order counts.

    Infinite for an image that is the only one with its label. Arguments as for rank_label_errors.
    features (l, d), labels (l,)  ->  (l,)
    """
    numbers, log_probs = _judged(features, labels, classes)
    return _quality(log_probs, numbers).masked_fill(~_confirmable(numbers), torch.inf)


def _judged(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The class number of each label, out-of-class being the last, and what the other labels say.

    A geometric mean: ridge regression knows borders, neighbors know what is small or bent.
    ->  (l,), log probabilities (l, c + 1)
    """
    if ((labels < 0) & (labels != OUT_OF_CLASS) | (labels >= classes)).any():
        raise ValueError(
            f"labels must be class numbers below {classes}, or {OUT_OF_CLASS} for out-of-class, got"
            f" {labels.min()} to {labels.max()}; leave out images without a label"
        )
    numbers = torch.where(labels == OUT_OF_CLASS, classes, labels)
    if len(labels) < 2:
        return numbers, torch.zeros(len(labels), classes + 1, dtype=torch.float64)
    points = main_directions(features)
    by_ridge = ridge(points, numbers, classes=classes + 1)
    by_neighbors = soft_nn(points, numbers, classes=classes + 1)
    mixed = (1 - NEIGHBOR_SHARE) * by_ridge + NEIGHBOR_SHARE * by_neighbors
    return numbers, mixed.log_softmax(dim=1)


def _quality(log_probs: Tensor, labels: Tensor) -> Tensor:
    """The label's log probability, less a share of the best other one's.   (l, c), (l,)  ->  (l,)"""
    own = log_probs.gather(1, labels[:, None]).squeeze(1)
    if log_probs.shape[1] == 1:
        return own
    others = log_probs.scatter(1, labels[:, None], -torch.inf).amax(dim=1)
    return own - RIVAL_SHARE * others


def _confirmable(labels: Tensor) -> Tensor:
    """Which images are not the only one with their label.   (l,)  ->  (l,) bool"""
    return torch.bincount(labels)[labels] > 1 if len(labels) else labels.bool()
