"""An exponential moving average of a network's weights."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[Tensor, ...] | list[Tensor]


class EMA(AveragedModel):
    """A copy of a network whose weights follow the trained ones slowly; called like the network itself.

    The decay of update n is min(decay, (1 + n) / (10 + n)), as in TensorFlow: a run of a few hundred steps
    would else end close to its random start. With 0.999 the difference is gone after 9,000 steps.
    Batch-norm statistics are copied, not averaged, as the FixMatch family does. The copy is not trained and
    stays in evaluation mode. All its state is in parameters and buffers, so it is saved with the model.
    """

    def __init__(self, network: nn.Module, *, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay}")

        def average(averages: Tensors, weights: Tensors, updates: Tensor | int) -> None:
            kept = warmed_decay(decay, int(updates))
            torch._foreach_lerp_(averages, weights, 1 - kept)

        super().__init__(network, multi_avg_fn=average)
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


def warmed_decay(decay: float, updates: int) -> float:
    """The decay after so many updates, lower in the beginning."""
    return min(decay, (1 + updates) / (10 + updates))
