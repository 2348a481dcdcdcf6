"""Label propagation over pools of any size, in blocks: no n x n matrix is ever made.

RoPAWS solves its posterior over a mini-batch. A pool of a million points is treated alike: a random
sample of it, the voters, is solved to the fixed point; every other point then asks the labels and the
voters once. With as many voters as points this is the closed form of Eq. (12) itself.

Memory, in bytes, for m voters, s supports and blocks of b rows: about 4 m (m + s) if the votes of the
voters fit into the memory allowed, and 16 b (m + s), where b is chosen to fit. Never n x n.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ropaws import equations as eq
from ropaws.classify.soft_nn import LabeledEmbeddings

VOTERS = 1024  # four mini-batches of the paper's CIFAR runs; more change little
MEMORY = 1 << 25  # bytes of votes that are kept from one iteration to the next
BLOCK = 1 << 23  # bytes of a block of votes: small ones stay in a CPU's cache
COPIES = 4  # of a block of votes that the softmax needs at once
LEAST_BLOCK = 16
PADDING = 16  # numbers between rows of votes: a cache holds few rows that begin a power of two apart
EVEN = 64  # larger blocks have a multiple of so many rows, which BLAS divides evenly among threads
ONE_BY_ONE, FOLDS = 40, 20  # labels up to which each is held out alone; else the number of parts
SLOW, SOLVED = 0.98, 4096  # slower than this, up to that many points are solved in closed form


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """How points vote for one another."""

    temperature: float = 0.1
    prior_temperature: float | None = 0.1  # None: every point is taken for in-class
    label_ratio: float = 5.0
    self_vote: bool = False


class Voters(NamedTuple):
    """Unlabeled points, and what they believe."""

    points: Tensor  # (m, d) unit rows
    mass: Tensor  # (m, c) q(y|x) of each, at the fixed point or after the iterations asked for
    before: Tensor  # (m, c) one iteration earlier: what the other points read
    heard: Tensor  # (m, c) the mass before the prior: what a voter hears from the labels and the others


def solve_voters(
    points: Tensor,
    support: Tensor,
    labels: Tensor,
    kernel: Kernel,
    *,
    iterations: int | None = None,
    tolerance: float = 1e-4,
    most: int = 1000,
    memory: int = MEMORY,
    prior: Tensor | None = None,
) -> Voters:
    """The posterior mass of the points themselves, by iteration.

    points (m, d), support (s, d), labels (s, c)  ->  mass (m, c). iterations=None: until no entry is farther
    from the fixed point than the tolerance, or most steps; where that would take too long, up to 4,096 points
    are solved in closed form. Votes that do not fit into the memory are computed in each iteration.
    prior (m,): in-domain prior of each point, in the place of the kernel's.
    """
    if iterations is not None and iterations < 1:
        raise ValueError(f"iterations must be None (fixed point) or at least 1, got {iterations}")
    labels = labels.to(points.dtype)
    weights = class_balance(labels)
    inside = _inside(points, support, kernel, memory) if prior is None else prior[:, None]
    fits = 4 * len(points) * (len(points) + len(support)) <= memory
    kept = points.new_empty(len(points), len(points) + PADDING)[:, : len(points)] if fits else None
    first = []
    for votes in _vote_blocks(points, support, weights, kernel, memory):
        first.append((_heard(votes.to_support, labels), votes.to_unlabeled.sum(dim=1)))
        if kept is not None:
            kept[votes.rows] = votes.to_unlabeled
    told, sums = map(torch.cat, zip(*first, strict=True))  # told: S p, what the labels say

    def blocks() -> Iterable[Tensor]:
        anew = _vote_blocks(points, support, weights, kernel, memory)
        return (votes.to_unlabeled for votes in anew) if kept is None else [kept]

    def hear(mass: Tensor) -> Tensor:
        return told + torch.cat([_heard(votes, mass) for votes in blocks()])

    rho = float((inside.squeeze(1) * sums).amax())  # the error shrinks by it each step
    if iterations is None and rho > SLOW and len(points) <= SOLVED:
        classes = torch.eye(labels.shape[1], dtype=points.dtype, device=points.device)  # told is S p already
        mass = eq.propagate(inside * told, torch.cat(list(blocks())).mul_(inside), classes)
        return Voters(points, mass, mass, hear(mass))
    before, heard, mass = torch.zeros_like(told), told, inside * told
    for _ in range(most if iterations is None else iterations - 1):
        before, heard = mass, hear(mass)
        mass = inside * heard
        # What is left of the way is at most movement * rho / (1 - rho).
        movement = float((mass - before).abs().amax())
        if iterations is None and movement * rho <= tolerance * (1 - rho):
            before = mass  # at the fixed point
            break
    return Voters(points, mass, before, heard)


class Votes(NamedTuple):
    """A block of rows of [s_l | s_u]."""

    rows: slice
    to_support: Tensor  # (b, s)
    to_unlabeled: Tensor  # (b, m)


def _vote_blocks(
    points: Tensor, support: Tensor, weights: Tensor, kernel: Kernel, memory: int
) -> Iterator[Votes]:
    size = _block_rows(len(points) + len(support), memory)
    for start in range(0, len(points), size):
        rows = slice(start, start + size)
        votes = eq.neighbor_weights(
            points,
            support,
            temperature=kernel.temperature,
            label_ratio=kernel.label_ratio,
            self_vote=kernel.self_vote,
            rows=rows,
            support_weights=weights,
        )
        yield Votes(rows, *votes)


def _inside(points: Tensor, support: Tensor, kernel: Kernel, memory: int) -> Tensor:
    """The prior of each point.   ->  (m, 1)"""
    if kernel.prior_temperature is None:
        return points.new_ones(len(points), 1)
    parts = points.split(_block_rows(len(support), memory))
    found = [eq.in_domain_prior(part, support, temperature=kernel.prior_temperature) for part in parts]
    return torch.cat(found)[:, None]


def _heard(votes: Tensor, beliefs: Tensor) -> Tensor:
    """votes @ beliefs, turned around for few classes: BLAS takes a third of the time for few long rows.

    votes (b, m), beliefs (m, c)  ->  (b, c)
    """
    if beliefs.shape[1] > len(votes):
        return votes @ beliefs
    return (beliefs.T.contiguous() @ votes.T).T


def _block_rows(columns: int, memory: int) -> int:
    rows = max(LEAST_BLOCK, min(memory, BLOCK) // (4 * COPIES * columns))
    return rows if rows < EVEN else rows - rows % EVEN


def ask_voters(
    queries: Tensor, support: Tensor, labels: Tensor, voters: Voters, kernel: Kernel, *, memory: int = MEMORY
) -> Tensor:
    """Posterior mass of points that are no voters: one step of the propagation, Eq. (10).

    queries (n, d), support (s, d), labels (s, c)  ->  (n, c)
    """
    size = _block_rows(len(voters.points) + len(support), memory)
    beliefs = torch.cat([labels.to(queries.dtype), voters.before])
    known = torch.cat([support, voters.points])
    boost = queries.new_zeros(len(known))
    boost[: len(support)] = eq.label_boost(len(voters.points), len(support), kernel.label_ratio)
    boost[: len(support)] += class_balance(labels.to(queries.dtype)).log()
    mass = queries.new_empty(len(queries), beliefs.shape[1])
    scaled = (known / kernel.temperature).T
    for start in range(0, len(queries), size):
        part = queries[start : start + size]
        rows = _heard(torch.addmm(boost, part, scaled).softmax(dim=1), beliefs)
        if kernel.prior_temperature is not None:
            rows *= eq.in_domain_prior(part, support, temperature=kernel.prior_temperature)[:, None]
        mass[start : start + size] = rows
    return mass


def class_balance(labels: Tensor) -> Tensor:
    """Weight of each support that gives every class the same say, however many labels it has.

    w_i = s / (c n_y) for a support of class y with n_y of all s labels: 1 where classes have equally many, as
    Eq. (8) assumes. labels (s, c), one-hot or soft  ->  (s,), mean 1
    """
    counts = labels.sum(dim=0)
    share = labels.sum() / ((counts > 0).sum() * counts.clamp_min(eq.TINY))
    return labels @ torch.where(counts > 0, share, 0)


def choose_voters(count: int, voters: int | None, *, seed: int = 0, keys: Tensor | None = None) -> Tensor:
    """Positions of the points that vote: all, or a random sample of them.   ->  (m,) ascending

    keys (count,): random numbers that belong to the points. The choice then does not depend on their order.
    """
    if voters is not None and voters < 1:
        raise ValueError(f"voters must be None (all) or at least 1, got {voters}")
    if voters is None or voters >= count:
        return torch.arange(count)
    if keys is not None:
        return keys.argsort(stable=True)[:voters].sort().values
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:voters].sort().values


def pool_posterior(
    points: Tensor,
    support: Tensor,
    labels: Tensor,
    kernel: Kernel,
    *,
    iterations: int | None = None,
    tolerance: float = 1e-4,
    voters: int | None = VOTERS,
    seed: int = 0,
    keys: Tensor | None = None,
    memory: int = MEMORY,
) -> eq.Posterior:
    """What RoPAWS believes of every point of a pool.

    points (n, d), support (s, d), labels (s, c)  ->  Posterior((n, c), (n,))
    voters=None: all points vote, which takes n^2 time; the memory stays bounded. keys: see choose_voters.
    """
    chosen = choose_voters(len(points), voters, seed=seed, keys=keys)
    solved = solve_voters(
        points[chosen], support, labels, kernel, iterations=iterations, tolerance=tolerance, memory=memory
    )
    mass = part_mass(points, support, labels, solved, kernel, own=chosen, memory=memory)
    return eq.complete_posterior(mass)


def part_mass(
    points: Tensor,
    support: Tensor,
    labels: Tensor,
    voters: Voters,
    kernel: Kernel,
    *,
    own: Tensor,
    start: int = 0,
    memory: int = MEMORY,
) -> Tensor:
    """Posterior mass of a part of the pool, by voters that are solved.   ->  (n, c)

    points (n, d): those of the pool from position start on; own (m,): positions of the voters, ascending
    """
    first, last = torch.searchsorted(own, torch.tensor([start, start + len(points)])).tolist()
    if last - first == len(points):
        return voters.mass[first:last]
    mass = ask_voters(points, support, labels, voters, kernel, memory=memory)
    mass[own[first:last] - start] = voters.mass[first:last]  # they do not vote for themselves
    return mass


class Electorate:
    """The voters of a pool that comes in parts: those that choose_voters would choose by all keys.

    Args:
        voters: Number of points that vote, at most.
    """

    def __init__(self, *, voters: int = VOTERS) -> None:
        self.voters = voters
        self.points = torch.empty(0, 0)  # (m, d)
        self.positions = torch.empty(0, dtype=torch.long)  # (m,) in the pool, ascending
        self.keys = torch.empty(0, dtype=torch.long)
        self.seen = 0  # points of the pool so far

    def add(self, points: Tensor, keys: Tensor) -> None:
        """The next part.   points (n, d), keys (n,)"""
        if len(points) == 0 or (len(self.keys) == self.voters and int(keys.min()) >= int(self.keys.max())):
            self.seen += len(points)
            return
        everyone = torch.cat([self.keys, keys]) if self.seen else keys
        kept = choose_voters(len(everyone), self.voters, keys=everyone)
        before = kept[kept < len(self.keys)]
        new = kept[len(before) :] - len(self.keys)
        self.points = torch.cat([self.points[before], points[new]]) if self.seen else points[new]
        self.positions = torch.cat([self.positions[before], new + self.seen])
        self.keys = everyone[kept]
        self.seen += len(points)


class HeldOut(NamedTuple):
    """What propagation says of labeled points whose own label it does not know."""

    mass: Tensor  # (at most s, c)
    labels: Tensor  # (at most s,) their classes


def held_out_mass(
    points: Tensor,
    support: Tensor,
    labels: Tensor,
    kernel: Kernel,
    *,
    voters: int | None = VOTERS,
    keys: Tensor | None = None,
) -> HeldOut:
    """Posterior mass of each labeled point, as if its label were not known; lone labels are left out.

    points (n, d), support (s, d), labels (s,) class
    The labeled points are held out one by one, or in FOLDS parts of every class where they are many. The
    pool is solved without them, and then they are classified like any other point.
    """
    chosen = points[choose_voters(len(points), voters, keys=keys)]
    one_hot = torch.nn.functional.one_hot(labels).to(points.dtype)
    has_others = one_hot.sum(dim=0)[labels] > 1
    found, where = [one_hot[:0]], [labels[:0]]
    for held in _folds(labels):
        rows = held[has_others[held]]
        kept = torch.ones(len(labels), dtype=torch.bool)
        kept[held] = False
        if len(rows) == 0:
            continue
        solved = solve_voters(chosen, support[kept], one_hot[kept], kernel)
        found.append(ask_voters(support[rows], support[kept], one_hot[kept], solved, kernel))
        where.append(rows)
    return HeldOut(torch.cat(found), labels[torch.cat(where)])


def _folds(labels: Tensor) -> list[Tensor]:
    """Each label alone, or FOLDS parts, with as equal a share of every class as can be."""
    if len(labels) <= ONE_BY_ONE:
        return list(torch.arange(len(labels))[:, None])
    by_class = labels.argsort(stable=True)
    return [by_class[start::FOLDS] for start in range(FOLDS)]


@dataclass(frozen=True, eq=False)
class Propagation:
    """Unlabeled rows that vote, solved to the fixed point."""

    support: LabeledEmbeddings
    kernel: Kernel
    rows: Tensor  # (m,) positions of the voters among the rows that were learned from, ascending
    voters: Voters

    @classmethod
    def solve(
        cls, points: Tensor, rows: Tensor, support: LabeledEmbeddings, kernel: Kernel, prior: Tensor | None
    ) -> "Propagation":
        """points (m, d) of the voters, rows (m,); prior (m,) in the place of the kernel's"""
        voters = solve_voters(points, support.embeddings, support.one_hot, kernel, prior=prior)
        return cls(support, replace(kernel, prior_temperature=None), rows, voters)

    def probs(self, embedding: Tensor) -> Tensor:
        """Class probabilities, given in-class: a prior scales all of a row alike.   (n, d)  ->  (n, c)"""
        support, labels = self.support.embeddings, self.support.one_hot
        return given_in_class(ask_voters(embedding, support, labels, self.voters, self.kernel))

    def learned_probs(self, rows: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Class probabilities of rows that were learned from, up to the tolerance: no voter is asked again.

        At the fixed point what a voter believes is what it hears, times its prior. So its own vote, which
        counts where it is asked like any other row, changes the total alone.
        rows (n,) positions; embed: some of the n  ->  (k, d)  ->  (n, c)
        """
        place = torch.searchsorted(self.rows, rows).clamp_max(len(self.rows) - 1)
        votes = self.rows[place] == rows
        found = self.voters.heard.new_empty(len(rows), self.support.classes)
        found[votes] = given_in_class(self.voters.heard[place[votes]])
        if not votes.all():
            found[~votes] = self.probs(embed(~votes))
        return found


def given_in_class(mass: Tensor) -> Tensor:
    """Rows scaled to sum to one.   (n, c)  ->  (n, c)"""
    return mass / mass.sum(dim=1, keepdim=True).clamp_min(eq.TINY)
