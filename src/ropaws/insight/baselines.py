"""Honest rivals on the same frozen embedding: k-NN and logistic regression, tuned on the labels alone."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

NEIGHBORS = (1, 3, 5, 10, 20)
STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # C: the inverse of the regularization
FOLDS = 5


def knn_predictions(support: Tensor, labels: Tensor, queries: Tensor) -> NDArray[np.int64]:
    """k nearest neighbors by cosine, k chosen by cross-validation on the labeled points.   ->  (n,)"""
    from sklearn.neighbors import KNeighborsClassifier  # slow to load

    most = int(len(labels) * (1 - 1 / _folds(labels))) if _folds(labels) > 1 else 1
    choices = [k for k in NEIGHBORS if k <= most] or [1]
    model = KNeighborsClassifier(metric="cosine", algorithm="brute", weights="distance")
    return _chosen(model, {"n_neighbors": choices}, support, labels, queries)


def logistic_predictions(support: Tensor, labels: Tensor, queries: Tensor) -> NDArray[np.int64]:
    """Logistic regression, C chosen by cross-validation on the labeled points.   ->  (n,)"""
    from sklearn.linear_model import LogisticRegression

    if len(labels.unique()) < 2:
        return np.full(len(queries), int(labels[0]))
    model = LogisticRegression(max_iter=2000)
    return _chosen(model, {"C": list(STRENGTHS)}, support, labels, queries)


def _folds(labels: Tensor) -> int:
    """As many as the rarest class allows."""
    return min(FOLDS, int(labels.unique(return_counts=True)[1].min()))


def _chosen(
    model: object, grid: dict[str, list[Any]], support: Tensor, labels: Tensor, queries: Tensor
) -> NDArray[np.int64]:
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV, StratifiedKFold

    if _folds(labels) < 2:  # a class with one label cannot be held out: the middle choice
        middle = {name: values[len(values) // 2] for name, values in grid.items()}
        chosen = clone(model).set_params(**middle)
    else:
        folds = StratifiedKFold(_folds(labels), shuffle=True, random_state=0)
        chosen = GridSearchCV(model, grid, cv=folds)
    chosen.fit(support.numpy(), labels.numpy())
    return np.asarray(chosen.predict(queries.numpy()), np.int64)


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
