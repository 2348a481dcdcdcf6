"""Semi-supervised kernel density estimation (Wang et al., 2009), the paper's classical rival.

The density of a class is estimated from all points, each counted by its belief in the class; Bayes' rule
with even classes turns densities into new beliefs; a labeled point keeps to its label by t.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHT = 0.9  # t, of the label of a labeled point
ITERATIONS = 40
SAMPLE = 1000  # points whose distances give the median
KERNEL_BYTES = 1 << 29  # a larger kernel is not kept but computed in each iteration


class Density(NamedTuple):
    """Points and their beliefs: all that is needed to classify others."""

    points: Tensor  # (n, d) float64
    beliefs: Tensor  # (n, c)
    gamma: float

    def __call__(self, queries: Tensor) -> Tensor:
        """Class probabilities.   (q, d)  ->  (q, c), rows sum to 1"""
        kernels = _kernels(queries.to(self.points.dtype), self.points, self.gamma)
        return torch.cat([_posterior(kernel, self.beliefs) for kernel in kernels])


def _kernels(queries: Tensor, points: Tensor, gamma: float) -> Iterator[Tensor]:
    """exp(-gamma |x - x_j|^2), each row up to a factor, in blocks of rows.   ->  (b, n) each"""
    for part in queries.split(max(1, KERNEL_BYTES // (8 * len(points)))):
        yield (-gamma * torch.cdist(part, points).square()).softmax(dim=1)


def _posterior(kernel: Tensor, beliefs: Tensor) -> Tensor:
    """p(y|x) ~ p(x|y) = sum_j k(x, x_j) p(y|x_j) / sum_j p(y|x_j)

    Without the denominator the class with the most belief takes every point: with gamma = 1 / d the kernel
    of unit rows is nearly flat, and the whole belief in a class outweighs where it lies.
    """
    densities = kernel @ (beliefs / beliefs.sum(dim=0).clamp_min(torch.finfo(beliefs.dtype).tiny))
    return densities / densities.sum(dim=1, keepdim=True)


def median_gamma(points: Tensor) -> float:
    """1 / the median squared distance between points that differ, of an even sample of them.   (n, d)"""
    some = points[:: max(1, -(-len(points) // SAMPLE))]
    squares = torch.pdist(some).square()
    squares = squares[squares > 0]
    return 1 / float(squares.median()) if len(squares) else 1.0


def fit_sskde(
    labeled: Tensor,
    labels: Tensor,
    unlabeled: Tensor,
    *,
    classes: int,
    weight: float = WEIGHT,
    iterations: int = ITERATIONS,
    gamma: float | None = None,
    bandwidth: Literal["flat", "median"] = "flat",
) -> Density:
    """labeled (l, d), labels (l,), unlabeled (u, d)

    gamma: of the kernel exp(-gamma |a - b|^2); by default as bandwidth says: flat is 1 / d, which RoPAWS's
    comparison used and which leaves the kernel of unit rows nearly constant; median is 1 over the median
    squared distance, which makes the method a fair rival.
    In float64: classes differ in late digits.
    """
    points = torch.cat([labeled, unlabeled]).double()
    known = F.one_hot(labels, classes).double()
    if gamma is None:
        gamma = 1 / points.shape[1] if bandwidth == "flat" else median_gamma(points)
    beliefs = torch.cat([known, known.new_full((len(unlabeled), classes), 1 / classes)])
    kept = list(_kernels(points, points, gamma)) if 8 * len(points) ** 2 <= KERNEL_BYTES else None
    for _ in range(iterations):
        kernels = _kernels(points, points, gamma) if kept is None else kept
        beliefs = torch.cat([_posterior(kernel, beliefs) for kernel in kernels])
        beliefs[: len(labels)] = weight * known + (1 - weight) * beliefs[: len(labels)]
    return Density(points, beliefs, gamma)
