"""MoCo-v2 (Chen et al., 2020; He et al., CVPR 2020): contrast with the keys of past batches.

L = mean_u  -log( exp(q k+ / T) / (exp(q k+ / T) + sum_queue exp(q k- / T)) )

q is the first view of an image through the encoder, k+ the second one through a key encoder, whose weights
are a slow average of the encoder's (momentum m); the queue holds the last keys, random ones at first.
Defaults are those of the authors' CIFAR demonstration: m 0.99, a queue of 4096, SGD at 0.06 for a batch of
512 with weight decay 5e-4; T 0.2 is the paper's (0.1 there). On ImageNet: m 0.999, 65,536 keys, SGD at 0.03
for a batch of 256, weight decay 1e-4. With m 0.999 a run of less than some thousand steps ends near its
random keys.

Deviations: past keys of the query's own image are no negatives, as a small pool comes back while they are in
the queue; the queue may have any length. Batch norm of both encoders has the statistics of the whole batch,
where the paper shuffles parts of it. The head has three layers with batch norm, as SimCLR's here; blur is
left out as on CIFAR; momentum of SGD is Nesterov's. Predictions are those of soft nearest neighbors on q. On
data that are features the head is trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.core.distributed import gather_constants
from ropaws.core.records import Batch, Losses
from ropaws.embedding.backbones import Encoder
from ropaws.methods.method import check_positive, check_share
from ropaws.methods.simclr import TwoViewMethod, follow, slow_copy

NO_IMAGE = -1  # that a random key of the first queue shows


def info_nce(
    queries: Tensor, keys: Tensor, queue: Tensor, *, temperature: float, same_image: Tensor | None = None
) -> Tensor:
    """Cross-entropy of finding the key of a query among past keys; unit rows.

    queries (u, d), keys (u, d), queue (k, d), same_image (u, k) bool: no negatives of this query  ->  ()
    """
    positive = (queries * keys).sum(dim=1, keepdim=True)
    negative = queries @ queue.T
    if same_image is not None:
        negative = negative.masked_fill(same_image, -torch.inf)
    scores = torch.cat([positive, negative], dim=1) / temperature
    return F.cross_entropy(scores, scores.new_zeros(len(scores), dtype=torch.long))


@dataclass(frozen=True, kw_only=True)
class MoCoV2(TwoViewMethod):
    """Pretraining without labels: a view finds the other one among the keys of past batches."""

    temperature: float = 0.2
    """Of the similarities; lower looks at the nearest images only (T)."""
    momentum: float = 0.99
    """Share of the key encoder's weights that is kept at each step (m)."""
    queue: int = 4096
    """Past keys that serve as negatives."""

    optim: ClassVar[Mapping[str, Any]] = {"name": "sgd", "peak": 0.06, "weight_decay": 5e-4}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "temperature", "queue")
        check_share(self, "momentum")

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        return QueryAndKeys(encoder, self.queue)

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, QueryAndKeys)
        (queries,) = model.encoder([batch.views["first"]])
        with torch.no_grad():
            (keys,) = model.key_encoder([batch.views["second"]])
        loss = info_nce(
            queries.h,
            keys.h,
            model.queue,
            temperature=self.temperature,
            same_image=batch.pool_index[:, None] == model.shown,
        )
        model.enqueue(gather_constants(keys.h), gather_constants(batch.pool_index))
        return Losses(loss, {"contrast": loss.detach()})

    def after_step(self, model: nn.Module, batch: Batch) -> None:
        assert isinstance(model, QueryAndKeys)
        follow(model.key_encoder, model.encoder, self.momentum)


class QueryAndKeys(nn.Module):
    """The trained encoder, the one of the keys, and the last keys with the images that they show."""

    queue: Tensor
    shown: Tensor

    def __init__(self, encoder: Encoder, length: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.key_encoder = slow_copy(encoder)
        keys = torch.randn(length, encoder.embedding_dims)
        self.register_buffer("queue", F.normalize(keys, dim=1))
        self.register_buffer("shown", torch.full((length,), NO_IMAGE))

    def enqueue(self, keys: Tensor, images: Tensor) -> None:
        """Put keys first and drop the oldest. New tensors: the loss still needs the old queue."""
        length = len(self.queue)
        self.queue = torch.cat([keys, self.queue])[:length]
        self.shown = torch.cat([images, self.shown])[:length]
