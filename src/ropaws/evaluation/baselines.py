"""Honest rivals on the same frozen embedding: k-NN and logistic regression, tuned on the labels alone."""

from typing import Any

import numpy as np
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
