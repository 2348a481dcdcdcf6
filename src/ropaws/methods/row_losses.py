"""Losses of single rows against soft targets, and means over the rows of all processes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws.distributed import place, sum_constants


def kl_divergence(target_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(softmax(target_logits) || softmax(logits)) of each row; nothing flows back through the targets.

    both (n, c)  ->  (n,)
    """
    targets = F.log_softmax(target_logits.detach(), dim=1)
    return (targets.exp() * (targets - F.log_softmax(logits, dim=1))).sum(dim=1)


def kept_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the kept rows of all processes, 0 if there is none.   both (n,), mask 0 or 1  ->  ()

    The mean over processes of what this returns weighs every kept row alike.
    """
    rows = sum_constants(mask.sum()).clamp_min(1) / place().size
    return (values * mask).sum() / rows


def row_mean(values: Tensor) -> Tensor:
    """Mean over the rows of all processes, which may have different numbers of them; 0 without any.   (n,)"""
    return kept_mean(values, torch.ones_like(values))
