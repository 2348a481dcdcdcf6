"""Suspected label errors: labeled images that the other labels contradict."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws.classify.logistic import unit_rows
from ropaws.core.labels import OUT_OF_CLASS

PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # of ridge regression, rows of about unit length
SCORE_TEMPERATURES = tuple(0.02 * 100 ** (step / 24) for step in range(25))  # 0.02 to 2
KERNEL_TEMPERATURES = (0.03, 0.05, 0.08, 0.12, 0.2)  # of soft nearest neighbors
FLOOR = 0.02  # mass of soft nearest neighbors that all classes share
SAMPLE = 2000  # labels that the kernel's temperature is chosen on, at most
DIMS = 256  # main directions in which neighbors are compared
BLOCK = 1024
NEGLIGIBLE = 1e-7  # share of the largest eigenvalue below which a direction is empty


class Directions(NamedTuple):
    """Singular value decomposition of centered unit rows, the strongest direction first."""

    left: Tensor  # (l, r)
    squared: Tensor  # (r,) singular values, squared

    def main_rows(self) -> Tensor:
        """Unit rows in the main directions.   ->  (l, at most DIMS)"""
        return F.normalize(self.left[:, :DIMS] * self.squared[:DIMS].sqrt(), dim=1)


def main_directions(features: Tensor) -> Directions:
    """features (l, d) of any length"""
    rows = unit_rows(features)
    rows = rows - rows.mean(dim=0)
    rows = rows / (float(rows.square().sum(dim=1).mean().sqrt()) or 1.0)
    wide = len(rows) <= rows.shape[1]
    squared, vectors = torch.linalg.eigh(rows @ rows.T if wide else _gram(rows.float()))
    kept = (squared > NEGLIGIBLE * squared.max()).nonzero().squeeze(1).flip(0)
    squared, vectors = squared[kept], vectors[:, kept]
    left = vectors if wide else (rows.float() @ vectors.float()).double() / squared.sqrt()
    return Directions(left, squared)


def ridge(points: Directions, labels: Tensor, *, classes: int) -> Tensor:
    """Class log probabilities of each label by ridge regression on all the others.

    With the hat matrix H of all labels, the prediction of row i without itself has a closed form,
    (H y - H_ii y_i) / (1 - H_ii).
    labels (l,)  ->  (l, c)
    """
    given = F.one_hot(labels, classes).double()
    best, likelihood = given, -torch.inf
    for penalty in PENALTIES:
        kept = points.squared / (points.squared + penalty)
        itself = (points.left.square() * kept).sum(dim=1, keepdim=True)
        votes = (points.left * kept) @ (points.left.T @ given)
        scores = _per_voter((votes - itself * given) / (1 - itself), given) * (len(labels) / classes)
        scores = scores.masked_fill(given.sum(dim=0) == 0, -torch.inf)
        for temperature in SCORE_TEMPERATURES:
            log_probs = (scores / temperature).log_softmax(dim=1)
            if (found := _likelihood(log_probs, labels)) > likelihood:
                best, likelihood = log_probs, found
    return best


def soft_nn(points: Directions, labels: Tensor, *, classes: int) -> Tensor:
    """Class log probabilities of each label by its similarity to all the others.

    labels (l,)  ->  (l, c)
    """
    rows = points.main_rows().float()
    given = F.one_hot(labels, classes).double()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[:SAMPLE].sort().values
    trials = [(t, _votes(rows, given, chosen, t)) for t in KERNEL_TEMPERATURES]
    best = max(trials, key=lambda trial: _likelihood(trial[1], labels[chosen]))[0]
    return torch.cat([_votes(rows, given, part, best) for part in torch.arange(len(rows)).split(BLOCK)])


def _votes(rows: Tensor, given: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """Log probabilities of the chosen rows.   rows (l, d), given (l, c), chosen (k,)  ->  (k, c)"""
    kernel = rows[chosen] @ rows.T / temperature
    kernel[torch.arange(len(chosen)), chosen] = -torch.inf
    votes = (kernel.softmax(dim=1) @ given.float()).double()
    counts = given.sum(dim=0)
    density = votes / (counts - given[chosen]).clamp_min(1)
    probs = density / density.sum(dim=1, keepdim=True)
    present = (counts > 0).double()
    return ((1 - FLOOR) * probs + FLOOR * present / present.sum()).log()


def _per_voter(votes: Tensor, given: Tensor) -> Tensor:
    """votes (l, c), labels as rows (l, c)"""
    return votes / (given.sum(dim=0) - given).clamp_min(1)


def _likelihood(log_probs: Tensor, labels: Tensor) -> float:
    return float(log_probs.gather(1, labels[:, None]).mean())


def _gram(rows: Tensor) -> Tensor:
    return (rows.T @ rows).double()


# Labels are named if they are likelier by this (log) with errors than without.
GAIN = 1.0
ERROR_RATES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3)
ERROR_TEMPERATURES = tuple(0.1 * 1.15**step for step in range(20))  # 0.1 to 1.4
LEAST_PROBABILITY = 1e-6

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


class LabelCheck(NamedTuple):
    """Labels that the others contradict, and how many of them chance explains."""

    errors: list[SuspectedError]  # more than chance explains, the most suspect first
    contradicted: int  # labels in all
    by_chance: float  # as many are expected to be contradicted if every label is right


def check_labels(features: Tensor, labels: Tensor, *, classes: int) -> LabelCheck:
    """Suspected label errors beyond those that are expected by chance.

    The other labels are often wrong themselves, where they are few or the classes are hard. So errors are
    named only if the labels are likelier with some of them wrong than with none (ErrorRate); then those are
    that are more likely wrong than right. As for rank_label_errors.
    """
    numbers, log_probs = _judged(features, labels, classes)
    found = _ranked(labels, numbers, log_probs, classes)
    some = _confirmable(numbers)
    if not found:
        return LabelCheck([], 0, 0.0)
    none, fitted = _error_rates(log_probs[some], numbers[some])
    right = (log_probs[some] / none.temperature).softmax(dim=1)
    odds = (log_probs[some].amax(dim=1, keepdim=True) - log_probs[some]).exp()
    by_chance = float(right[odds >= _least_odds(numbers)].sum())
    wrong = fitted.wrong(log_probs, numbers)
    beyond = fitted.likelihood - none.likelihood >= GAIN
    named = [error for error in found if beyond and wrong[error.position] > 0.5]
    return LabelCheck(named, len(found), by_chance)


class ErrorRate(NamedTuple):
    """A share of labels is wrong, and then any other class: p(y) = (1 - e) q(y) + e (1 - q(y)) / (k - 1).

    q = softmax(log p / t): what the other labels say, as sure as is likeliest.
    """

    likelihood: float
    rate: float  # e; 0: all labels are right
    temperature: float  # t

    def wrong(self, log_probs: Tensor, labels: Tensor) -> Tensor:
        """Probability that each label is wrong.   (l, c), (l,)  ->  (l,)"""
        own, error = _said(log_probs, labels, self.temperature), self.rate / max(1, len(labels.unique()) - 1)
        return error * (1 - own) / (error * (1 - own) + (1 - self.rate) * own)


def _error_rates(log_probs: Tensor, labels: Tensor) -> tuple[ErrorRate, ErrorRate]:
    """The likeliest temperature without any error, and with the likeliest share of them."""
    tried = []
    for temperature in ERROR_TEMPERATURES:
        own = _said(log_probs, labels, temperature)
        any_other = (1 - own) / max(1, len(labels.unique()) - 1)
        for rate in (0.0, *ERROR_RATES):
            likelihood = ((1 - rate) * own + rate * any_other).log().sum()
            tried.append(ErrorRate(float(likelihood), rate, temperature))
    return max(each for each in tried if each.rate == 0), max(each for each in tried if each.rate > 0)


def _said(log_probs: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Probability of the label given.   (l, c), (l,)  ->  (l,)"""
    probs = (log_probs / temperature).softmax(dim=1)
    return probs.gather(1, labels[:, None]).squeeze(1).clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)


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
    return _ranked(labels, *_judged(features, labels, classes), classes)


def _ranked(labels: Tensor, numbers: Tensor, log_probs: Tensor, classes: int) -> list[SuspectedError]:
    probs = log_probs.exp()
    own = probs.gather(1, numbers[:, None]).squeeze(1)
    other, suspected = probs.max(dim=1)
    contradicted = (suspected != numbers) & (other >= _least_odds(numbers) * own)
    found = (contradicted & _confirmable(numbers)).nonzero().squeeze(1)
    ranked = found[_quality(log_probs, numbers)[found].argsort(stable=True)]
    as_given = [*range(classes), OUT_OF_CLASS]
    return [
        SuspectedError(i, int(labels[i]), as_given[int(suspected[i])], float(own[i]), float(other[i]))
        for i in ranked.tolist()
    ]


def _least_odds(numbers: Tensor) -> float:
    return min(MOST_ODDS, len(numbers.unique()) / 2)


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
