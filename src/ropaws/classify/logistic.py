"""Logistic regression on features: the plain rival of every run, and the balanced one with a say in ours."""

import math
import warnings
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# C, the inverse of the regularization, for rows of about unit length. On pretrained features this was level
# with the best of 0.1 to 100 from 1 to 25 labels per class; choosing it on so few labels costs accuracy.
STRENGTH = 10.0
STEPS = 2000  # of the solver at most
FOLDS = 5  # of the labels, at most


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
    # The weights are sums of the rows: with fewer rows than dimensions, solving inside their span is exact.
    basis = torch.linalg.svd(rows, full_matrices=False).Vh if len(rows) < rows.shape[1] else None
    weights, bias = _coefficients(rows if basis is None else rows @ basis.T, labels, None)
    return weights if basis is None else weights @ basis, bias


def _coefficients(
    rows: Tensor, labels: Tensor, class_weight: Literal["balanced"] | None
) -> tuple[Tensor, Tensor]:
    """Of scikit-learn's model, one row of weights per class also where there are two.   ->  (p, d), (p,)"""
    from sklearn.linear_model import LogisticRegression  # slow to load

    model = LogisticRegression(C=STRENGTH, class_weight=class_weight, max_iter=STEPS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of unique classes")  # few labels of many classes
        model.fit(rows.cpu().double().numpy(), labels.cpu().numpy())
    weights, bias = torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)
    if len(weights) == 1:  # two classes: one logit, that of the second
        weights, bias = torch.cat([-weights, weights]) / 2, torch.cat([-bias, bias]) / 2
    return weights, bias


def fit_balanced(points: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The same on points that are centered unit rows already, every class with the same weight.

    points (l, d), labels (l,)  ->  weight (classes, d), bias (classes,); classes without label get no chance
    """
    present = labels.unique().cpu()
    weight, bias = points.new_zeros(classes, points.shape[1]), points.new_full((classes,), -1e4)
    bias[present] = 0.0
    if len(present) > 1:
        weights, offsets = _coefficients(points, labels, "balanced")
        weight[present], bias[present] = weights.to(points), offsets.to(points)
    return weight, bias


def held_out_accuracy(points: Tensor, labels: Tensor, classes: int) -> float:
    """Of logistic regression on labels of other folds; NaN where no class has two labels.

    points (l, d), labels (l,)
    """
    counts = torch.bincount(labels, minlength=classes)
    folds = min(FOLDS, int(counts.max()))
    if folds < 2:
        return math.nan
    by_class = labels.argsort(stable=True)
    place = torch.empty_like(labels)
    place[by_class] = torch.arange(len(labels), device=labels.device)
    # Every fold has as equal a share of each class as can be.
    starts = counts.cumsum(0) - counts
    fold = (place - starts[labels]) % folds
    right = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    for number in range(folds):
        out = fold == number
        weight, bias = fit_balanced(points[~out], labels[~out], classes)
        right[out] = F.linear(points[out], weight, bias).argmax(dim=1) == labels[out]
    return float(right[counts[labels] > 1].float().mean())
