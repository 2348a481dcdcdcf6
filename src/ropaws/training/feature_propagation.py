"""Labels that propagate through feature rows as they are, and what the rows that vote say of any other."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ropaws import equations as eq
from ropaws.methods import LabeledEmbeddings
from ropaws.methods.propagation import Kernel, Voters, ask_voters, solve_voters


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
        """Of the classes, given in-class: a prior scales all classes of a row alike.   (n, d)  ->  (n, c)"""
        support, labels = self.support.embeddings, self.support.one_hot
        return _given_in_class(ask_voters(embedding, support, labels, self.voters, self.kernel))

    def learned_probs(self, rows: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """The same up to the solver's tolerance, of rows that were learned from: no voter is asked again.

        At the fixed point what a voter believes is what it hears, times its prior. So its own vote, which
        counts where it is asked like any other row, changes the total alone.
        rows (n,) positions; embed: some of the n  ->  (k, d)  ->  (n, c)
        """
        place = torch.searchsorted(self.rows, rows).clamp_max(len(self.rows) - 1)
        votes = self.rows[place] == rows
        found = self.voters.heard.new_empty(len(rows), self.support.classes)
        found[votes] = _given_in_class(self.voters.heard[place[votes]])
        if not votes.all():
            found[~votes] = self.probs(embed(~votes))
        return found


def _given_in_class(mass: Tensor) -> Tensor:
    return mass / mass.sum(dim=1, keepdim=True).clamp_min(eq.TINY)
