"""Does a confidence of 80 % mean right in 80 of 100 cases?"""

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
