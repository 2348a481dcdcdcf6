"""An exponential moving average of a network's weights."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class EMA(AveragedModel):
    """A copy of a network whose weights follow the trained ones slowly; called like the network itself.

    Batch-norm statistics are copied, not averaged, as the FixMatch family does. The copy is not trained and
    stays in evaluation mode. All its state is in parameters and buffers, so it is saved with the model.
    """

    def __init__(self, network: nn.Module, *, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay}")
        super().__init__(network, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "EMA":
        """Stays in evaluation mode."""
        super().train(False)
        return self

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Move towards the network's weights. The first call copies them."""
        self.update_parameters(network)  # copies the buffers
