"""MixUp (Zhang et al., ICLR 2018) of a batch that is shared out among processes, as MixMatch has it.

Rows are mixed with rows of all processes, and every process keeps its share of the result. All chance is a
function of the step; the rows are brought into an order that does not depend on the number of processes.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws.batch import Support
from ropaws.distributed import gather_constants, share


class Mixed(NamedTuple):
    """This process's share of a mixed batch; images may be features (n, d)."""

    labeled: Tensor  # (s, channels, size, size)
    labels: Tensor  # (s, c) rows sum to 1
    unlabeled: tuple[Tensor, ...]  # each (u, channels, size, size)
    guesses: tuple[Tensor, ...]  # each (u, c)


class Draw(NamedTuple):
    """Partners and shares of the rows of a batch."""

    partners: Tensor  # (n,)
    shares: Tensor  # (n,) of the row itself, from 0.5 to 1


def mixup_draw(rows: int, seed: int, alpha: float) -> Draw:
    """A permutation, and max(b, 1 - b) with b of Beta(alpha, alpha), for each row."""
    random = np.random.default_rng(seed)
    shares = random.beta(alpha, alpha, rows)
    return Draw(torch.from_numpy(random.permutation(rows)), torch.from_numpy(np.maximum(shares, 1 - shares)))


def mix(values: Tensor, draw: Draw) -> Tensor:
    """share * row + (1 - share) * its partner.   (n, ...)"""
    own = draw.shares.to(values.dtype).to(values.device).view(-1, *[1] * (values.ndim - 1))
    return own * values + (1 - own) * values[draw.partners.to(values.device)]


def steady_order(images: Tensor, identity: Tensor) -> Tensor:
    """An order of labeled rows that is the same however they were shared out.   (s, ...), (s,)  ->  (s,)

    By image, then by what a view looks like: a sum in which every pixel has its own weight.
    """
    flat = images.flatten(1)
    looks = (flat * torch.linspace(1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device)).sum(dim=1)
    order = looks.argsort(stable=True)
    return order[identity[order].argsort(stable=True)]


def mixed_batch(
    labeled: Support, views: tuple[Tensor, ...], guess: Tensor, *, seed: int, alpha: float
) -> Mixed:
    """Mix labeled rows and all views of unlabeled ones with each other.

    views: each (u, ...), guess (u, c): the label of row u in every view
    """
    images, classes, identity = map(gather_constants, (labeled.images, labeled.classes, labeled.identity))
    order = steady_order(images, identity)
    all_views, guesses = [gather_constants(view) for view in views], gather_constants(guess)
    counts = [len(images), *(len(view) for view in all_views)]
    one_hot = F.one_hot(classes[order], guess.shape[1]).to(guess)
    draw = mixup_draw(sum(counts), seed, alpha)
    pixels = mix(torch.cat([images[order], *all_views]), draw).split(counts)
    labels = mix(torch.cat([one_hot, *[guesses] * len(views)]), draw).split(counts)
    mine = [share(count) for count in counts]
    own_pixels, own_labels = ([p[m] for p, m in zip(parts, mine, strict=True)] for parts in (pixels, labels))
    return Mixed(own_pixels[0], own_labels[0], tuple(own_pixels[1:]), tuple(own_labels[1:]))
