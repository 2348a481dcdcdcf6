"""The paper as code: pure functions on tensors, in the paper's order.

Shapes: u unlabeled points, s supports (labeled points), c classes, d dimensions. Embeddings are
unit rows (torch.nn.functional.normalize makes them so, and the encoder's are): this is assumed, not
checked. Half-precision inputs are computed in float32, float64 stays float64. Nothing here knows a
device, a process, randomness or settings.

Paper: Mo et al., "RoPAWS: Robust Semi-supervised Representation Learning from Uncurated Data",
ICLR 2023. A tag such as [Eq. (9)] stands exactly once in this file.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from ropaws.core.records import Losses

# A probability below this is as good as zero; its logarithm and 1 / value still fit float32.
TINY = 1e-30
# Stands for log(0) where minus infinity would make gradients NaN: no kernel gets near it.
LOG_ZERO = -1e4
# As in the reference code: a target this small matters only where log(anchor) explodes.
SMALLEST_TARGET = 1e-4

P = ParamSpec("P")
R = TypeVar("R")


def _in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Compute in float32 or better: half inputs are widened, and autocast is kept out."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if first is None:
            return function(*args, **kwargs)
        wide, named = map(_widen, args), {name: _widen(value) for name, value in kwargs.items()}
        if not torch.is_autocast_enabled(first.device.type):
            return function(*wide, **named)  # type: ignore[arg-type]
        with torch.autocast(first.device.type, enabled=False):
            return function(*wide, **named)  # type: ignore[arg-type]

    return wrapper


def _widen(value: object) -> object:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value  # type: ignore[attr-defined]


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive finite number, got {value}")


def _check_rows(name: str, rows: Tensor) -> None:
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(
            f"{name} must be a matrix with at least one row and column, got shape {tuple(rows.shape)}"
        )


def _check_points(left_name: str, left: Tensor, right_name: str, right: Tensor) -> None:
    _check_rows(left_name, left)
    _check_rows(right_name, right)
    if left.shape[1] != right.shape[1]:
        raise ValueError(
            f"{left_name} and {right_name} must have the same number of dimensions,"
            f" got {left.shape[1]} and {right.shape[1]} dimensions"
        )


def _check_labels(support: Tensor, labels: Tensor) -> None:
    _check_rows("labels", labels)
    if len(labels) != len(support):
        raise ValueError(
            f"labels must have one row per support, got {len(labels)} rows for {len(support)} supports;"
            " class indices become rows with torch.nn.functional.one_hot"
        )


@_in_full_precision
def cosine(left: Tensor, right: Tensor) -> Tensor:
    """Similarity z . z' of unit embeddings.   left (n, d), right (m, d)  ->  (n, m) in [-1, 1]

    >>> cosine(torch.eye(2), torch.tensor([[0.8, 0.6]]))
    tensor([[0.8000],
            [0.6000]])
    """
    return left @ right.T


@_in_full_precision
def soft_nn(queries: Tensor, support: Tensor, labels: Tensor, *, temperature: float = 0.1) -> Tensor:
    """Class probabilities of each query, voted by its similarity to the support (PAWS).

    softmax(z . z_S / temperature) p_S                                               [Eq. (1)]
    queries (u, d), support (s, d), labels (s, c), rows sum to 1  ->  (u, c), rows sum to 1

    >>> support, labels = torch.eye(2), torch.eye(2)
    >>> soft_nn(torch.tensor([[0.8, 0.6]]), support, labels)
    tensor([[0.8808, 0.1192]])
    """
    _check_points("queries", queries, "support", support)
    _check_labels(support, labels)
    _check_positive(temperature=temperature)
    return (cosine(queries, support) / temperature).softmax(dim=1) @ labels.to(queries.dtype)


@_in_full_precision
def sharpen(probs: Tensor, *, temperature: float = 0.25) -> Tensor:
    """Probabilities raised to the power 1/T and scaled to sum to one again.

    rho(p)_i = p_i^(1/T) / sum_j p_j^(1/T)                            [Appendix C.1, sharpening]
    probs (..., c)  ->  (..., c). Taken in logarithms: p^(1/T) underflows where T is small.

    >>> sharpen(torch.tensor([0.6, 0.4]))
    tensor([0.8351, 0.1649])
    """
    _check_positive(temperature=temperature)
    return (probs.clamp_min(TINY).log() / temperature).softmax(dim=-1)


@_in_full_precision
def cross_entropy(targets: Tensor, probs: Tensor) -> Tensor:
    """H(p, t) = - sum_y t(y) log p(y), finite at p = 0.   targets, probs (..., c)  ->  (...)

    >>> cross_entropy(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    tensor(0.6931)
    """
    return -(targets * probs.clamp_min(TINY).log()).sum(dim=-1)


@_in_full_precision
def mean_entropy(
    probs: Tensor, weights: Tensor | None = None, *, class_prior: Tensor | None = None
) -> Tensor:
    """Entropy H(p-bar) of the mean prediction, or its closeness to a class prior; me-max maximizes it.

    probs (n, c), weights (n,) of the mean or None for equal ones, class_prior (c,)  ->  ()

    >>> mean_entropy(torch.eye(2))
    tensor(0.6931)
    """
    _check_rows("probs", probs)
    mean = probs.mean(dim=0) if weights is None else weights @ probs / weights.sum().clamp_min(TINY)
    return closeness(mean, class_prior)


@_in_full_precision
def closeness(mean: Tensor, class_prior: Tensor | None = None) -> Tensor:
    """How close a mean prediction is to the class prior; with equal classes its entropy.

    log c - KL(p-bar || p(y)) = H(p-bar) + sum_y p-bar(y) log(c p(y))
    mean (c,), class_prior (c,) or None for equal classes  ->  ()

    >>> closeness(torch.tensor([0.9, 0.1]), torch.tensor([0.9, 0.1]))
    tensor(0.6931)
    """
    entropy = cross_entropy(mean, mean)
    if class_prior is None:
        return entropy
    _check_class_prior(class_prior, len(mean))
    return entropy + (mean * (len(mean) * class_prior.to(mean)).clamp_min(TINY).log()).sum()


def _check_class_prior(class_prior: Tensor, classes: int) -> None:
    if class_prior.shape != (classes,):
        raise ValueError(
            f"class_prior must have one value per class, {classes}, got shape {tuple(class_prior.shape)}"
        )


@_in_full_precision
def with_class_prior(mass: Tensor, class_prior: Tensor) -> Tensor:
    """Posterior of equal classes turned into that of unequal ones; the in-domain mass of a row stays.

    q'(y) = q(y) p(y) / sum_y' q(y') p(y') * sum_y' q(y')
    Eq. (9) to (12) with p(y) in the place of 1/c would multiply the votes for y by c p(y): for a frequent
    class the rows of U could then sum to more than one, and I - U be singular. Solved with equal classes and
    multiplied afterwards, Bayes' rule holds for each point, and nothing can be singular.
    mass (..., c) rows of any sum, class_prior (c,) sums to 1  ->  (..., c)

    >>> with_class_prior(torch.tensor([[0.5, 0.5]]), torch.tensor([0.9, 0.1]))
    tensor([[0.9000, 0.1000]])
    """
    _check_class_prior(class_prior, mass.shape[-1])
    tilted = mass * class_prior.to(mass)
    total = mass.sum(dim=-1, keepdim=True)
    return tilted * (total / tilted.sum(dim=-1, keepdim=True).clamp_min(TINY))


@_in_full_precision
def prediction_sum(
    anchors: Tensor, weights: Tensor | None = None, *, sharpen_temperature: float = 0.25
) -> tuple[Tensor, Tensor]:
    """What p-bar of a batch is made of, where the batch comes in parts: sums can be added up.

    anchors (v, u, c), weights (u,) or None for ones  ->  sharpened predictions summed over views and
    samples (c,), sum of the weights (); p-bar is the first over the second

    >>> prediction_sum(torch.eye(2)[None])
    (tensor([1., 1.]), tensor(2.))
    """
    sharp = sharpen(anchors, temperature=sharpen_temperature)
    if weights is None:
        weights = sharp.new_ones(anchors.shape[1])
    return torch.einsum("vuc,u->c", sharp, weights), len(anchors) * weights.sum()


@_in_full_precision
def cross_view_targets(
    first: Tensor, second: Tensor, *, num_crops: int, sharpen_temperature: float
) -> Tensor:
    """Each large view learns from the other one's sharpened target, small crops from their mean.

    first, second (u, c)  ->  (2 + num_crops, u, c); entries below 1e-4 are set to zero

    >>> cross_view_targets(torch.eye(2), torch.eye(2), num_crops=1, sharpen_temperature=0.25).shape
    torch.Size([3, 2, 2])
    """
    first = sharpen(first, temperature=sharpen_temperature)
    second = sharpen(second, temperature=sharpen_temperature)
    targets = torch.stack([second, first, *[(first + second) / 2] * num_crops])
    return torch.where(targets < SMALLEST_TARGET, 0, targets)


@_in_full_precision
def paws_loss(
    anchors: Tensor,
    targets: Tensor,
    *,
    sharpen_temperature: float = 0.25,
    mean: Tensor | None = None,
    class_prior: Tensor | None = None,
) -> Losses:
    """Predictions of one view follow the sharpened predictions of the other; their mean stays even.

    mean over views and samples of H(p, rho(p'))  -  H(p-bar)                        [Eq. (2)]
    anchors (v, u, c): predictions of the two large views, then of the small crops, with gradient
    targets (2, u, c): predictions of the two large views, before sharpening; taken as constants
    me-max looks at the sharpened anchors of all views, and gradient flows through it.
    mean (c,): p-bar, where these samples are a part of the batch; None: of these samples
    class_prior (c,): not in the paper; me-max draws p-bar to it instead of to equal classes, see closeness

    >>> even = torch.full((2, 4, 2), 0.5)
    >>> paws_loss(even, even).total
    tensor(0.)
    """
    _check_views(anchors, targets)
    consistency = _cross_view_entropy(anchors, targets, sharpen_temperature).mean()
    if mean is None:
        sharp = sharpen(anchors, temperature=sharpen_temperature).flatten(0, 1)
        entropy = mean_entropy(sharp, class_prior=class_prior)
    else:
        entropy = closeness(mean, class_prior)
    return Losses(consistency - entropy, _parts(consistency, entropy))


def _check_views(anchors: Tensor, targets: Tensor) -> None:
    if anchors.ndim != 3 or anchors.shape[0] < 2:
        raise ValueError(f"anchors must have shape (views >= 2, u, c), got {tuple(anchors.shape)}")
    if targets.shape != (2, *anchors.shape[1:]):
        raise ValueError(
            f"targets must have shape {(2, *anchors.shape[1:])} to fit anchors, got {tuple(targets.shape)}"
        )


def _cross_view_entropy(anchors: Tensor, targets: Tensor, sharpen_temperature: float) -> Tensor:
    """H(p, rho(p')) of every view of every sample.   anchors (v, u, c), targets (2, u, c)  ->  (v, u)"""
    goal = cross_view_targets(
        *targets.detach(), num_crops=len(anchors) - 2, sharpen_temperature=sharpen_temperature
    )
    return cross_entropy(goal, anchors)


def _parts(consistency: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    return {"consistency": consistency.detach(), "mean_entropy": entropy.detach()}


@_in_full_precision
def log_density(queries: Tensor, points: Tensor, *, temperature: float) -> Tensor:
    """Kernel density estimate at each query, up to the constant log Z of the kernel.

    log p(x) = log( 1/n sum_x' exp(z . z' / temperature) ) - log Z                   [Eq. (3)]
    queries (u, d), points (n, d)  ->  (u,)

    >>> log_density(torch.eye(2), torch.eye(2)[:1], temperature=0.5)
    tensor([2., 0.])
    """
    _check_points("queries", queries, "points", points)
    _check_positive(temperature=temperature)
    return torch.logsumexp(cosine(queries, points) / temperature, dim=1) - math.log(len(points))


@_in_full_precision
def class_log_density(queries: Tensor, support: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Density of each class at each query, up to log Z; one-hot labels, and soft ones alike.

    log p(x|y) = log( 1/|S_y| sum_{x' in S_y} k(z, z') ), p(x) of log_density        [Eq. (4)]
    log p(x|y) = log( 1/(N K) sum_x' p(y|x') k(z, z') ),  K = 1/c for all classes    [Eq. (6)]
    queries (u, d), support (s, d), labels (s, c)  ->  (u, c)
    As in the paper the support is class-balanced, |S_y| = N/c, which makes the two the same. A
    class without mass gets about LOG_ZERO instead of minus infinity, so gradients stay finite.

    >>> class_log_density(torch.eye(2)[:1], torch.eye(2), torch.eye(2), temperature=0.5)
    tensor([[2., 0.]])
    """
    _check_points("queries", queries, "support", support)
    _check_labels(support, labels)
    _check_positive(temperature=temperature)
    weighted = _log_weighted_kernel_sum(cosine(queries, support) / temperature, labels)
    return weighted - math.log(len(support) / labels.shape[1])


def _log_weighted_kernel_sum(log_kernel: Tensor, weights: Tensor) -> Tensor:
    """log sum_x' w(x', y) k(z, z'), a class at a time to keep memory at (u, n).

    log_kernel (u, n), weights (n, c)  ->  (u, c)
    """
    weights = weights.to(log_kernel.dtype)
    log_weights = torch.where(weights > 0, weights.clamp_min(TINY).log(), LOG_ZERO)
    return torch.stack([torch.logsumexp(log_kernel + column, dim=1) for column in log_weights.T], dim=1)


@_in_full_precision
def bayes_rule(class_log_density: Tensor) -> Tensor:
    """Prediction from class densities under a uniform class prior; with it, PAWS is generative.

    p(y|x) = p(x|y) p(y) / p(x), p(y) = 1/c; hard labels [Eq. (5)], soft labels [Eq. (7)]
    class_log_density (u, c)  ->  (u, c), equal to soft_nn

    >>> bayes_rule(torch.tensor([[2.0, 0.0]]))
    tensor([[0.8808, 0.1192]])
    """
    _check_rows("class_log_density", class_log_density)
    return class_log_density.softmax(dim=1)


@_in_full_precision
def semi_class_log_density(
    queries: Tensor,
    support: Tensor,
    labels: Tensor,
    unlabeled: Tensor,
    probs: Tensor,
    *,
    temperature: float,
    label_ratio: float,
) -> Tensor:
    """Density of each class from labeled and unlabeled points, these by their predictions.

    log p(x|y) = log( 1/K' ( r' sum_S p(y|x') k(z, z') + sum_U p(y|x') k(z, z') ) )  [Eq. (8)]
    with r' = r u/s, so that labeled and unlabeled points weigh r : 1 as a whole
    queries (q, d), support (s, d), labels (s, c), unlabeled (u, d), probs (u, c)  ->  (q, c)

    >>> support, labels = torch.eye(2), torch.eye(2)
    >>> queries = torch.tensor([[0.8, 0.6], [0.0, 1.0]])
    >>> guesses = torch.eye(2)
    >>> semi_class_log_density(
    ...     queries, support, labels, queries, guesses, temperature=0.5, label_ratio=5.0
    ... )
    tensor([[1.6788, 1.2000],
            [0.3269, 2.0000]])
    """
    _check_points("queries", queries, "support", support)
    _check_points("queries", queries, "unlabeled", unlabeled)
    _check_labels(support, labels)
    if probs.shape != (len(unlabeled), labels.shape[1]):
        raise ValueError(
            f"probs must have shape {(len(unlabeled), labels.shape[1])}, got {tuple(probs.shape)}"
        )
    _check_positive(temperature=temperature, label_ratio=label_ratio)
    boost = label_ratio * len(unlabeled) / len(support)
    log_kernel = cosine(queries, torch.cat([support, unlabeled])) / temperature
    weighted = _log_weighted_kernel_sum(log_kernel, torch.cat([boost * labels.to(probs.dtype), probs]))
    return weighted - math.log((label_ratio + 1) * len(unlabeled) / labels.shape[1])


def label_boost(unlabeled: int, supports: int, label_ratio: float) -> float:
    """log r', r' = r u/s: added to the log kernel of supports, it weighs labels r : 1 as a whole.

    >>> round(label_boost(100, 20, 5.0), 3)
    3.219
    """
    return math.log(label_ratio * unlabeled / supports)


@_in_full_precision
def neighbor_weights(
    queries: Tensor,
    support: Tensor,
    *,
    temperature: float,
    label_ratio: float,
    self_vote: bool = False,
    rows: slice = slice(None),
    support_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Votes that each unlabeled point gives to the supports and to the unlabeled points.

    [s_l | s_u] = softmax(z . [z_l | z_u] / temperature + [log r' | 0]), r' = r u/s  [Eq. (9)]
    queries (u, d), support (s, d)  ->  (u, s), (u, u); their rows together sum to 1
    self_vote: the formula lets a point vote for itself; the released code does not.
    rows: only the votes of these points, (m, s) and (m, u).
    support_weights (s,), mean 1: of supports that are not class-balanced; None weighs all alike.

    >>> support, labels = torch.eye(2), torch.eye(2)
    >>> queries = torch.tensor([[0.8, 0.6], [0.0, 1.0]])
    >>> to_support, to_unlabeled = neighbor_weights(queries, support, temperature=0.5, label_ratio=5.0)
    >>> to_support.round(decimals=2)
    tensor([[0.5500, 0.3700],
            [0.1100, 0.8200]])
    """
    _check_points("queries", queries, "support", support)
    _check_positive(temperature=temperature, label_ratio=label_ratio)
    voters = queries[rows]
    boost = label_boost(len(queries), len(support), label_ratio)
    to_support = cosine(voters, support).div_(temperature).add_(boost)  # in place: copies take longer
    if support_weights is not None:
        to_support.add_(support_weights.log())
    to_unlabeled = cosine(voters, queries).div_(temperature)
    if not self_vote:
        positions = torch.arange(len(queries), device=queries.device)
        own = positions[rows]
        to_unlabeled[torch.arange(len(own), device=own.device), own] = -math.inf
    logits = torch.cat([to_support, to_unlabeled], dim=1)
    del to_support, to_unlabeled  # in large blocks three copies take longer than two
    votes = logits.softmax(dim=1)
    return votes[:, : len(support)], votes[:, len(support) :]


@_in_full_precision
def propagation_step(to_support: Tensor, to_unlabeled: Tensor, labels: Tensor, probs: Tensor) -> Tensor:
    """Predictions of the unlabeled points, voted by the labels and by one another's predictions.

    q' = S p + U q                                                                  [Eq. (10)]
    to_support S (u, s), to_unlabeled U (u, u), labels p (s, c), probs q (u, c)  ->  (u, c)

    >>> half = torch.full((1, 1), 0.5)
    >>> propagation_step(half, half, torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    tensor([[0.5000, 0.5000]])
    """
    return to_support @ labels.to(to_support.dtype) + to_unlabeled @ probs


@_in_full_precision
def propagate(
    to_support: Tensor, to_unlabeled: Tensor, labels: Tensor, *, iterations: int | None = None
) -> Tensor:
    """Posterior of the unlabeled points: the fixed point of propagation_step, or steps to it.

    q = (I - U)^-1 S p                                                              [Eq. (11)]
    q^(i+1) = S p + U q^i from q^0 = 0, that many iterations     [Appendix A, propagation]
    to_support S (u, s), to_unlabeled U (u, u), labels p (s, c)  ->  q (u, c)
    A row of q sums to the point's in-domain mass, not to 1. The error of the iteration shrinks
    each step by at least the largest row sum of U.

    >>> half = torch.full((1, 1), 0.5)
    >>> propagate(half, half, torch.tensor([[1.0, 0.0]]))
    tensor([[1., 0.]])
    >>> propagate(half, half, torch.tensor([[1.0, 0.0]]), iterations=2)
    tensor([[0.7500, 0.0000]])
    """
    _check_votes(to_support, to_unlabeled, labels)
    labels = labels.to(to_support.dtype)
    if iterations is None:
        identity = torch.eye(len(to_unlabeled), dtype=to_unlabeled.dtype, device=to_unlabeled.device)
        solution: Tensor = torch.linalg.solve(identity - _substochastic(to_unlabeled), to_support @ labels)
        return solution
    if iterations < 0:
        raise ValueError(f"iterations must be None (closed form) or at least 0, got {iterations}")
    probs = to_support.new_zeros(len(to_support), labels.shape[1])
    for _ in range(iterations):
        probs = propagation_step(to_support, to_unlabeled, labels, probs)
    return probs


@_in_full_precision
def propagate_until(
    to_support: Tensor,
    to_unlabeled: Tensor,
    labels: Tensor,
    *,
    tolerance: float,
    most: int = 1000,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> tuple[Tensor, Tensor]:
    """The iteration of propagate until no entry moves by more than the tolerance, or most steps.

    to_support S (m, s), to_unlabeled U (m, u), labels p (s, c)  ->  q (m, c), last movement ()
    Where the m points are a part of all u, gather makes all rows (u, ...) of such parts (m, ...).
    The error left is at most movement * rho / (1 - rho), rho the largest row sum of U.

    >>> half = torch.full((1, 1), 0.5)
    >>> propagate_until(half, half, torch.tensor([[1.0, 0.0]]), tolerance=0.01)[0]
    tensor([[0.9922, 0.0000]])
    """
    _check_positive(tolerance=tolerance)
    start = to_support @ labels.to(to_support.dtype)
    probs, movement = start, start.new_tensor(math.inf)
    whole = gather(probs)
    for _ in range(most):
        probs = start + to_unlabeled @ whole
        before, whole = whole, gather(probs)
        movement = (whole - before).abs().amax()  # of all parts, which stop together
        if movement <= tolerance:
            break
    return probs, movement


def _check_votes(to_support: Tensor, to_unlabeled: Tensor, labels: Tensor) -> None:
    _check_rows("to_support", to_support)
    _check_rows("labels", labels)
    u, s = to_support.shape
    if to_unlabeled.shape != (u, u):
        raise ValueError(f"to_unlabeled must have shape {(u, u)}, got {tuple(to_unlabeled.shape)}")
    if len(labels) != s:
        raise ValueError(f"labels must have one row per column of to_support, got {len(labels)} rows for {s}")


def _substochastic(to_unlabeled: Tensor) -> Tensor:
    """Row sums kept a few rounding errors below one, without which I - U is singular.

    It acts only where the support's share of the votes is lost in rounding: such a point, far from
    every label, then gives that little away to "none of the classes".
    """
    most = 1 - 32 * torch.finfo(to_unlabeled.dtype).eps
    return to_unlabeled * (most / to_unlabeled.sum(dim=1, keepdim=True).clamp_min(most))


class Posterior(NamedTuple):
    """What RoPAWS believes of the unlabeled points."""

    probs: Tensor  # (u, c) rows sum to 1: a doubtful point is near uniform
    in_domain: Tensor  # (u,) in (0, 1]: probability of belonging to any of the classes


@_in_full_precision
def ropaws_posterior(
    queries: Tensor,
    support: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.1,
    prior_temperature: float | None = 0.1,
    label_ratio: float = 5.0,
    self_vote: bool = False,
    iterations: int | None = None,
    prior: Tensor | None = None,
) -> Posterior:
    """Calibrated prediction of a batch of unlabeled points, from labels and from one another.

    q = (I - s_u * p_in)^-1 (s_l * p_in) p_l, in_domain = sum_y q(y)                [Eq. (12)]
    queries (u, d), support (s, d), labels (s, c)  ->  Posterior((u, c), (u,))
    prior_temperature=None: no prior, p_in = 1. prior (u,): p_in itself, in the place of Eq. (13).

    >>> support, labels = torch.eye(2), torch.eye(2)
    >>> posterior = ropaws_posterior(torch.tensor([[1.0, 0.0], [-0.6, -0.8]]), support, labels)
    >>> posterior.in_domain > 0.5
    tensor([ True, False])
    >>> posterior.probs.round(decimals=2)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    _check_labels(support, labels)
    to_support, to_unlabeled = neighbor_weights(
        queries, support, temperature=temperature, label_ratio=label_ratio, self_vote=self_vote
    )
    if prior is None and prior_temperature is not None:
        prior = in_domain_prior(queries, support, temperature=prior_temperature)
    if prior is not None:
        to_support, to_unlabeled = prior[:, None] * to_support, prior[:, None] * to_unlabeled
    return complete_posterior(propagate(to_support, to_unlabeled, labels, iterations=iterations))


@_in_full_precision
def complete_posterior(mass: Tensor) -> Posterior:
    """The missing mass, which is the belief in no known class, spread evenly over the classes.

    q(y) + (1 - sum_y q(y)) / c                                      [Appendix A, completion]
    mass (u, c), rows sum to at most 1  ->  Posterior((u, c), (u,))

    >>> complete_posterior(torch.tensor([[0.6, 0.0]]))
    Posterior(probs=tensor([[0.8000, 0.2000]]), in_domain=tensor([0.6000]))
    """
    # The solve may leave a sum a rounding error outside (0, 1].
    mass = mass.clamp_min(0)
    total = mass.sum(dim=1, keepdim=True)
    mass = mass / total.clamp_min(1)
    probs = mass + (1 - total).clamp_min(0) / mass.shape[1]
    return Posterior(probs, total.squeeze(1).clamp(TINY, 1))


@_in_full_precision
def in_domain_prior(queries: Tensor, support: Tensor, *, temperature: float) -> Tensor:
    """Prior probability that a point belongs to any known class: it lies close to some label.

    p(in|x) = max_i exp((z . z_i - 1) / temperature)                                [Eq. (13)]
    queries (u, d), support (s, d)  ->  (u,) in (0, 1]; 1 for a support itself

    >>> in_domain_prior(torch.tensor([[1.0, 0.0], [0.8, 0.6]]), torch.eye(2), temperature=0.1)
    tensor([1.0000, 0.1353])
    """
    _check_points("queries", queries, "support", support)
    _check_positive(temperature=temperature)
    nearest = cosine(queries, support).amax(dim=1)
    return ((nearest - 1).clamp_max(0) / temperature).exp().clamp_min(TINY)


@_in_full_precision
def ropaws_loss(
    anchors: Tensor,
    targets: Tensor,
    in_domain: Tensor,
    *,
    sharpen_temperature: float = 0.25,
    reweight_power: float = 1.0,
    reweight_entropy: bool = False,
    mean: Tensor | None = None,
    class_prior: Tensor | None = None,
) -> Losses:
    """PAWS's loss on calibrated targets, with less weight on points that look out-of-class.

    mean of w H(p, rho(q'))  -  H(p-bar), w = ((q1(in|x) + q2(in|x)) / 2)^k         [Eq. (14)]
    anchors (v, u, c) as in paws_loss; targets (2, u, c) and in_domain (2, u): the posteriors of
    the two large views, taken as constants. reweight_power k = 0 weighs all points alike.
    reweight_entropy: not in the paper; the mean p-bar is weighted by w too, so that me-max evens
    out the classes over points that look in-class instead of over all of them.
    mean (c,), class_prior (c,): as in paws_loss

    >>> even = torch.full((2, 4, 2), 0.5)
    >>> ropaws_loss(even, even, torch.ones(2, 4)).total
    tensor(0.)
    """
    _check_views(anchors, targets)
    if in_domain.shape != targets.shape[:2]:
        raise ValueError(
            f"in_domain must have shape {tuple(targets.shape[:2])}, got {tuple(in_domain.shape)}"
        )
    if not 0 <= reweight_power < math.inf:
        raise ValueError(f"reweight_power must be at least 0, got {reweight_power}")
    weights = sample_weights(in_domain, power=reweight_power)
    consistency = (weights * _cross_view_entropy(anchors, targets, sharpen_temperature)).mean()
    if mean is None:
        sharp = sharpen(anchors, temperature=sharpen_temperature).flatten(0, 1)
        shares = weights.repeat(len(anchors)) if reweight_entropy else None
        entropy = mean_entropy(sharp, shares, class_prior=class_prior)
    else:
        entropy = closeness(mean, class_prior)
    return Losses(consistency - entropy, {**_parts(consistency, entropy), "weight": weights.mean()})


def sample_weights(in_domain: Tensor, *, power: float) -> Tensor:
    """w = ((q1(in|x) + q2(in|x)) / 2)^k, a constant.   in_domain (2, u)  ->  (u,)

    >>> sample_weights(torch.tensor([[1.0, 0.2], [0.5, 0.2]]), power=1.0)
    tensor([0.7500, 0.2000])
    """
    return in_domain.detach().mean(dim=0) ** power
