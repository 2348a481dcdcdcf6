"""Weights that grow over training, as functions of the step."""

import math


def linear_ramp(step: int, length: float) -> float:
    """step / length up to 1; 1 at once without a length."""
    return 1.0 if length <= 0 else min(1.0, step / length)


def gaussian_ramp(step: int, length: float) -> float:
    """exp(-5 (1 - min(1, step / length))^2), from Laine and Aila (2017)."""
    return math.exp(-5 * (1 - linear_ramp(step, length)) ** 2)
