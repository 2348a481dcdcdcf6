"""How likely a row belongs to any of the classes: from its frozen features, the answers so far and the pool.

Two sources. Answers vote for what is near them: a class or out-of-class. Where no answer is near, the vote is
a prior: that of positive-unlabeled learning (in_class_share.py) once every class has a label; before that it
would call all classes that have none yet out-of-class, and the share of the answers takes its place.
"""

import torch
from torch import Tensor

from ropaws import equations as eq
from ropaws.evaluation.answers import OUT_OF_CLASS, UNLABELED
from ropaws.evaluation.clusters import BLOCK, main_points, sample_rows
from ropaws.methods.in_class_score import (
    Labeled,
    evidence,
    evidence_weights,
    held_out_evidence,
    known_points,
)
from ropaws.methods.in_class_share import fit_curve, in_class_share

SAMPLE = 4096  # rows that the density of the pool is made of
TEMPERATURE = 0.1  # of the votes, on centered unit features
# Weight of the prior, in votes of an answer as near as the nearest row mostly is.
PRIOR_WEIGHT = 0.15
POOL_SHARE = 0.5  # of positive-unlabeled learning in the prior, where there are answers of both kinds


def in_class_probability(features: Tensor, labels: Tensor, *, classes: int) -> Tensor:
    """Probability of belonging to any class: 1 for labeled rows, 0 for those a person called out-of-class.

    Without any answer it is 1 everywhere.
    features (n, d) frozen features of all rows, labels (n,): a class, -1 unlabeled, -2 out-of-class  ->  (n,)
    """
    return in_class_of_points(main_points(features), labels, classes=classes)


def in_class_of_points(points: Tensor, labels: Tensor, *, classes: int) -> Tensor:
    """The same of main_points.   points (n, d)  ->  (n,)"""
    found = _prior(points, labels, classes)
    if bool((labels == OUT_OF_CLASS).any()):
        found = _voted(points, labels, found)
    found[labels >= 0] = 1.0
    found[labels == OUT_OF_CLASS] = 0.0
    return found


def _prior(points: Tensor, labels: Tensor, classes: int) -> Tensor:
    """What is believed of a row that no answer is near to.   ->  (n,)"""
    inside, answered = int((labels >= 0).sum()), int((labels != UNLABELED).sum())
    share = torch.full((len(labels),), (inside + 1) / (answered + 2) if inside < answered else 1.0)
    if inside == 0 or len(labels[labels >= 0].unique()) < classes:
        return share
    from_pool = _against_pool(points, labels, classes)
    return from_pool if inside == answered else torch.lerp(share, from_pool, POOL_SHARE)


def _voted(points: Tensor, labels: Tensor, prior: Tensor) -> Tensor:
    """(votes for a class + prior weight * prior) / (all votes + prior weight).   ->  (n,)"""
    answered = (labels != UNLABELED).nonzero().squeeze(1)
    inside = (labels[answered] >= 0).to(points)
    typical = _nearest_similarity(points)
    parts = []
    for part, before in zip(points.split(BLOCK), prior.split(BLOCK), strict=True):
        votes = ((part @ points[answered].T - typical) / TEMPERATURE).exp()
        parts.append((votes @ inside + PRIOR_WEIGHT * before) / (votes.sum(dim=1) + PRIOR_WEIGHT))
    return torch.cat(parts)


def _nearest_similarity(points: Tensor) -> float:
    """Mean cosine of a row and the row nearest to it."""
    rows = points[sample_rows(len(points), SAMPLE, 0)]
    near = (rows @ rows.T).fill_diagonal_(-1.0)
    return float(near.amax(dim=1).mean())


def _against_pool(points: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Positive-unlabeled learning: the density of the labels against that of all rows.   ->  (n,)"""
    labeled = (labels >= 0).nonzero().squeeze(1)
    pool = labels == UNLABELED
    if int(pool.sum()) < 2:
        return torch.ones(len(labels))
    chosen = sample_rows(len(points), SAMPLE, 0)
    own = torch.full((len(points),), -1)
    own[chosen] = torch.arange(len(chosen))
    known = Labeled(points[labeled], labels[labeled], classes)
    found = evidence(points, known_points(known, points[chosen]), own)
    held_out = held_out_evidence(known, points[chosen], own[labeled])
    deviation, mean = torch.std_mean(found[pool], dim=0)
    weights = evidence_weights(len(labeled), len(labels[labeled].unique()))
    scores, judged = (((part - mean) / deviation.clamp_min(eq.TINY)) @ weights for part in (found, held_out))
    return fit_curve(scores[pool], judged, in_class_share(scores[pool], judged))(scores)
