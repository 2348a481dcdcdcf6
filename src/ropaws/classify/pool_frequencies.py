"""How frequent the classes are in a pool whose labels do not say it: counted, unless the pool is balanced.

Labels are propagated through the pool, every class with the same weight, and the images that each class gets
are counted. Whether the pool is balanced is asked of a short head that starts with these counts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws import equations as eq
from ropaws.classify import head
from ropaws.classify.calibration import expected_accuracy
from ropaws.classify.class_prior import (
    ClassPrior,
    around,
    bounded,
    differ_by_more_than_chance,
    jackknife_error,
    labels_agree,
    shrunk,
    smoothed,
    with_interval,
)
from ropaws.classify.head import LabeledRows, Points, train_head
from ropaws.classify.propagation import Kernel, solve_voters
from ropaws.classify.soft_nn import TYPICAL_PRIOR, LabeledEmbeddings, class_probabilities

COUNTING = Kernel(temperature=0.05, prior_temperature=None)
HEARING = 0.95  # of what a point has heard that it passes on, so that the propagation ends soon
PARTS = 10  # of the labels, each left out once, for the error of the counts
LABEL_SHARE = 0.5  # of the labels' own frequencies where they are a sample of the pool; the rest is counts
TRIAL_STEPS = 60  # of a short head
BALANCED = 0.28  # sum of |p(y) - 1/c| up to which classes are taken for equal: that of a long tail of ratio 3


class Weighed(NamedTuple):
    """Unlabeled rows of the pool."""

    points: Tensor  # (n, d) unit rows
    inside: Tensor  # (n,) how likely each is in-class
    plain: Tensor  # (n, c) log probabilities, by classifiers that take all classes for equally frequent


class Estimate(NamedTuple):
    """Frequencies of the classes."""

    prior: ClassPrior
    guessed: bool  # from the pool alone, so that training may correct it


def estimated(support: LabeledEmbeddings, pool: Weighed, start: Tensor | None, held_out: float) -> Estimate:
    """Estimate the class frequencies of a pool.

    start (c,): what the numbers of labels suggest, None for nothing; held_out: accuracy of the plain
    classifiers on held-out labels, NaN if unknown
    """
    numbers = torch.bincount(support.labels, minlength=support.classes)
    nearest = reached(support, pool)
    found = counted(nearest, pool, support.classes)
    sample = start is not None and differ_by_more_than_chance(numbers.cpu())
    if start is not None and sample and labels_agree(numbers.to(found), found):
        mixed = torch.lerp(found, start.to(found), LABEL_SHARE)
        return Estimate(with_interval(bounded(mixed), len(support.labels)), False)
    parts = (_without(support, part) for part in label_parts(support.labels))
    error = jackknife_error([counted(reached(rest, pool), pool, support.classes) for rest in parts])
    guess = torch.full_like(found, 1 / support.classes)
    several = len(support.labels.unique()) > 1  # else everything is counted for the one
    unequal = several and not sample and looks_unequal(support, pool, found)
    if unequal:
        agreement = _mean((nearest == pool.plain.argmax(dim=1)).to(found), pool)
        right = expected_accuracy(agreement, held_out, support.classes)
        guess = shrunk(found, error, wrong=1 - right)
    return Estimate(around(bounded(guess), found, error), sample or unequal)


def counted(nearest: Tensor, pool: Weighed, classes: int) -> Tensor:
    """Frequencies of the classes that points are nearest to.   (n,)  ->  (c,)"""
    return smoothed(pool.inside.new_zeros(classes).index_add(0, nearest, pool.inside))


def reached(support: LabeledEmbeddings, pool: Weighed) -> Tensor:
    """The class whose labels reach each point most, all classes having the same weight.   ->  (n,)

    To count them is nearer to the truth than mean probabilities: no prediction is sure.
    """
    heard = solve_voters(
        pool.points,
        support.embeddings,
        support.one_hot,
        COUNTING,
        tolerance=0.01,
        prior=HEARING * pool.inside,
    ).heard
    return heard.argmax(dim=1)


def looks_unequal(support: LabeledEmbeddings, pool: Weighed, found: Tensor) -> bool:
    """Whether a short head that starts with these frequencies still sees unequal classes at its end.

    Labels are few: the counts of balanced pools differ by chance as much as those of unequal ones on weak
    features. A head whose predictions may follow the pool draws the two apart.   found (c,)
    """
    with torch.enable_grad():
        seen = counted(_predicted(support, pool, found), pool, support.classes)
    seen = seen[support.labels.unique()]  # of a class without a label nothing is seen
    return float((seen / seen.sum() - 1 / len(seen)).abs().sum()) > BALANCED


def _predicted(support: LabeledEmbeddings, pool: Weighed, class_prior: Tensor) -> Tensor:
    """The classes of the points, by a short head.   ->  (n,)"""
    known, points = support.embeddings.cpu(), pool.points.cpu()
    trained = train_head(
        Points(torch.cat([known, points])),
        LabeledRows(torch.arange(len(known)), support.labels.cpu(), support.classes),
        head.OBJECTIVE,
        torch.cat([torch.ones(len(known)), pool.inside.cpu().float()]),
        typical_prior=TYPICAL_PRIOR,
        steps=TRIAL_STEPS,
        seed=0,
        class_prior=class_prior.cpu(),
        follow=True,
    )
    known, points = (F.normalize(trained(rows), dim=1) for rows in (known, points))
    shown = LabeledEmbeddings(known, support.labels.cpu(), support.classes)
    found = class_probabilities(points, shown, temperature=head.OBJECTIVE.temperature)
    return found.argmax(dim=1).to(pool.points.device)


def _mean(values: Tensor, pool: Weighed) -> float:
    """Over the in-class part of the pool.   values (n,)"""
    return float(pool.inside @ values / pool.inside.sum().clamp_min(eq.TINY))


def label_parts(labels: Tensor) -> list[Tensor]:
    """Parts of the labels with as equal a share of every class as can be; of a lone label none.

    labels (l,)  ->  (l,) bool each
    """
    if len(labels) < 2:  # nothing would be left without it
        return []
    by_class = labels.argsort(stable=True)
    parts = torch.zeros(min(PARTS, len(labels)), len(labels), dtype=torch.bool, device=labels.device)
    for part, chosen in enumerate(parts):
        chosen[by_class[part :: len(parts)]] = True
    return list(parts)


def _without(support: LabeledEmbeddings, part: Tensor) -> LabeledEmbeddings:
    return LabeledEmbeddings(support.embeddings[~part], support.labels[~part], support.classes)
