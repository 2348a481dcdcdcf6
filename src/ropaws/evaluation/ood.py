"""Telling out-of-class images by their distance from every label."""

import torch
from torch import Tensor

from ropaws import equations as eq
from ropaws.models.operators import declare_missing_operators


def max_similarity(queries: Tensor, support: Tensor, *, batch: int = 4096) -> Tensor:
    """s(x) = max_l z . z_l; low means out-of-class.   queries (n, d), support (s, d)  ->  (n,)"""
    return torch.cat([eq.cosine(part, support).amax(dim=1) for part in queries.split(batch)])


def auroc(scores: Tensor, in_class: Tensor) -> float:
    """Area under the ROC curve of a similarity in [-1, 1] that should be high in-class.   both (n,)"""
    declare_missing_operators()
    from torchmetrics.functional.classification import binary_auroc  # slow to load

    # torchmetrics squashes scores outside [0, 1] with a sigmoid, which may merge neighbours.
    return float(binary_auroc(((scores.double() + 1) / 2).clamp(0, 1), in_class.long()))
