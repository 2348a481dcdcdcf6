"""Labels that spread through a pool of any size: the voters are chosen in one pass, and asked in another."""

import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropaws import equations as eq
from ropaws.batch import Outputs
from ropaws.methods.propagation import Electorate, held_out_in_domain, part_posterior, solve_voters
from ropaws.methods.soft_nn import kept_quantile
from ropaws.runs.run import Run

HELD = 1 << 28  # bytes of embeddings that are held; more go to a temporary file


class Verdicts(NamedTuple):
    """Outputs, with the threshold that suits their in-domain score."""

    outputs: Outputs
    threshold: float


class Spread:
    """Label propagation through a pool whose voters are known, a part of it at a time.

    Args:
        run: Its labels and its kernel.
        voters: Those of the whole pool.
        threshold: Given by the person; None: judged by the labeled images, each without itself.
    """

    def __init__(self, run: Run, voters: Electorate, threshold: float | None) -> None:
        self.run = run
        self.voters = voters
        support, kernel = run.support, run.kernel
        self.solved = solve_voters(voters.points, support.embeddings, support.one_hot, kernel)
        if threshold is not None:
            self.threshold = threshold
        elif kernel.prior_temperature is None:
            self.threshold = run.threshold
        else:  # of the score in use: the posterior
            self.threshold = kept_quantile(
                held_out_in_domain(voters.points, support.embeddings, support.labels, kernel)
            )

    def __call__(self, embedding: Tensor, in_domain: Tensor | None, start: int) -> Verdicts:
        """Of the images of the pool from position start on.

        embedding (n, d); in_domain (n,): of the method itself, where the posterior cannot tell
        """
        support = self.run.support
        posterior: eq.Posterior = part_posterior(
            embedding,
            support.embeddings,
            support.one_hot,
            self.solved,
            self.run.kernel,
            own=self.voters.positions,
            start=start,
        )
        inside = posterior.in_domain if in_domain is None else in_domain
        return Verdicts(Outputs(embedding, posterior.probs, inside, inside), self.threshold)


def needs_plain_score(run: Run) -> bool:
    """Is the posterior 1 everywhere, so that it cannot tell who is in-class?"""
    return run.kernel.prior_temperature is None


class HeldRows:
    """Rows in the order in which they came, in memory while they are few, else in a temporary file."""

    def __init__(self) -> None:
        self.file = tempfile.SpooledTemporaryFile(HELD)  # noqa: SIM115 - closed by the caller
        self.lengths: list[int] = []

    def add(self, rows: Tensor) -> None:
        """rows (n, d) float32"""
        self.file.write(rows.contiguous().numpy().tobytes())
        self.lengths.append(len(rows))

    def close(self) -> None:
        self.file.close()

    def __iter__(self) -> Iterator[Tensor]:
        """The parts as they were added."""
        total, size = sum(self.lengths), self.file.tell()
        self.file.seek(0)
        for length in self.lengths:
            part = np.frombuffer(bytearray(self.file.read(size // total * length)), np.float32)
            yield torch.from_numpy(part.reshape(length, -1))
