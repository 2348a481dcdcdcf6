"""How accurate is a classifier on the pool, as far as the labels that a person gave can tell?

Two ways. An audit is a random sample of the pool, drawn before it is labeled: its share of right answers is
unbiased. Labels that were suggested are no such sample: they are centers of clusters or doubtful images, one
class like the other. They do say how often an answer of some confidence is right. The corrected estimate fits
that on the labels, each held out, and averages it over the confidences of the pool.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.core.labels import OUT_OF_CLASS

LEVEL = 0.95  # of all intervals
NORMAL = 1.96  # standard errors on either side, at that level
AUDIT, CORRECTED = "audit", "corrected leave-one-out"
LEAST_AUDIT = 20  # labels of a random sample from which on it speaks for itself
LEAST_LABELS = 10  # of a corrected estimate
LEAST_PER_CLASS = 2  # the same, on average; with fewer, most classes are unknown once a label is held out
# The curve from confidence to accuracy, sigmoid(offset + slope logit(confidence)); what is expected of it
# before the labels are seen was chosen on other data than those of the table in docs/analysis.md.
SLOPE, SLOPE_PRECISION, OFFSET_PRECISION = 0.7, 4.0, 0.1
CLIP = 1e-4  # confidences are kept so far from 0 and 1
STEPS = 50  # of Newton's method, at most
# The curve itself may not hold: standard error that no label removes, and as a share of the correction.
CURVE_ERROR, CORRECTION_ERROR = 0.04, 0.5


class AccuracyEstimate(NamedTuple):
    """A share of the pool, and the interval in which it likely lies."""

    value: float
    low: float
    high: float
    labels: int  # that it was counted on
    kind: str  # AUDIT or CORRECTED


class PoolAccuracy(NamedTuple):
    """Accuracy on the unlabeled images; None where nothing can be said yet."""

    in_class: AccuracyEstimate | None  # share of the in-class images that get their class
    overall: AccuracyEstimate | None  # share of all images whose answer, a class or out-of-class, is right


class Answers(NamedTuple):
    """What a classifier says of images."""

    answer: Tensor  # (n,) class number; the number of classes for out-of-class
    confidence: Tensor  # (n,) probability of the answer


def pool_accuracy(held_out: Tensor, labels: Tensor, audit: Tensor, pool: Tensor) -> PoolAccuracy:
    """Both accuracies from probabilities, whose last column is out-of-class.

    Args:
        held_out: Of the labeled images by a classifier that has not learned from them, (l, c + 1).
        labels: What the person said, (l,): class numbers or OUT_OF_CLASS.
        audit: Which of them are a random sample of the pool, drawn before they were labeled, (l,) bool.
        pool: Of the unlabeled images by the classifier itself, (u, c + 1).

    Returns:
        Estimates from the audit where it is large enough, else from all labels. Without an out-of-class label
        or an audit, nothing is said of the accuracy overall.
    """
    classes = held_out.shape[1] - 1
    truth = torch.where(labels == OUT_OF_CLASS, classes, labels)
    inside = truth < classes
    few = int(inside.sum()) < LEAST_PER_CLASS * classes
    said, rest = open_answers(held_out), open_answers(pool)
    overall = estimate_accuracy(said.answer == truth, said.confidence, audit, rest.confidence)
    closed, rest = closed_answers(held_out[inside]), closed_answers(pool)
    in_class = estimate_accuracy(
        closed.answer == truth[inside],
        closed.confidence,
        audit[inside],
        rest.confidence,
        weights=1 - pool[:, -1].double(),
    )
    return PoolAccuracy(_unless(few, in_class), _unless(few or bool(inside.all()), overall))


def open_answers(probs: Tensor) -> Answers:
    """Out-of-class where that is likelier than not, else the likeliest class.   (n, c + 1)"""
    best, answer = probs[:, :-1].double().max(dim=1)
    out = probs[:, -1].double()
    return Answers(torch.where(out > 0.5, probs.shape[1] - 1, answer), torch.where(out > 0.5, out, best))


def closed_answers(probs: Tensor) -> Answers:
    """The likeliest class, given that an image belongs to one.   (n, c + 1)"""
    inside = probs[:, :-1].double()
    total = inside.sum(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    confidence, answer = (inside / total).max(dim=1)
    return Answers(answer, confidence)


def estimate_accuracy(
    right: Tensor, confidence: Tensor, audit: Tensor, pool: Tensor, *, weights: Tensor | None = None
) -> AccuracyEstimate | None:
    """Share of the pool that is classified correctly: by the audit if it is large enough, else by all labels.

    Args:
        right: Whether each labeled image was, held out, (l,) bool.
        confidence: Of the same answers, (l,).
        audit: Which labels are a random sample of the pool, (l,) bool.
        pool: Confidence of the answers for unlabeled images, (u,).
        weights: How much each of them counts, (u,); alike by default.
    """
    if int(audit.sum()) >= LEAST_AUDIT:
        return audit_accuracy(right[audit])
    return corrected_accuracy(right, confidence, pool, weights=weights)


def audit_accuracy(right: Tensor) -> AccuracyEstimate | None:
    """Estimate accuracy from a random sample of the pool, with the exact binomial interval.   (n,) bool"""
    count, good = len(right), int(right.sum())
    if count == 0:
        return None
    low, high = binomial_interval(good, count)
    return AccuracyEstimate(good / count, low, high, count, AUDIT)


def corrected_accuracy(
    right: Tensor, confidence: Tensor, pool: Tensor, *, weights: Tensor | None = None
) -> AccuracyEstimate | None:
    """Estimate accuracy from labels that were not drawn at random; arguments as for estimate_accuracy.

    The interval is wider by what the curve may be off, and by half of the correction. It is never narrower
    than that of a random sample of as many labels, of which as many are right: 15 of 15 are 78 to 100 %.
    """
    if len(right) < LEAST_LABELS or len(pool) == 0:
        return None
    curve, covariance = _fit_curve(_inputs(confidence), right.double())
    inputs = _inputs(pool)
    likely = (inputs @ curve).sigmoid()
    share = torch.ones(len(pool), dtype=torch.float64) if weights is None else weights.double()
    share = share / share.sum().clamp_min(torch.finfo(torch.float64).tiny)
    value = (share * likely).sum()
    slope = (share * likely * (1 - likely)) @ inputs
    correction = value - right.double().mean()
    variance = slope @ covariance @ slope + CURVE_ERROR**2 + (CORRECTION_ERROR * correction) ** 2
    reach = NORMAL * float(variance.sqrt())
    low, high = binomial_interval(round(float(value) * len(right)), len(right))
    low, high = min(low, max(0.0, float(value) - reach)), max(high, min(1.0, float(value) + reach))
    return AccuracyEstimate(float(value), low, high, len(right), CORRECTED)


def _inputs(confidence: Tensor) -> Tensor:
    """(n,)  ->  (n, 2)"""
    odds = confidence.double().clamp(CLIP, 1 - CLIP).logit()
    return torch.stack([torch.ones_like(odds), odds], dim=1)


def _fit_curve(inputs: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Offset and slope that are likeliest after the labels, and their covariance.   ->  (2,), (2, 2)"""
    prior = torch.tensor([0.0, SLOPE], dtype=torch.float64)
    precision = torch.tensor([OFFSET_PRECISION, SLOPE_PRECISION], dtype=torch.float64).diag()
    curve, bend = prior, precision
    for _ in range(STEPS):
        likely = (inputs @ curve).sigmoid()
        ascent = inputs.T @ (right - likely) - precision @ (curve - prior)
        bend = inputs.T @ (inputs * (likely * (1 - likely))[:, None]) + precision
        step = torch.linalg.solve(bend, ascent)
        # A full step may leap past the top where all answers are right.
        step = step / step.abs().max().clamp_min(1.0)
        curve = curve + step
        if float(step.abs().max()) < 1e-9:
            break
    return curve, torch.linalg.inv(bend)


def _unless(refused: bool, found: AccuracyEstimate | None) -> AccuracyEstimate | None:
    """An audit holds in any case."""
    return None if refused and found is not None and found.kind != AUDIT else found


# Random samples of the pool


def draw_audit(candidates: Tensor, n: int, seed: int) -> Tensor:
    """A uniform random sample in random order: the first k of it are one too.   (u,)  ->  (at most n,)"""
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return candidates[order[:n]]


def audit_half_width(n: int, expected: float = 0.5) -> float:
    """Half the width of the interval that n labels give if that share of them is right; widest at 0.5."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if not 0 <= expected <= 1:
        raise ValueError(f"expected must be from 0 to 1, got {expected}")
    low, high = binomial_interval(round(n * expected), n)
    return (high - low) / 2


def binomial_interval(good: int, count: int, level: float = LEVEL) -> tuple[float, float]:
    """Clopper and Pearson's, which holds the true share at least as often as the level says."""
    from scipy.special import betaincinv  # slow to load

    tail = (1 - level) / 2
    low = float(betaincinv(good, count - good + 1, tail)) if good else 0.0
    high = float(betaincinv(good + 1, count - good, 1 - tail)) if good < count else 1.0
    return low, high
