"""How sure class probabilities may be: as sure as two classifiers together are expected to be right."""

import math

import torch
from torch import Tensor

from ropaws import equations as eq

AGREEMENT_POWER = 1.5  # where no label can be held out: two that always agree are right, others less often
TEMPERATURES = (0.2, 20.0)
CALIBRATION_ENTRIES = 1 << 23  # images x classes that a temperature is found on: of many classes some images


def mixed_probs(near: Tensor, regression: Tensor, share: float, temperature: float = 1.0) -> Tensor:
    """Geometric mean of the soft nearest-neighbor classifier and of logistic regression.

    near (n, c) probabilities, regression (n, c) log probabilities; share of the regression
    ->  (n, c), rows sum to 1
    """
    mixed: Tensor = torch.lerp(near.clamp_min(eq.TINY).log(), regression, share)
    return (mixed / temperature).softmax(dim=1)


def expected_accuracy(agreement: float, held_out: float, classes: int) -> float:
    """How often the mix is right on in-class images; held_out is NaN where no label can be.

    Held-out labels are judged by fewer labels and without the pool, which is too low a figure; agreement is
    too high a one, as both classifiers may be wrong together.
    """
    guess = agreement**AGREEMENT_POWER if math.isnan(held_out) else (held_out + agreement) / 2
    return max(1 / max(1, classes), min(0.99, guess))


def calibrated_temperature(
    near: Tensor, regression: Tensor, weights: Tensor, *, share: float, held_out: float
) -> float:
    """The temperature at which the mean confidence is the expected accuracy.

    Args:
        near: (n, c) probabilities of unlabeled images, by their neighbors.
        regression: (n, c) log probabilities of the same.
        weights: (n,) how likely each of them is in-class.
        share: Of the regression in the mix.
        held_out: Accuracy of the regression on held-out labels; NaN if unknown.

    Returns:
        1 where there is no image or one class only.
    """
    classes = near.shape[1]
    some = slice(None, None, max(1, math.ceil(near.numel() / CALIBRATION_ENTRIES)))
    near, regression, weights = near[some], regression[some], weights[some]
    if len(near) == 0 or classes < 2 or float(weights.sum()) <= 0:
        return 1.0
    near, regression, weights = near.cpu(), regression.cpu(), weights.cpu().double()
    weights = weights / weights.sum()
    agreement = float((weights * (near.argmax(dim=1) == regression.argmax(dim=1))).sum())
    target = expected_accuracy(agreement, held_out, classes)
    return matching_temperature(mixed_probs(near, regression, share), weights, target)


def matching_temperature(
    probs: Tensor, weights: Tensor, target: float, *, bounds: tuple[float, float] = TEMPERATURES
) -> float:
    """The temperature at which the weighted mean confidence is the target.   probs (n, c), weights (n,)"""
    logits, weights = probs.clamp_min(eq.TINY).log(), weights.double() / weights.double().sum()
    low, high = (math.log(bound) for bound in bounds)
    for _ in range(40):
        middle = (low + high) / 2
        sure = (logits / math.exp(middle)).softmax(dim=1).amax(dim=1)
        above = float((weights * sure).sum()) > target
        low, high = (middle, high) if above else (low, middle)
    return math.exp((low + high) / 2)
