"""Does a confidence of 80 % mean right in 80 of 100 cases?"""

from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.models.operators import declare_missing_operators

BINS = 15


def expected_calibration_error(probs: Tensor, truth: Tensor) -> float:
    """ECE with 15 bins, as in the paper.   probs (n, c), truth (n,)"""
    # Imported here: loading it takes longer than all the rest of the command line.
    declare_missing_operators()
    from torchmetrics.functional.classification import multiclass_calibration_error

    error = multiclass_calibration_error(probs, truth, num_classes=probs.shape[1], n_bins=BINS, norm="l1")
    return float(error)


class Bin(NamedTuple):
    """Predictions of about one confidence."""

    low: float
    high: float
    images: int
    confidence: float  # mean of the bin; 0 if empty
    accuracy: float


def reliability(probs: Tensor, truth: Tensor) -> list[Bin]:
    """The bins that the ECE is made of: sum of images |confidence - accuracy| / n.

    probs (n, c), truth (n,)
    """
    confidence, predicted = probs.double().max(dim=1)
    right = (predicted == truth).double()
    # A bin holds its lower edge and not its upper one, but for the last: as torchmetrics does.
    number = (confidence * BINS).long().clamp_max(BINS - 1)
    counts = torch.bincount(number, minlength=BINS)
    sums = [torch.bincount(number, weights=values, minlength=BINS) for values in (confidence, right)]
    means = [(total / counts.clamp_min(1)).tolist() for total in sums]
    return [
        Bin(i / BINS, (i + 1) / BINS, count, means[0][i], means[1][i])
        for i, count in enumerate(counts.tolist())
    ]
