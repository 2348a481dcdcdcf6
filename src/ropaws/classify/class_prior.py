"""How frequent each class is among the in-class images of the pool: given, read off the labels, or estimated.

Labels that are equally many per class were chosen to be so and say nothing of the pool; unequal ones are most
often a random sample of it. The pool itself says the rest: labels are propagated through it, every class with
the same weight, and the images that each class gets are counted.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

ClassPriorChoice = Literal["auto", "uniform", "labels"] | Sequence[float]
CHOICES = ("auto", "uniform", "labels")
INTERVAL = (0.05, 0.95)
NOISE = 0.9  # distance to equal classes, in standard errors, up to which counts say nothing
SPREAD = 1.645  # standard errors to each side, for 90 %
AGREEMENT = 0.1  # log likelihood that each label has to gain, for the labels to be a sample of the pool
LEAST = 0.1  # of 1 / classes: no class is taken for rarer, as one that is given no chance is never found
SUM_ERROR = 1e-3  # by which frequencies may miss a sum of one


class ClassPrior(NamedTuple):
    """Frequencies of the classes, with 90 % intervals."""

    estimate: Tensor  # (c,) sums to 1
    low: Tensor  # (c,)
    high: Tensor  # (c,)


def checked_class_prior(name: str, given: object, classes: int | None = None) -> ClassPriorChoice:
    """A word, or frequencies as a tuple of numbers.

    name: of the setting, for errors; classes: how many frequencies there must be, None: any number
    """
    if isinstance(given, str):
        if given in CHOICES:
            return given  # type: ignore[return-value]
        raise ValueError(f"{name} must be 'auto', 'uniform', 'labels' or frequencies, got {given!r}")
    try:
        values = tuple(float(value) for value in given)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be 'auto', 'uniform', 'labels' or frequencies, got {given!r}"
        ) from None
    shown = ", ".join(f"{value:g}" for value in values)
    if classes is not None and len(values) != classes:
        raise ValueError(f"{name} must have one frequency per class, {classes}, got {len(values)}: {shown}")
    if not values or not all(value > 0 for value in values):
        raise ValueError(f"{name} must have frequencies above 0, got {shown}; a class without images goes")
    if abs(sum(values) - 1) > SUM_ERROR:
        raise ValueError(f"{name} must sum to 1, got {shown}, which sum to {sum(values):g}")
    return values


def starting_class_prior(
    choice: ClassPriorChoice, counts: Tensor, *, unlabeled: bool = True
) -> Tensor | None:
    """What is known before the pool is looked at.   ->  (c,), None: equal classes

    counts (c,) of labels; unlabeled: whether there is a pool that they may be a sample of
    """
    if not isinstance(choice, str):
        return torch.tensor(choice) / sum(choice)
    # By design, too, where most classes have the same number and a few had no more images to label.
    most_alike = bool((counts == counts.max()).double().mean() >= 0.5)
    by_design = not unlabeled or most_alike or int(counts.max() - counts.min()) <= 1
    if choice == "uniform" or (choice == "auto" and by_design):
        return None
    return smoothed(sampled(counts) * counts.sum() if choice == "auto" else counts)


def smoothed(counts: Tensor) -> Tensor:
    """(n_y + 1/2) / (n + c/2): no class is impossible.   (c,)  ->  (c,) sums to 1"""
    return (counts + 0.5) / (counts.sum() + len(counts) / 2)


def sampled(counts: Tensor) -> Tensor:
    """Frequencies behind the counts of a random sample: few labels differ by chance.

    1/c + g (n_y / n - 1/c) with g = 1 - ((c - 1) / X)^2, or 0, where X = sum_y (n_y - n/c)^2 / (n/c): c - 1
    on average if classes are equally frequent.   (c,)  ->  (c,) sums to 1
    """
    equal, numbers = 1 / len(counts), counts.double()
    kept = 1 - ((len(counts) - 1) / _spread(counts)) ** 2 if differ_by_more_than_chance(counts) else 0.0
    return (equal + kept * (numbers / numbers.sum() - equal)).float()


def differ_by_more_than_chance(counts: Tensor) -> bool:
    """Whether counts (c,) are farther from equal ones than chance makes those of equal classes."""
    return _spread(counts) > len(counts) - 1


def _spread(counts: Tensor) -> float:
    """The chi-squared statistic X of counts (c,) against equal classes."""
    chance = counts.double().mean()
    return float(((counts - chance) ** 2).sum() / chance)


def shrunk(frequencies: Tensor, error: Tensor | None, *, wrong: float) -> Tensor:
    """Counted frequencies without what chance and wrong predictions explain.

    (c p(y))^g with g = (1 + wrong) (1 - (NOISE |e| / |p - 1/c|)^4), or 0.   (c,)  ->  (c,) sums to 1
    error (c,): standard error e of each frequency, None if unknown
    wrong: expected share of wrong predictions. They are spread over the classes, so that counts are closer to
        equal classes than the truth is.
    """
    distance = float((frequencies - 1 / len(frequencies)).norm())
    noise = math.inf if error is None else NOISE * float(error.norm())
    power = (1 + wrong) * (1 - (noise / distance) ** 4) if distance > noise else 0.0
    found = frequencies**power
    return found / found.sum()


def jackknife_error(left_out: Sequence[Tensor]) -> Tensor | None:
    """Standard error of each frequency, found once more without each of k parts of the labels.

    sqrt((k - 1) / k sum_j (p_j - mean p)^2)   k of (c,)  ->  (c,), None for fewer than two parts
    """
    if len(left_out) < 2:
        return None
    found = torch.stack(list(left_out))
    return ((len(found) - 1) * (found - found.mean(dim=0)).square().mean(dim=0)).sqrt()


def around(frequencies: Tensor, counted: Tensor, error: Tensor | None) -> ClassPrior:
    """Give frequencies the intervals of the counts behind them: 1.64 standard errors to each side.

    all (c,); error None: unknown, so that any frequency is possible
    """
    if error is None:
        return ClassPrior(frequencies, torch.zeros_like(counted), torch.ones_like(counted))
    low, high = (counted - SPREAD * error).clamp_min(0), (counted + SPREAD * error).clamp_max(1)
    return ClassPrior(frequencies, low.minimum(frequencies), high.maximum(frequencies))


def labels_agree(counts: Tensor, frequencies: Tensor) -> bool:
    """Do frequencies that were found without the labels' counts make them likelier than equal classes do?

    If not, the labels are no random sample of the pool, or it is balanced.   both (c,)
    """
    return float((counts * (len(counts) * frequencies).log()).sum()) >= AGREEMENT * float(counts.sum())


def bounded(frequencies: Tensor) -> Tensor:
    """None below a tenth of an equal share.   (c,)  ->  (c,) sums to 1"""
    found = frequencies.clamp_min(LEAST / len(frequencies))
    return found / found.sum()


def with_interval(frequencies: Tensor, labels: int) -> ClassPrior:
    """Give frequencies the intervals that the labels alone, drawn at random, would give them.   (c,)"""
    from scipy.special import betaincinv  # slow to load

    share = frequencies.double().numpy()
    low, high = (
        torch.from_numpy(betaincinv(labels * share + 0.5, labels * (1 - share) + 0.5, level)).to(frequencies)
        for level in INTERVAL
    )
    return ClassPrior(frequencies, low.minimum(frequencies), high.maximum(frequencies))
