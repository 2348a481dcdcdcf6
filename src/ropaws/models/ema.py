"""An exponential moving average of a network's weights."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


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
        super().__init__(network)
        self.decay = decay
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "EMA":
        """Stays in evaluation mode."""
        super().train(False)
        return self

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Move towards the network's weights. The first call copies them."""
        updates = int(self.n_averaged)
        pairs = list(zip(self.module.parameters(), network.parameters(), strict=True))
        if updates == 0:
            for average, weights in pairs:
                average.copy_(weights)
        else:
            trained = [pair for pair in pairs if pair[1].requires_grad]  # the others stay as they are
            averages: list[Tensor] = [average for average, _ in trained]
            current: list[Tensor] = [weights for _, weights in trained]
            torch._foreach_lerp_(averages, current, 1 - warmed_decay(self.decay, updates))
        for copied, buffer in zip(self.module.buffers(), network.buffers(), strict=True):
            copied.copy_(buffer)
        self.n_averaged += 1


def warmed_decay(decay: float, updates: int) -> float:
    """The decay after so many updates, lower in the beginning."""
    return min(decay, (1 + updates) / (10 + updates))
