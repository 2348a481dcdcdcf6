"""Which class is taken for which."""

import torch
from torch import Tensor


def confusion_matrix(predicted: Tensor, truth: Tensor, *, classes: int) -> Tensor:
    """Counts; the row is the true class, the column the predicted one.   both (n,)  ->  (c, c)"""
    return torch.bincount(truth * classes + predicted, minlength=classes**2).reshape(classes, classes)


def class_accuracy(confusion: Tensor) -> list[float | None]:
    """Share of each class's images that are recognized; None for a class without a test image."""
    totals = confusion.sum(dim=1).tolist()
    right = confusion.diagonal().tolist()
    return [r / t if t else None for r, t in zip(right, totals, strict=True)]
