"""What to label next: points that stand for many doubtful ones, and likely new classes.

In-class points are chosen by facility location: a label explains the points around it, and the next one
should explain the most doubt that is left. One gain covers uncertainty (what is sure adds little), density
(a lone point explains only itself) and diversity (what a label explains already does not count again).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ropaws import equations as eq

CANDIDATES, TARGETS = 2048, 4096  # limits of the comparison: 100 MB
LEAST_DOUBT = 0.05  # of a point that is sure: with nothing in doubt, density still counts
REACH = 0.2  # a label represents the points whose kernel value is at least this
NEW_SHARE = 0.2  # of the suggestions, at most, go to likely new classes
NEW_CLASS = 10  # out-of-class points that a new class needs at least


class Suggestion(NamedTuple):
    position: int  # in the pool
    kind: str  # "doubtful" or "new class"
    gain: float  # doubt explained, in points; for a new class its size times its tightness
    stands_for: int  # points of the pool that it represents


def suggest(
    pool: Tensor,
    probs: Tensor,
    in_domain: Tensor,
    support: Tensor,
    *,
    count: int,
    threshold: float,
    width: float,
    seed: int = 0,
) -> list[Suggestion]:
    """The points most worth a label, best first.

    pool (n, d), probs (n, c), in_domain (n,), support (s, d): labeled already; threshold: of in_domain;
    width: of the kernel exp((z . z' - 1) / width) that says how far a label reaches
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    inside = (in_domain >= threshold).nonzero().squeeze(1)
    outside = (in_domain < threshold).nonzero().squeeze(1)
    new = _new_classes(pool, outside, most=math.floor(NEW_SHARE * count), seed=seed)
    # What is in doubt, and likely of some class: a label of an out-of-class image explains no class.
    worth = doubt(probs).clamp_min(LEAST_DOUBT) * in_domain
    doubtful = _doubtful(pool, worth, inside, support, count - len(new), width=width, seed=seed)
    if len(doubtful) + len(new) < count:  # too few in-class points: the outside ones by the same gain
        rest = outside[~torch.isin(outside, torch.tensor([s.position for s in new], dtype=torch.long))]
        chosen = torch.cat([support, pool[[s.position for s in [*doubtful, *new]]]])
        missing = count - len(doubtful) - len(new)
        doubtful += _doubtful(pool, worth, rest, chosen, missing, width=width, seed=seed)
    return _interleave(doubtful, new)


def doubt(probs: Tensor) -> Tensor:
    """Entropy over its largest value: 0 is sure, 1 is no idea.   (n, c)  ->  (n,)"""
    return eq.cross_entropy(probs, probs) / math.log(max(2, probs.shape[1]))


def _doubtful(
    pool: Tensor, worth: Tensor, among: Tensor, support: Tensor, count: int, *, width: float, seed: int
) -> list[Suggestion]:
    """Greedy facility location: each pick explains the most worth that no label explains yet.   worth (n,)"""
    targets = _sample(among, TARGETS, seed)
    candidates = _sample(targets, CANDIDATES, seed + 1)
    if count < 1 or len(candidates) == 0:
        return []
    scale = len(among) / len(targets)  # of a sampled target
    weights = worth[targets]
    explained = eq.in_domain_prior(pool[targets], support, temperature=width)  # (t,)
    reach = ((eq.cosine(pool[candidates], pool[targets]) - 1).clamp_max(0) / width).exp()  # (k, t)
    left = torch.ones(len(candidates), dtype=torch.bool)
    picks = []
    for _ in range(min(count, len(candidates))):
        gains = (reach - explained).clamp_min(0) @ weights
        best = int(gains.masked_fill(~left, -1).argmax())
        speaks_for = int(((reach[best] > explained) & (reach[best] > REACH)).sum() * scale)
        position = int(candidates[best])
        picks.append(Suggestion(position, "doubtful", float(gains[best]) * scale, max(1, speaks_for)))
        explained = torch.maximum(explained, reach[best])
        left[best] = False
    return picks


def _new_classes(pool: Tensor, among: Tensor, *, most: int, seed: int) -> list[Suggestion]:
    """The centers of clusters of out-of-class points, the largest and tightest first."""
    sample = _sample(among, TARGETS, seed)
    clusters = min(2 * most, len(sample) // NEW_CLASS)
    if most < 1 or clusters < 1:
        return []
    from sklearn.cluster import KMeans  # slow to load

    points = pool[sample]
    fitted = KMeans(clusters, n_init=2, random_state=seed).fit(points.numpy())
    member = torch.from_numpy(fitted.labels_).long()
    found = []
    for cluster in range(clusters):
        rows = (member == cluster).nonzero().squeeze(1)
        if len(rows) < NEW_CLASS:
            continue
        center = torch.nn.functional.normalize(points[rows].mean(dim=0), dim=0)
        similarity = points[rows] @ center
        size = round(len(rows) * len(among) / len(sample))
        position = int(sample[rows[similarity.argmax()]])
        found.append(Suggestion(position, "new class", size * float(similarity.mean()), size))
    return sorted(found, key=lambda s: -s.gain)[:most]


def _sample(positions: Tensor, most: int, seed: int) -> Tensor:
    if len(positions) <= most:
        return positions
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))
    return positions[order[:most].sort().values]


def _interleave(doubtful: list[Suggestion], new: list[Suggestion]) -> list[Suggestion]:
    """A likely new class after every few doubtful points, so that the top of the list has both."""
    every = max(1, round(len(doubtful) / (len(new) + 1)))
    ranked: list[Suggestion] = []
    waiting = iter(new)
    for number, suggestion in enumerate(doubtful, start=1):
        ranked.append(suggestion)
        if number % every == 0 and (following := next(waiting, None)) is not None:
            ranked.append(following)
    return [*ranked, *waiting]
