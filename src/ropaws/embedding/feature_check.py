"""A cheap look at features before anything is built on them: do they know the images at all?"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws.core.features import Features

LOOKED_AT = 512  # rows, spread evenly
SAME, ALIKE = 1e-6, 0.98  # mean distance from 1 of the cosine; mean cosine
FEWEST = 30  # labels from which on a chance hit tells something
CHANCE = 0.99  # share of random labelings that do no better
CAUSES = (
    "likely the weights are not those of this network, or expect other views; compare --backbone, --init and"
    " --augment.size with `ropaws backbones`"
)


def useless_features(features: Features, labels: Sequence[int]) -> str | None:
    """A line that names the likely cause, where features know nothing of the images; None where all is well.

    labels: class of each row, below 0 for none
    """
    rows = F.normalize(features[_spread(len(features))], dim=1)
    if len(rows) < 2:
        return None
    cosine = float((rows.sum(dim=0).square().sum() - len(rows)) / (len(rows) * (len(rows) - 1)))
    if 1 - cosine < SAME:
        return f"the features of all images are the same: {CAUSES}"
    if cosine > ALIKE:
        return f"the features hardly vary (mean cosine {cosine:.3f}): all images look alike, or {CAUSES}"
    numbers = torch.tensor(labels)
    known = (numbers >= 0).nonzero().squeeze(1)[:4096]
    return _at_chance(features[known], numbers[known]) if len(known) >= FEWEST else None


def _at_chance(rows: Tensor, labels: Tensor) -> str | None:
    """Held-out labels by the nearest class mean, each row left out of its own.   (n, d), (n,)"""
    classes, numbers, counts = labels.unique(return_inverse=True, return_counts=True)
    known = counts[numbers] > 1
    if len(classes) < 2 or int(known.sum()) < FEWEST:
        return None
    rows = F.normalize(F.normalize(rows, dim=1) - F.normalize(rows, dim=1).mean(dim=0), dim=1)
    sums = torch.zeros(len(classes), rows.shape[1]).index_add_(0, numbers, rows)
    scores = rows @ (sums / counts[:, None]).T
    own = ((sums[numbers] - rows) / (counts[numbers] - 1).clamp_min(1)[:, None] * rows).sum(dim=1)
    scores[torch.arange(len(rows)), numbers] = own
    from scipy.special import bdtr  # slow to load

    right = int((scores.argmax(dim=1) == numbers)[known].sum())
    seen, chance = int(known.sum()), float(counts.max() / counts.sum())
    if right and bdtr(right - 1, seen, chance) >= CHANCE:  # so many draw fewer at random
        return None
    return (
        f"the features know no more of the {seen} labels than chance ({right} right, held out): the labels do"
        f" not follow from the images, or {CAUSES}"
    )


def _spread(count: int) -> Tensor:
    return torch.arange(0, count, max(1, -(-count // LOOKED_AT)))
