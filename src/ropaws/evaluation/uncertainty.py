"""How far an accuracy may be off, given how few images it was counted on."""

import math
from typing import NamedTuple

from torch import Tensor


class Measured(NamedTuple):
    """A figure with its standard error."""

    value: float
    error: float


def accuracy(right: Tensor) -> Measured:
    """Share of images that were right.   (n,) bool, n >= 1

    The standard error is that of one more right and one more wrong image, so that 10 of 10 is not certain.
    """
    share = (float(right.sum()) + 1) / (len(right) + 2)
    return Measured(float(right.double().mean()), math.sqrt(share * (1 - share) / len(right)))


def difference(first: Tensor, second: Tensor) -> Measured:
    """Accuracy of the first minus that of the second, on the same images: only where they differ counts.

    both (n,) bool, n >= 1
    """
    change = first.double() - second.double()
    return Measured(float(change.mean()), math.sqrt(float(change.var(correction=0)) / len(change)))
