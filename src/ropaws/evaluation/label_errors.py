"""Suspected label errors: labeled images whose neighbors disagree with their label."""

from typing import NamedTuple

import torch

from ropaws.methods.soft_nn import LabeledEmbeddings, leave_one_out


class SuspectedError(NamedTuple):
    """One label, and what the other labeled images say."""

    position: int  # among the labeled images
    label: int  # as given
    suspected: int  # the class that the others vote for
    own: float  # probability of the label given
    other: float  # probability of the class suspected


def suspected_label_errors(support: LabeledEmbeddings, *, temperature: float) -> list[SuspectedError]:
    """The labels that a majority of neighbors contradicts, the most suspect first.

    Leave-one-out: a label has no say on itself. A class with a single label is left out: no other image
    could confirm it.
    """
    if len(support.labels) < 2:
        return []
    labels = support.labels
    probs = leave_one_out(support, temperature=temperature)
    own = probs.gather(1, labels[:, None]).squeeze(1)
    other, suspected = probs.max(dim=1)
    counts = torch.bincount(labels, minlength=support.classes)
    found = ((suspected != labels) & (counts[labels] > 1)).nonzero().squeeze(1)
    ranked = found[(other - own)[found].argsort(descending=True, stable=True)]
    return [
        SuspectedError(i, int(labels[i]), int(suspected[i]), float(own[i]), float(other[i]))
        for i in ranked.tolist()
    ]
