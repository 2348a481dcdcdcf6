"""One-vs-all detectors (Saito and Saenko, ICCV 2021): for each class a decision of its own, in it or not.

A head gives 2 c scores for c classes: first "not in class k" of all classes, then "in class k" of all.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.methods.classifier import linear


class Decisions(NamedTuple):
    """Log-probabilities of the two outcomes for each class."""

    outside: Tensor  # (n, c)
    inside: Tensor  # (n, c)


def one_vs_all_head(dims: int, classes: int) -> nn.Linear:
    """A linear layer without bias.   (n, dims)  ->  (n, 2 c)"""
    return linear(dims, 2 * classes, bias=False)


def decisions(scores: Tensor) -> Decisions:
    """A softmax over the two outcomes of each class.   (n, 2 c)"""
    outside, inside = scores.unflatten(1, (2, -1)).log_softmax(dim=1).unbind(dim=1)
    return Decisions(outside, inside)


def inside_probs(scores: Tensor) -> Tensor:
    """o_k = P(in class k).   (n, 2 c)  ->  (n, c); rows do not sum to 1"""
    return decisions(scores).inside.exp()


def one_vs_all_loss(scores: Tensor, classes: Tensor) -> Tensor:
    """The own class is taught, and of all others the one that is most wrongly sure.

    -log o_y + max_{k != y} -log(1 - o_k)
    scores (n, 2 c), classes (n,)  ->  (n,)
    """
    outside, inside = decisions(scores)
    own = F.one_hot(classes, inside.shape[1]).bool()
    hardest = (-outside).masked_fill(own, 0).amax(dim=1)  # 0 where there is one class alone
    return hardest - inside.gather(1, classes[:, None]).squeeze(1)


def decision_entropy(scores: Tensor) -> Tensor:
    """Mean over the classes of the entropy of their two outcomes.   (n, 2 c)  ->  (n,)"""
    outside, inside = decisions(scores)
    return -(outside.exp() * outside + inside.exp() * inside).mean(dim=1)


def decision_distance(scores: Tensor, other: Tensor) -> Tensor:
    """Squared difference between two views, summed over classes and outcomes.   both (n, 2 c)  ->  (n,)"""
    # The two outcomes of a class differ by the same amount.
    return 2 * (inside_probs(scores) - inside_probs(other)).square().sum(dim=1)
