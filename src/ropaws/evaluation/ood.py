"""How well a score separates out-of-class images from in-class ones."""

from typing import NamedTuple

from torch import Tensor

from ropaws.models.operators import declare_missing_operators

RECALL = 0.95  # of in-class images at which FPR95 is taken


class Detection(NamedTuple):
    """How well a score tells in-class from out-of-class images; all from 0 to 1."""

    auroc: float  # 0.5 is guessing
    fpr95: float  # share of out-of-class images let in where 95 % of the in-class ones are
    aupr_in: float  # area under precision and recall, in-class as the positive class
    aupr_out: float  # the same, out-of-class as the positive class


def detection(scores: Tensor, in_class: Tensor) -> Detection:
    """Of a score on any scale that should be high in-class.   both (n,), both kinds present"""
    declare_missing_operators()
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision, binary_roc

    # By ranks: torchmetrics squashes scores outside [0, 1] with a sigmoid, which may merge close ones.
    values, ranks = scores.unique(return_inverse=True)
    shares, truth = ranks.double() / max(1, len(values) - 1), in_class.long()
    false_in, true_in, _ = binary_roc(shares, truth)
    return Detection(
        auroc=float(binary_auroc(shares, truth)),
        fpr95=float(false_in[true_in >= RECALL].min()),
        aupr_in=float(binary_average_precision(shares, truth)),
        aupr_out=float(binary_average_precision(1 - shares, 1 - truth)),
    )
