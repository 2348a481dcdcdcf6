"""SimCLR (Chen et al., ICML 2020): two views of an image attract each other and repel all other images.

L = mean over all views i of  -log( exp(z_i z_j / T) / sum_{k != i} exp(z_i z_k / T) ),  j the other view of i

z are unit rows after the projection head, k runs over the views of the whole batch in all processes. The
paper's CIFAR settings: T 0.5, batch 512, LARS at 1.0 for that batch with weight decay 1e-4, 1000 epochs,
views by crop, flip, jitter of strength 0.5 and grayscale, no blur. On ImageNet T is 0.1, with blur.

Deviations: the head has three layers as in SimCLR v2, of the width of `--model.projection-hidden`, with
batch norm between them only; no warm-up, which the paper has for 10 epochs (`--optim.warmup`); the rate does
not grow with the batch. Predictions are those of soft nearest neighbors on z. There is no detector:
similarity to the labeled images scores in-class images. On data that are features the head is trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ropaws.batch import Batch, Losses
from ropaws.distributed import all_gather
from ropaws.methods.contrast import nt_xent
from ropaws.methods.method import check_positive
from ropaws.methods.two_views import TwoViewMethod


@dataclass(frozen=True, kw_only=True)
class SimCLR(TwoViewMethod):
    """Pretraining without labels: views of an image attract, all others repel."""

    temperature: float = 0.5
    """Of the similarities; lower looks at the nearest images only (T)."""

    optim: ClassVar[Mapping[str, Any]] = {"name": "lars", "peak": 1.0, "weight_decay": 1e-4}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "temperature")

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        first, second = model([batch.views["first"], batch.views["second"]])
        loss = nt_xent(all_gather(first.h), all_gather(second.h), temperature=self.temperature)
        return Losses(loss, {"contrast": loss.detach()})
