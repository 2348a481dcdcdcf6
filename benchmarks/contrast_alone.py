"""For demo_ablation.py: the contrastive loss without RoPAWS beside it, on the same views."""

from dataclasses import dataclass

import torch
from torch import nn

from ropaws.core.records import Batch, Losses
from ropaws.methods import RoPAWS
from ropaws.methods.simclr import with_contrast


@dataclass(frozen=True, kw_only=True)
class ContrastAlone(RoPAWS):
    """Views of an image attract, all others repel; labels serve prediction only."""

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        first, second, *_ = model(list(batch.views.values()))
        nothing = Losses(torch.zeros((), device=first.z.device), {})
        return with_contrast(
            nothing, first.z, second.z, weight=self.contrast_weight, temperature=self.contrast_temperature
        )
