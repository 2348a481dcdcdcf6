"""What methods with a linear classifier share: the network, its moving average, and predictions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ropaws.classify.soft_nn import LabeledEmbeddings
from ropaws.core.records import Outputs
from ropaws.embedding.backbones import Encoder
from ropaws.methods.method import Method, check_share
from ropaws.methods.pseudo_targets import row_mean
from ropaws.pool.augment import AugmentConfig, View
from ropaws.pool.rand_augment import StrongView, WeakView


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
        """Features of several batches of one size, seen as one: batch norm has the statistics of all."""
        return list(self(torch.cat(batches)).split([len(batch) for batch in batches]))

    def logits(self, features: Tensor) -> Tensor:
        """Logits of the closed-set classifier.   (n, d)  ->  (n, c)"""
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
