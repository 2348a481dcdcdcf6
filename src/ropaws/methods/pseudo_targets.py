"""Targets that a network makes for unlabeled images, and the loss of learning them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class HardTargets(NamedTuple):
    """Pseudo-labels; nothing flows back through them."""

    classes: Tensor  # (u,)
    mask: Tensor  # (u,) 1.0 where the network is sure enough, else 0.0


def hard_targets(probs: Tensor, threshold: float) -> HardTargets:
    """The most likely class, and whether its probability reaches the threshold.   probs (u, c)"""
    confidence, classes = probs.detach().max(dim=1)
    return HardTargets(classes, (confidence >= threshold).to(probs.dtype))


def soft_cross_entropy(targets: Tensor, logits: Tensor) -> Tensor:
    """H(target, softmax(logits)) of each row.   both (u, c)  ->  (u,)"""
    return -(targets * F.log_softmax(logits, dim=1)).sum(dim=1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all rows; those that are masked out count as zero, as in FixMatch.   both (u,)  ->  ()"""
    return (values * mask).mean() if len(values) else values.sum()


def sharpened(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature), without gradient.   (u, c)"""
    return torch.softmax(logits.detach() / temperature, dim=1)
