"""Contrast between images: the views of one attract each other and repel those of all others.

A loss of its own (SimCLR), or a term beside another one. It asks nothing of the labels, so a label that is
unlike its class cannot mislead it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws.batch import Losses
from ropaws.distributed import all_gather


def nt_xent(first: Tensor, second: Tensor, *, temperature: float) -> Tensor:
    """Normalized cross-entropy of finding the other view of an image.   both (n, d) unit rows  ->  ()"""
    views = torch.cat([first, second])
    itself = torch.eye(len(views), dtype=torch.bool, device=views.device)
    similarities = (views @ views.T / temperature).masked_fill(itself, -torch.inf)
    partner = torch.arange(len(views), device=views.device).roll(len(first))
    return F.cross_entropy(similarities, partner)


def with_contrast(
    losses: Losses, first: Tensor, second: Tensor, *, weight: float, temperature: float
) -> Losses:
    """The same losses with the contrast of the two views beside them; as they were with weight 0.

    first, second (u, d): unit rows of this process; those of all processes repel
    """
    if weight == 0:
        return losses
    contrast = nt_xent(all_gather(first), all_gather(second), temperature=temperature)
    parts = {**losses.parts, "contrast": contrast.detach()}
    return losses._replace(total=losses.total + weight * contrast, parts=parts)
