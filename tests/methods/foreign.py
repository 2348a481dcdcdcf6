"""A method that is not part of ropaws, with all that a method may bring: tests/methods/test_foreign.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ropaws.core.distributed import gather_constants, place
from ropaws.core.records import Losses, Outputs
from ropaws.methods import Method
from ropaws.methods.classifier import EMA
from ropaws.pool.rand_augment import StrongView, WeakView


@dataclass(frozen=True, kw_only=True)
class MemoryMethod(Method):
    """Pseudo-labels as in FixMatch, averaged with what the mean of the weights last said of the image."""

    sure: float = 0.6
    """Confidence from which a pseudo-label is learned."""
    decay: float = 0.8
    """Of the moving average of the weights."""

    optim: ClassVar[Mapping[str, Any]] = {
        "name": "sgd", "schedule": "fixmatch", "peak": 0.03, "start": 0.03, "warmup": 0, "weight_decay": 5e-4,
    }  # fmt: skip

    def views(self, augment):
        return {"weak": WeakView(size=augment.size), "strong": StrongView(size=augment.size)}

    def labeled_view(self, augment):
        return WeakView(size=augment.size)

    def build(self, encoder, *, classes, pool):
        return MemoryModel(encoder, classes, pool, self.decay)

    def before_epoch(self, model, pool):
        model.memory.copy_(pool.map(lambda images: model.average(images)[1].softmax(dim=1)))

    def step(self, model, batch):
        weak, strong = batch.views["weak"], batch.views["strong"]
        counts = [len(batch.labeled.images), len(weak), len(strong)]
        _, logits = model.network(torch.cat([batch.labeled.images, weak, strong]))
        labeled, weak, strong = logits.split(counts)
        with torch.no_grad():
            beliefs = (weak.softmax(dim=1) + model.memory[batch.pool_index]) / 2
            confidence, targets = beliefs.max(dim=1)
            mask = (confidence >= self.sure).to(strong.dtype)
        # Processes may have different numbers of labeled rows; each row counts alike.
        rows = len(gather_constants(batch.labeled.classes)) / place().size
        known = F.cross_entropy(labeled, batch.labeled.classes, reduction="sum") / rows
        pseudo = (F.cross_entropy(strong, targets, reduction="none") * mask).mean()
        return Losses(known + pseudo, {"known": known.detach(), "pseudo": pseudo.detach()})

    def after_step(self, model, batch):
        model.average.update(model.network)
        _, logits = model.average(batch.views["weak"])
        model.memory[gather_constants(batch.pool_index)] = gather_constants(logits.softmax(dim=1))

    def embed(self, model, images):
        features, _ = model.average(images)
        return F.normalize(features, dim=1)

    def predict(self, model, images, support):
        features, logits = model.average(images)
        probs = logits.softmax(dim=1)
        confidence = probs.amax(dim=1)
        return Outputs(F.normalize(features, dim=1), probs, confidence, logits.amax(dim=1))

    def threshold(self, support):
        return 0.5


class Network(nn.Module):
    """Features and logits."""

    def __init__(self, encoder, head):
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, images):
        features = self.encoder.features(images)
        return features, self.head(features)


class MemoryModel(nn.Module):
    """The trained network, its average, and what the average last said of each image of the pool."""

    def __init__(self, encoder, classes, pool, decay):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.feature_dims, classes)
        self.average = EMA(self.network, decay=decay)
        self.register_buffer("memory", torch.full((pool, classes), 1 / classes))

    @property
    def network(self):
        return Network(self.encoder, self.head)
