"""Telling out-of-class images by their distance from every label."""

from typing import NamedTuple

import torch
from torch import Tensor

from ropaws import equations as eq
from ropaws.models.operators import declare_missing_operators

RECALL = 0.95  # of in-class images at which FPR95 is taken


def max_similarity(queries: Tensor, support: Tensor, *, batch: int = 4096) -> Tensor:
    """s(x) = max_l z . z_l; low means out-of-class.   queries (n, d), support (s, d)  ->  (n,)"""
    return torch.cat([eq.cosine(part, support).amax(dim=1) for part in queries.split(batch)])


class Detection(NamedTuple):
    """How well a score tells in-class from out-of-class images; all from 0 to 1."""

    auroc: float  # 0.5 is guessing
    fpr95: float  # share of out-of-class images let in where 95 % of the in-class ones are
    aupr_in: float  # area under precision and recall, in-class as the positive class
    aupr_out: float  # the same, out-of-class as the positive class


def detection(scores: Tensor, in_class: Tensor) -> Detection:
    """Of a similarity in [-1, 1] that should be high in-class.   both (n,), both kinds present"""
    declare_missing_operators()
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision, binary_roc

    # torchmetrics squashes scores outside [0, 1] with a sigmoid, which may merge neighbours.
    shares, truth = ((scores.double() + 1) / 2).clamp(0, 1), in_class.long()
    false_in, true_in, _ = binary_roc(shares, truth)
    return Detection(
        auroc=float(binary_auroc(shares, truth)),
        fpr95=float(false_in[true_in >= RECALL].min()),
        aupr_in=float(binary_average_precision(shares, truth)),
        aupr_out=float(binary_average_precision(1 - shares, 1 - truth)),
    )
