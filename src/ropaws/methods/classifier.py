"""What methods with a linear classifier share: the network, its moving average, targets, and predictions."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from ropaws.classify.soft_nn import LabeledEmbeddings
from ropaws.core.distributed import all_mean, place, sum_constants
from ropaws.core.records import Outputs
from ropaws.embedding.backbones import Encoder
from ropaws.methods.method import Method, check_share
from ropaws.pool.augment import AugmentConfig, View
from ropaws.pool.rand_augment import StrongView, WeakView


def kl_divergence(target_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(softmax(target_logits) || softmax(logits)) of each row; nothing flows back through the targets.

    both (n, c)  ->  (n,)
    """
    targets = F.log_softmax(target_logits.detach(), dim=1)
    return (targets.exp() * (targets - F.log_softmax(logits, dim=1))).sum(dim=1)


def kept_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the kept rows of all processes, 0 if there is none.   both (n,), mask 0 or 1  ->  ()

    The mean over processes of what this returns weighs every kept row alike.
    """
    rows = sum_constants(mask.sum()).clamp_min(1) / place().size
    return (values * mask).sum() / rows


def row_mean(values: Tensor) -> Tensor:
    """Mean over the rows of all processes, which may have different numbers of them; 0 without any.   (n,)"""
    return kept_mean(values, torch.ones_like(values))


def linear_ramp(step: int, length: float) -> float:
    """step / length up to 1; 1 at once without a length."""
    return 1.0 if length <= 0 else min(1.0, step / length)


def gaussian_ramp(step: int, length: float) -> float:
    """exp(-5 (1 - min(1, step / length))^2), from Laine and Aila (2017)."""
    return math.exp(-5 * (1 - linear_ramp(step, length)) ** 2)


class HardTargets(NamedTuple):
    """Pseudo-labels; nothing flows back through them."""

    classes: Tensor  # (u,)
    mask: Tensor  # (u,) 1.0 where the network is sure enough, else 0.0


def hard_targets(probs: Tensor, threshold: float) -> HardTargets:
    """The most likely class, and whether its probability reaches the threshold.   probs (u, c)"""
    confidence, classes = probs.detach().max(dim=1)
    return HardTargets(classes, (confidence >= threshold).to(probs.dtype))


def soft_cross_entropy(targets: Tensor, logits: Tensor) -> Tensor:
    """H(target, softmax(logits)) of each row.   both (u, c)  ->  (u,)"""
    return -(targets * F.log_softmax(logits, dim=1)).sum(dim=1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all rows; those that are masked out count as zero, as in FixMatch.   both (u,)  ->  ()"""
    return (values * mask).mean() if len(values) else values.sum()


def sharpened(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature), without gradient.   (u, c)"""
    return torch.softmax(logits.detach() / temperature, dim=1)


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


@contextmanager
def kept_norm_statistics(module: nn.Module) -> Iterator[None]:
    """Within, batch norm in training mode uses the statistics of its batch and leaves the running ones."""
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    momenta = [layer.momentum for layer in norms]
    try:
        for layer in norms:
            layer.momentum = 0.0
        yield
    finally:
        for layer, momentum in zip(norms, momenta, strict=True):
            layer.momentum = momentum


Tensors = Mapping[str, Tensor]


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Trained weights by name, without those of a frozen backbone."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def slopes_of(loss: Tensor, weights: Tensors, *, create_graph: bool = False) -> dict[str, Tensor]:
    """Gradients of a loss in this process, by name; a weight that the loss does not use is left out."""
    found = torch.autograd.grad(loss, list(weights.values()), create_graph=create_graph, allow_unused=True)
    return {name: slope for name, slope in zip(weights, found, strict=True) if slope is not None}


def stepped(weights: Tensors, slopes: Tensors, rate: float) -> dict[str, Tensor]:
    """weight - rate * slope, with the mean slope of all processes; weights without a slope are left out."""
    flat = all_mean(torch.cat([slope.flatten() for slope in slopes.values()]))
    parts = flat.split([slope.numel() for slope in slopes.values()])
    return {
        name: weights[name] - rate * part.view_as(weights[name])
        for name, part in zip(slopes, parts, strict=True)
    }


def logits_with(network: Network, weights: Tensors, images: Tensor) -> Tensor:
    """Logits of images where some weights are others; batch norm remembers nothing of it.   ->  (n, c)"""
    named = {f"network.{name}": weight for name, weight in weights.items()}
    with kept_norm_statistics(network):
        logits: Tensor = functional_call(_Classifier(network), named, (images,))
    return logits


def handed_over(weights: Tensors, slopes: Tensors) -> Tensor:
    """A term of value 0 whose gradients are the given ones, for the optimizer of the run.   ->  ()"""
    terms = torch.stack([(weights[name] * slope.detach()).sum() for name, slope in slopes.items()])
    return (terms - terms.detach()).sum()


class _Classifier(nn.Module):
    """Logits as the forward pass, which is all that functional_call can call."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network.logits(self.network(images))
