"""How far an accuracy may be off, given how few images it was counted on."""

import math
from typing import NamedTuple

from torch import Tensor


class Measured(NamedTuple):
    """A figure with its standard error."""

    value: float
    error: float


def accuracy(right: Tensor) -> Measured:
    """Share of images that were right.   (n,) bool, or how often each was right, from 0 to 1; n >= 1"""
    share = float(right.double().mean())
    return Measured(share, share_error(share, len(right)))


def share_error(share: float, images: int) -> float:
    """Standard error of a share of so many images.

    It is that with one more right and one more wrong image, so that 10 of 10 is not certain.
    """
    likely = (share * images + 1) / (images + 2)
    return math.sqrt(likely * (1 - likely) / images)


def difference(first: Tensor, second: Tensor) -> Measured:
    """Accuracy of the first minus that of the second, on the same images: only where they differ counts.

    both (n,) bool, n >= 1
    """
    change = first.double() - second.double()
    return Measured(float(change.mean()), math.sqrt(float(change.var(correction=0)) / len(change)))
