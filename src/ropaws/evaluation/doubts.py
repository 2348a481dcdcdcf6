"""Labelled images whose neighbours disagree with their label."""

from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.evaluation.neighbors import leave_one_out


class Doubt(NamedTuple):
    """One label, and what the other labelled images say."""

    position: int  # among the labelled images
    label: int  # as given
    suspected: int  # the class that the others vote for
    own: float  # probability of the label given
    other: float  # probability of the class suspected


def doubtful_labels(support: Tensor, labels: Tensor, *, classes: int, temperature: float) -> list[Doubt]:
    """The labels that a majority of neighbours speaks against, the most doubtful first.

    support (s, d), labels (s,). Leave-one-out: a label has no say on itself. A class with a single label
    is left out, as its image has no fellow that could speak for it.
    """
    if len(support) < 2:
        return []
    probs = leave_one_out(support, labels, classes=classes, temperature=temperature)
    own = probs.gather(1, labels[:, None]).squeeze(1)
    other, suspected = probs.max(dim=1)
    counts = torch.bincount(labels, minlength=classes)
    doubted = ((suspected != labels) & (counts[labels] > 1)).nonzero().squeeze(1)
    ranked = doubted[(other - own)[doubted].argsort(descending=True, stable=True)]
    return [
        Doubt(i, int(labels[i]), int(suspected[i]), float(own[i]), float(other[i])) for i in ranked.tolist()
    ]
