"""Fine-tuning and linear probe as in the paper: a linear classifier on the first projection layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.classify.soft_nn import LabeledEmbeddings
from ropaws.core.records import Batch, Losses, Outputs
from ropaws.embedding.backbones import Encoder
from ropaws.methods.classifier import row_mean
from ropaws.methods.method import Method
from ropaws.pool.augment import AugmentConfig, View

FIRST_LAYER = 3  # modules of the projection head: Linear, BN, ReLU


@dataclass(frozen=True, kw_only=True)
class FineTune(Method):
    """Labeled images only, random crops and flips, cross-entropy. Starts from another run by `--init`."""

    linear: bool = False
    """Train the linear layer alone and leave the network as it is."""

    optim: ClassVar[Mapping[str, Any]] = {
        "name": "sgd", "peak": 0.05, "start": 0.05, "end": 0.0, "warmup": 0, "weight_decay": 0.0,
    }  # fmt: skip
    init: ClassVar[tuple[str, ...]] = ("backbone", "projection")

    def labeled_view(self, augment: AugmentConfig) -> View:
        """Random crop and flip of the large views, and nothing else."""
        return AugmentConfig(size=augment.size, scale=augment.scale, jitter=0.0, solarize=0.0, equalize=0.0)

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        return Classifier(encoder, classes, frozen=self.linear)

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        _, logits = model(batch.labeled.images)
        loss = row_mean(F.cross_entropy(logits, batch.labeled.classes, reduction="none"))
        return Losses(loss, {"cross_entropy": loss.detach()})

    def embed(self, model: nn.Module, images: Tensor) -> Tensor:
        features, _ = model(images)
        return F.normalize(features, dim=1)

    def predict(self, model: nn.Module, images: Tensor, support: LabeledEmbeddings) -> Outputs:
        """Classes by the linear layer; in-domain by the distance to the labeled images in its features."""
        features, logits = model(images)
        near = self.classify(F.normalize(features, dim=1), support)
        return near._replace(probs=logits.softmax(dim=1))


class Classifier(nn.Module):
    """The backbone and first projection layer of an encoder, and a linear layer that starts at zero."""

    def __init__(self, encoder: Encoder, classes: int, *, frozen: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.frozen = frozen
        first = encoder.projection.get_submodule("0")
        assert isinstance(first, nn.Linear)
        self.linear = nn.Linear(first.out_features, classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.encoder.requires_grad_(not frozen)

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        if self.frozen:
            self.encoder.eval()  # its batch statistics stay too
        return self

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the first projection layer and logits.   ->  (n, f), (n, c)"""
        features = self.encoder.features(images)
        for layer in list(self.encoder.projection)[:FIRST_LAYER]:  # all of a linear head
            features = layer(features)
        return features, self.linear(features)
