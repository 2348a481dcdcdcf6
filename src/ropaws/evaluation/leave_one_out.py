"""What the other labels say of each label: class probabilities by leaving one out, without refitting.

Both classifiers are sums of votes, one of each other label, divided by the number of voters of each class: a
class is not more likely because it has more labels, nor less because the label in question is left out. Their
settings are those at which the given labels are most likely.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws.evaluation.logistic import unit_rows

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
