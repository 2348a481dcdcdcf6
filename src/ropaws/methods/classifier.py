"""What methods with a linear classifier share: the network, its moving average, and predictions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.batch import Outputs
from ropaws.data.augment import AugmentConfig, View
from ropaws.data.rand_augment import StrongView, WeakView
from ropaws.methods.method import Method, check_share
from ropaws.methods.row_losses import row_mean
from ropaws.methods.soft_nn import LabeledEmbeddings
from ropaws.models import Encoder
from ropaws.models.ema import EMA

# Section 4 of FixMatch, and what nearly all of its relatives have taken over.
FIXMATCH_OPTIM: Mapping[str, Any] = {
    "name": "sgd", "schedule": "fixmatch", "peak": 0.03, "weight_decay": 5e-4,
}  # fmt: skip


class Network(nn.Module):
    """An encoder and heads of a method's own on its features; `classes` is the closed-set classifier."""

    def __init__(self, encoder: Encoder, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict(heads)

    def forward(self, images: Tensor) -> Tensor:
        """Features that the heads take.   ->  (n, d)"""
        return self.encoder.trained_features(images)

    def features(self, *batches: Tensor) -> list[Tensor]:
        """Of several batches of one size, seen as one: batch norm has the statistics of all."""
        return list(self(torch.cat(batches)).split([len(batch) for batch in batches]))

    def logits(self, features: Tensor) -> Tensor:
        """Of the closed-set classifier.   (n, d)  ->  (n, c)"""
        scores: Tensor = self.heads["classes"](features)
        return scores


class Averaged(nn.Module):
    """A network that is trained, and the moving average of its weights, which predicts."""

    def __init__(self, network: Network, decay: float) -> None:
        super().__init__()
        self.network = network
        self.average = EMA(network, decay=decay)

    @property
    def encoder(self) -> Encoder:
        return self.network.encoder

    @property
    def predictor(self) -> Network:
        """The network with the averaged weights."""
        average = self.average.module
        assert isinstance(average, Network)
        return average


@dataclass(frozen=True, kw_only=True)
class ClassifierMethod(Method):
    """A linear classifier on the backbone's features, tested with the moving average of the weights.

    Its confidence (highest class probability) ranks images from out-of-class to in-class; below one half an
    image is called out-of-class. Methods with a detector of their own override predict.
    """

    ema: float = 0.999
    """Share of the moving average of the weights that is kept at each step; tests use the average."""

    optim: ClassVar[Mapping[str, Any]] = FIXMATCH_OPTIM

    def __post_init__(self) -> None:
        check_share(self, "ema")

    def labeled_view(self, augment: AugmentConfig) -> View:
        return WeakView(size=augment.size)

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        return Averaged(Network(encoder, self.heads(encoder.trained_dims, classes)), self.ema)

    def heads(self, dims: int, classes: int) -> dict[str, nn.Module]:
        """The heads by name, on features of so many dimensions."""
        return {"classes": linear(dims, classes)}

    def after_step(self, model: nn.Module, batch: Any) -> None:
        assert isinstance(model, Averaged)
        model.average.update(model.network)

    def embed(self, model: nn.Module, images: Tensor) -> Tensor:
        """The averaged network's features, in unit length."""
        assert isinstance(model, Averaged)
        return F.normalize(model.predictor(images), dim=1)

    def predict(self, model: nn.Module, images: Tensor, support: LabeledEmbeddings) -> Outputs:
        assert isinstance(model, Averaged)
        features = model.predictor(images)
        probs = model.predictor.logits(features).softmax(dim=1)
        confidence = probs.amax(dim=1)
        return Outputs(F.normalize(features, dim=1), probs, confidence, confidence)

    def threshold(self, support: LabeledEmbeddings) -> float:
        return 0.5


def weak_and_strong(augment: AugmentConfig) -> dict[str, View]:
    """The views of FixMatch and its relatives, by role."""
    return {"weak": WeakView(size=augment.size), "strong": StrongView(size=augment.size)}


def linear(dims: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """A linear layer that starts as in the FixMatch family: Xavier's normal weights, no bias."""
    layer = nn.Linear(dims, outputs, bias=bias)
    nn.init.xavier_normal_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def labeled_cross_entropy(logits: Tensor, classes: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of labeled rows.   logits (s, c), classes (s,)  ->  ()"""
    return row_mean(F.cross_entropy(logits, classes, reduction="none", label_smoothing=smoothing))
