"""Targets that a network makes for unlabeled images, and the loss of learning them."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws.core.distributed import place, sum_constants


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


def linear_ramp(step: int, length: float) -> float:
    """step / length up to 1; 1 at once without a length."""
    return 1.0 if length <= 0 else min(1.0, step / length)


def gaussian_ramp(step: int, length: float) -> float:
    """exp(-5 (1 - min(1, step / length))^2), from Laine and Aila (2017)."""
    return math.exp(-5 * (1 - linear_ramp(step, length)) ** 2)


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
