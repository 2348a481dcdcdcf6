"""Distribution alignment (Berthelot et al., ICLR 2020): pseudo-labels shall be of all classes alike.

p~ = normalize(p pi / mean p), with pi uniform and the mean over the predictions of the last batches.
Out-of-class images are in this mean too, so that it may lead astray where there are many.
"""

import torch
from torch import Tensor, nn

from ropaws.distributed import gather_constants

SMALL = 1e-6  # added to both distributions


class Alignment(nn.Module):
    """The mean predictions of the last batches; called with the predictions of the next one.

    Args:
        classes: Number of classes.
        length: Number of batches that are remembered.
    """

    means: Tensor
    batches: Tensor

    def __init__(self, classes: int, length: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(length, classes))
        self.register_buffer("batches", torch.tensor(0))  # that were seen so far

    @torch.no_grad()
    def forward(self, probs: Tensor) -> Tensor:
        """Remember the mean over all processes, then align.   (u, c)  ->  (u, c), rows sum to 1"""
        length = len(self.means)
        self.means[int(self.batches) % length] = gather_constants(probs).mean(dim=0).to(self.means)
        self.batches += 1
        return aligned(probs, self.means.sum(dim=0) / min(int(self.batches), length))


def aligned(probs: Tensor, mean: Tensor) -> Tensor:
    """Predictions as if their mean were uniform.   probs (u, c), mean (c,)  ->  (u, c), rows sum to 1"""
    weighted = probs * (1 / probs.shape[1] + SMALL) / (mean + SMALL)
    return weighted / weighted.sum(dim=1, keepdim=True)
