"""Counts of values from 0 to 1."""

import torch
from torch import Tensor

BARS = 20


def histogram(values: Tensor) -> list[int]:
    """Counts in bars of equal width; 1 belongs to the last.   (n,)  ->  20 counts"""
    number = (values.double() * BARS).long().clamp(0, BARS - 1)
    counts: list[int] = torch.bincount(number, minlength=BARS).tolist()
    return counts
