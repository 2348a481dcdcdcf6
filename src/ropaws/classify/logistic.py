"""Logistic regression on features: the plain rival that every run is measured against."""

import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# C, the inverse of the regularization, for rows of about unit length. On pretrained features this was level
# with the best of 0.1 to 100 from 1 to 25 labels per class; choosing it on so few labels costs accuracy.
STRENGTH = 10.0
STEPS = 2000  # of the solver at most


class Logistic(NamedTuple):
    """A fitted classifier."""

    mean: Tensor  # (d,) of the unit rows it was fitted to
    weights: Tensor  # (c, d)
    bias: Tensor  # (c,) minus infinity for a class without a label

    def __call__(self, features: Tensor) -> Tensor:
        """Class probabilities.   (n, d)  ->  (n, c), rows sum to 1"""
        logits = (unit_rows(features) - self.mean) @ self.weights.T + self.bias
        return logits.softmax(dim=1)


def unit_rows(features: Tensor) -> Tensor:
    return F.normalize(features.double(), dim=1)


def fit_logistic(features: Tensor, labels: Tensor, *, classes: int) -> Logistic:
    """features (l, d) of any length, labels (l,); all in float64"""
    rows = unit_rows(features)
    mean = rows.mean(dim=0)
    rows = rows - mean
    length = float(rows.square().sum(dim=1).mean().sqrt()) or 1.0
    weights, bias = rows.new_zeros(classes, rows.shape[1]), rows.new_full((classes,), -torch.inf)
    present = labels.unique()
    bias[present] = 0.0
    if len(present) > 1:
        weights[present], bias[present] = _solve(rows / length, labels)
    return Logistic(mean, weights / length, bias)


def _solve(rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and bias of the classes that have labels.   rows (l, d)  ->  (p, d), (p,)"""
    from sklearn.linear_model import LogisticRegression  # slow to load

    # The weights are sums of the rows: with fewer rows than dimensions, solving inside their span is exact.
    basis = torch.linalg.svd(rows, full_matrices=False).Vh if len(rows) < rows.shape[1] else None
    inside = rows if basis is None else rows @ basis.T
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of unique classes")  # few labels of many classes
        model = LogisticRegression(C=STRENGTH, max_iter=STEPS).fit(inside.numpy(), labels.numpy())
    weights, bias = torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)
    if len(weights) == 1:  # two classes: one logit, that of the second
        weights, bias = torch.cat([0 * weights, weights]), torch.cat([0 * bias, bias])
    return weights if basis is None else weights @ basis, bias
