"""From scores of labels and pool to probabilities: an in-domain prior that needs no temperature.

On features that were not fitted to the labels, a labeled image that is judged by the others looks like any
in-class image of the pool, and the pool is the mixture of in-class and out-of-class images
(positive-unlabeled learning). So with densities f of a score s, p(in | x) = min(1, p(in) f_labels(s) /
f_pool(s)).
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ropaws import equations as eq
from ropaws.batch import Share

# The share is read where this part of the labeled scores, at least, lies above: fewer say little.
LEAST_KEPT = 0.3
CONFIDENCE = 0.1  # 1 - level of the bounds that choose where to read it
DRAWS = 200  # of the labels, for the interval
INTERVAL = (0.05, 0.95)
SURE = 0.999  # a share above it is all of the pool
MOST_OFFSET = 60.0
FARTHEST = 1e3  # spreads of the pool's scores; beyond, farther makes no difference


def in_class_share(pool: Tensor, labeled: Tensor) -> float:
    """Share of the pool that belongs to the classes: best bin estimation (Garg et al. 2021).

    Above any border c the pool has at least the share p(in) times what the labels have there, so
    p(in) <= q_pool(c) / q_labeled(c); the border is the one with the least upper confidence bound.
    pool (n,), labeled (l,): scores, the labeled ones judged without themselves  ->  0 to 1
    """
    found, scores = _finite(pool), np.sort(_finite(labeled))[::-1]
    if len(found) == 0 or len(scores) == 0:
        return 1.0
    return _best_bin(np.sort(found), scores)


def _best_bin(pool: NDArray[np.float64], labeled: NDArray[np.float64]) -> float:
    """pool ascending, labeled descending"""
    kept = np.arange(max(1, math.ceil(LEAST_KEPT * len(labeled))), len(labeled) + 1)
    above = kept / len(labeled)
    ratio = (1 - np.searchsorted(pool, labeled[kept - 1]) / len(pool)) / above
    noise = math.sqrt(math.log(4 / CONFIDENCE) / 2)
    bound = ratio + noise / above * (len(pool) ** -0.5 + len(labeled) ** -0.5)
    return float(min(1.0, ratio[bound.argmin()]))


def share_interval(pool: Tensor, labeled: Tensor, *, seed: int = 0) -> Share:
    """The share, and the range that other draws of as many labels would give (bootstrap).

    The least bound is too low by chance, in the draws as in the labels themselves; the upper end allows for
    the difference (basic bootstrap).
    """
    estimate = in_class_share(pool, labeled)
    found, scores = np.sort(_finite(pool)), _finite(labeled)
    if len(found) == 0 or len(scores) < 2:
        return Share(estimate, 0.0, 1.0)  # nothing is known
    random = np.random.default_rng(seed)
    draws = [_best_bin(found, np.sort(random.choice(scores, len(scores)))[::-1]) for _ in range(DRAWS)]
    low, high = np.quantile(draws, INTERVAL)
    high = min(1.0, max(float(high), 2 * estimate - float(low)))
    return Share(estimate, min(float(low), estimate), max(high, estimate))


class PriorCurve(NamedTuple):
    """p(in | x) = min(1, exp(slope s(x) + offset)), monotone in the score s."""

    slope: float
    offset: float

    def __call__(self, scores: Tensor) -> Tensor:
        return (self.slope * scores + self.offset).clamp_max(0).exp()


def fit_curve(pool: Tensor, labeled: Tensor, share: float) -> PriorCurve:
    """The density ratio of the two samples of scores, scaled to the share.

    Logistic regression of "labeled" against "pool" gives log f_labeled(s) / f_pool(s) = slope s + const, both
    samples with the same total weight. The constant is the one at which the pool's mean is the share.
    pool (n,), labeled (l,)  ->  slope >= 0; the curve is 1 everywhere where nothing tells the two apart
    """
    found, scores = _finite(pool), _finite(labeled)
    if share >= SURE or len(found) < 2 or len(scores) == 0 or found.std() < eq.TINY:
        return PriorCurve(0.0, 0.0)
    mean, spread = found.mean(), found.std()
    slope = _logistic_slope((found - mean) / spread, (scores - mean) / spread) / spread
    if slope <= 0:
        return PriorCurve(0.0, math.log(max(share, eq.TINY)))
    low, high = -MOST_OFFSET, MOST_OFFSET
    centered = slope * (found - mean)
    for _ in range(60):
        middle = (low + high) / 2
        below = np.exp(np.minimum(0, centered + middle)).mean() < share
        low, high = (middle, high) if below else (low, middle)
    return PriorCurve(float(slope), float(high - slope * mean))


def _logistic_slope(pool: NDArray[np.float64], labeled: NDArray[np.float64]) -> float:
    from sklearn.linear_model import LogisticRegression  # slow to load

    # Where the pool's scores are nearly equal, labels may be 1e28 spreads away, which no solver takes.
    values = np.concatenate([pool, labeled])[:, None].clip(-FARTHEST, FARTHEST)
    is_labeled = np.repeat([0, 1], [len(pool), len(labeled)])
    weights = np.repeat([len(labeled) / len(pool), 1.0], [len(pool), len(labeled)])
    fitted = LogisticRegression(C=10.0).fit(values, is_labeled, sample_weight=weights)
    return float(fitted.coef_[0, 0])


def _finite(scores: Tensor) -> NDArray[np.float64]:
    """A lone label has no score: it is the only one of all classes."""
    values = scores.detach().cpu().double().numpy()
    return np.asarray(values[np.isfinite(values)])
