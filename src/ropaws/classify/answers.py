"""What a person has called in-class or out-of-class votes for what is near it, on centered unit features."""

import torch
from torch import Tensor

VOTE_TEMPERATURE = 0.1
PRIOR_WEIGHT = 0.15  # of the prior, in votes of an answer as near as the nearest row mostly is
BLOCK = 512  # rows that are looked at together


def nearest_similarity(points: Tensor) -> Tensor:
    """Mean cosine of a row and the row nearest to it.   (n, d) unit rows  ->  ()"""
    nearest = [
        (points[rows] @ points.T)
        .index_put((torch.arange(len(rows)), rows), points.new_tensor(-1.0))
        .amax(dim=1)
        for rows in torch.arange(len(points)).split(BLOCK)
    ]
    return torch.cat(nearest).mean()


def answer_votes(points: Tensor, inside: Tensor, outside: Tensor, typical: Tensor) -> Tensor:
    """How loudly answers speak of points: the sum of exp((cos - typical) / t).

    points (n, d), inside (l, d) and outside (o, d) answers: unit rows; typical: nearest_similarity
    ->  (n, 2) votes for a class, all votes
    """
    votes = [
        ((points @ answers.T - typical) / VOTE_TEMPERATURE).exp().sum(dim=1) for answers in (inside, outside)
    ]
    return torch.stack([votes[0], votes[0] + votes[1]], dim=1)


def with_votes(votes: Tensor, prior: Tensor) -> Tensor:
    """(votes for a class + w prior) / (all votes + w).   votes (n, 2), prior (n,)  ->  (n,)"""
    return (votes[:, 0] + PRIOR_WEIGHT * prior) / (votes[:, 1] + PRIOR_WEIGHT)
