"""Scores of labels and pool become probabilities: an in-domain prior that needs no temperature.

On features that were not fitted to the labels, a labeled image that is judged by the others looks like any
in-class image of the pool, and the pool is the mixture of in-class and out-of-class images
(positive-unlabeled learning). So with densities f of a score s, p(in | x) = min(1, p(in) f_labels(s) /
f_pool(s)).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropaws import equations as eq
from ropaws.core.records import Share

# The share is read where this part of the labeled scores, at least, lies above: fewer say little.
LEAST_KEPT = 0.3
CONFIDENCE = 0.1  # 1 - level of the bounds that choose where to read it
DRAWS = 200  # of the labels, for the interval
INTERVAL = (0.05, 0.95)
NEUTRAL, NEUTRAL_WEIGHT = (
    0.75,
    0.5,
)  # share of a pool that nothing is known of, and its weight in labels per class
# Of a share without a gap, beside the chance of the labels: for any number of labels, for one per class.
ALWAYS_UNKNOWN, LABEL_UNKNOWN = 0.15, 0.3
LOOKALIKES = 0.25  # of what looks in-class without a gap: images of no class that no label can tell apart
BORDER = 0.5  # in-domain probability below which an image is out-of-class
ORDER = 0.02  # of the logistic curve in the prior
# Of a gap in the scores.
LEAST_POOL = 20
MOST_POINTS = 2000  # of the pool that its density is made of
PLACES, ENDS = 200, (0.005, 0.995)  # where it is looked for
WIDTH = 0.6  # of the kernel, against Silverman's rule
DEEP = 2.0  # the lower hill against the valley
AGREE = 0.85  # of the labels
SMALL = 0.02  # of the pool: fewer are no hill
NEAR_GAP = 0.05
SURE = 0.999  # a share above it is all of the pool
MOST_OFFSET = 60.0
FARTHEST = 1e3  # spreads of the pool's scores; beyond, farther makes no difference


def in_class_share(pool: Tensor, labeled: Tensor, weights: Tensor | None = None) -> float:
    """Share of the pool that belongs to the classes: best bin estimation (Garg et al. 2021).

    Above any border c the pool has at least the share p(in) times what the labels have there, so
    p(in) <= q_pool(c) / q_labeled(c); the border is the one with the least upper confidence bound.
    pool (n,), labeled (l,): scores, the labeled ones judged without themselves; weights (l,): how much of the
    in-class pool each label stands for, p(y) / n_y, where that is not the same  ->  0 to 1
    """
    found, (scores, counts) = _finite(pool), _weighted(labeled, weights)
    if len(found) == 0 or len(scores) == 0:
        return 1.0
    return _best_bin(np.sort(found), scores, counts)


def _weighted(
    labeled: Tensor, weights: Tensor | None
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """The scores that are finite, and their weights."""
    if weights is None:
        return _finite(labeled), None
    kept = labeled.isfinite().cpu()
    return _finite(labeled), weights.detach().cpu().double()[kept].numpy()


def _best_bin(
    pool: NDArray[np.float64], labeled: NDArray[np.float64], weights: NDArray[np.float64] | None
) -> float:
    """pool ascending"""
    order = np.argsort(-labeled, kind="stable")
    labeled = labeled[order]
    count: float = len(labeled)
    if weights is None:
        kept = np.arange(max(1, math.ceil(LEAST_KEPT * len(labeled))), len(labeled) + 1)
        above = kept / len(labeled)
    else:
        weights = weights[order]
        above = weights.cumsum() / weights.sum()
        kept = np.flatnonzero(above >= min(LEAST_KEPT, above[-1])) + 1
        above = above[kept - 1]
        count = weights.sum() ** 2 / (weights**2).sum()  # of equal weight that would be as noisy
    ratio = (1 - np.searchsorted(pool, labeled[kept - 1]) / len(pool)) / above
    noise = math.sqrt(math.log(4 / CONFIDENCE) / 2)
    bound = ratio + noise / above * (len(pool) ** -0.5 + count**-0.5)
    return float(min(1.0, ratio[bound.argmin()]))


def score_gap(pool: Tensor, labeled: Tensor, weights: Tensor | None = None) -> float | None:
    """The score between two hills of the pool's scores, where nearly all labels are on the upper one.

    The valley of a kernel density that is deepest against the lower of the hills beside it; and then that of
    what is above it, as out-of-class images of two kinds have a valley between them too. None where none is
    DEEP enough, or the labels do not agree.   As for in_class_share.
    """
    found, (scores, counts) = _finite(pool), _weighted(labeled, weights)
    gap = None
    while (valley := _valley(found)) is not None and np.average(scores >= valley, weights=counts) >= AGREE:
        gap, found = valley, found[found >= valley]
    return gap


def _valley(found: NDArray[np.float64]) -> float | None:
    if len(found) < LEAST_POOL or found.std() < eq.TINY:
        return None
    low, high = np.quantile(found, ENDS).tolist()
    places = np.linspace(low, high, PLACES)
    some = np.quantile(found, np.linspace(0, 1, min(len(found), MOST_POINTS)))
    middle = (np.quantile(found, 0.75) - np.quantile(found, 0.25)) / 1.34
    width = WIDTH * 1.06 * (min(found.std(), middle) or found.std()) * len(found) ** -0.2
    density = np.exp(-(((places[:, None] - some) / width) ** 2) / 2).sum(axis=1)
    left, right = np.maximum.accumulate(density), np.maximum.accumulate(density[::-1])[::-1]
    depth = np.minimum(left, right) / np.maximum(density, eq.TINY)
    place = float(places[depth.argmax()])
    return place if depth.max() >= DEEP and SMALL < float((found < place).mean()) < 1 - SMALL else None


def share_interval(
    pool: Tensor,
    labeled: Tensor,
    weights: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    gap: float | None = None,
    seed: int = 0,
) -> Share:
    """The share, and a range that holds it in nine of ten cases.

    With a gap the share is what lies above it. Below it may be classes that no label has shown, as many as
    there are labels that are alone in their class (Good and Turing), and above it a kind of others that looks
    like the classes: as large a part of them as LOOKALIKES. Without one, the best bin is drawn to a NEUTRAL
    share, the more so the fewer labels there are per class; the range is that of other draws of as many
    labels (bootstrap), and what was found to be missing from it on pools whose share is known: most of all
    below, as images of no class that look like the classes are counted for them.

    Args:
        pool: As for in_class_share.
        labeled: As for in_class_share.
        weights: As for in_class_share.
        counts: (c,) labels of each class; None: all are of one class.
        gap: Of score_gap.
        seed: Of the draws.
    """
    found, (scores, stand) = np.sort(_finite(pool)), _weighted(labeled, weights)
    if len(found) == 0 or len(scores) < 2:
        return Share(NEUTRAL, 0.0, 1.0)  # nothing is known
    numbers = np.array([len(scores)]) if counts is None else counts[counts > 0].cpu().numpy()
    if gap is not None:
        above = 1 - float(np.searchsorted(found, gap)) / len(found)
        seen = 1 - float((numbers == 1).sum() / numbers.sum())
        low = above * seen - NEAR_GAP - LOOKALIKES * (1 - above)
        return Share(above, max(0.0, low), min(1.0, above + NEAR_GAP))
    per_class = float(numbers.mean())
    bin_share = in_class_share(pool, labeled, weights)
    estimate = (per_class * bin_share + NEUTRAL_WEIGHT * NEUTRAL) / (per_class + NEUTRAL_WEIGHT)
    random = np.random.default_rng(seed)
    draws = []
    for _ in range(DRAWS):
        drawn = random.choice(len(scores), len(scores))
        draws.append(_best_bin(found, scores[drawn], None if stand is None else stand[drawn]))
    low, high = np.quantile(draws, INTERVAL)
    # The least bound is too low by chance, in the draws as in the labels themselves (basic bootstrap).
    high = max(float(high), 2 * bin_share - float(low))
    unknown = ALWAYS_UNKNOWN + LABEL_UNKNOWN / per_class
    low = max(0.0, min(low, estimate - unknown)) * (1 - LOOKALIKES)
    return Share(estimate, low, min(1.0, max(high, estimate + unknown)))


def border_score(pool: Tensor, share: float, gap: float | None) -> float:
    """The score below which an image is out-of-class: the gap, or where the share of the pool is above."""
    found = _finite(pool)
    if gap is not None or len(found) == 0:
        return math.nan if gap is None else gap
    return float(np.quantile(found, max(0.0, 1 - share)))


def around_border(in_domain: Tensor, border: float) -> Tensor:
    """Probabilities whose odds are divided by those at the border, which gets 1/2.   (n,)  ->  (n,)

    Errors of both kinds are then balanced at 1/2 whatever the share. NaN for no border.
    """
    if math.isnan(border):
        return in_domain
    inside = in_domain * (1 - border)
    return inside / (inside + border * (1 - in_domain)).clamp_min(eq.TINY)


class PriorCurve(NamedTuple):
    """p(in | x) = min(1, exp(slope s(x) + offset)), made strictly monotone in the score s.

    A small part is a logistic curve, so that points which all are in-class for sure, or which labels cannot
    tell apart, still have an order.
    """

    slope: float
    offset: float

    def __call__(self, scores: Tensor) -> Tensor:
        likely = (self.slope * scores + self.offset).clamp_max(0).exp()
        return torch.lerp(likely, scores.sigmoid(), ORDER)


def fit_curve(pool: Tensor, labeled: Tensor, share: float, weights: Tensor | None = None) -> PriorCurve:
    """The density ratio of the two samples of scores, scaled to the share.

    Logistic regression of "labeled" against "pool" gives log f_labeled(s) / f_pool(s) = slope s + const, both
    samples with the same total weight. The constant is the one at which the pool's mean is the share.
    pool (n,), labeled (l,)  ->  slope >= 0; the curve is 1 everywhere where nothing tells the two apart
    """
    found, (scores, counts) = _finite(pool), _weighted(labeled, weights)
    if share >= SURE or len(found) < 2 or len(scores) == 0 or found.std() < eq.TINY:
        return PriorCurve(0.0, 0.0)
    mean, spread = found.mean(), found.std()
    slope = _logistic_slope((found - mean) / spread, (scores - mean) / spread, counts) / spread
    if slope <= 0:
        return PriorCurve(0.0, math.log(max(share, eq.TINY)))
    low, high = -MOST_OFFSET, MOST_OFFSET
    centered = slope * (found - mean)
    for _ in range(60):
        middle = (low + high) / 2
        below = np.exp(np.minimum(0, centered + middle)).mean() < share
        low, high = (middle, high) if below else (low, middle)
    return PriorCurve(float(slope), float(high - slope * mean))


def _logistic_slope(
    pool: NDArray[np.float64], labeled: NDArray[np.float64], counts: NDArray[np.float64] | None
) -> float:
    from sklearn.linear_model import LogisticRegression  # slow to load

    # Where the pool's scores are nearly equal, labels may be 1e28 spreads away, which no solver takes.
    values = np.concatenate([pool, labeled])[:, None].clip(-FARTHEST, FARTHEST)
    is_labeled = np.repeat([0, 1], [len(pool), len(labeled)])
    weights = np.repeat([len(labeled) / len(pool), 1.0], [len(pool), len(labeled)])
    if counts is not None:
        weights[len(pool) :] = counts * len(labeled) / counts.sum()
    fitted = LogisticRegression(C=10.0).fit(values, is_labeled, sample_weight=weights)
    return float(fitted.coef_[0, 0])


def _finite(scores: Tensor) -> NDArray[np.float64]:
    """A lone label has no score: it is the only one of all classes."""
    values = scores.detach().cpu().double().numpy()
    return np.asarray(values[np.isfinite(values)])
