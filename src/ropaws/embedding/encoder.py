"""Backbone, projection and prediction in one module: images or features in, unit embeddings h and z out."""

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.core.features import main_directions
from ropaws.core.records import Embeddings
from ropaws.embedding.timm_backbone import before_last_blocks


def projection_head(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Linear-BN-ReLU twice, then Linear; its output is h."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


class ComponentsHead(nn.Linear):
    """A linear map that starts where the features are good: as their principal components.

    Rows are scaled to unit length and seen as their main directions around a mean; both are set once, from
    the pool. The trained part maps these directions to the embedding and starts as the identity, so that the
    nearest neighbors at the start are those of the features themselves.
    """

    mean: Tensor
    components: Tensor
    is_started: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(outputs, outputs)
        with torch.no_grad():  # not nn.init.eye_, which loads 800 modules for a second on a meta tensor
            self.weight.zero_().fill_diagonal_(1.0)
        nn.init.zeros_(self.bias)
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("components", torch.empty(outputs, inputs))
        nn.init.orthogonal_(self.components)  # random directions, where no features are known to start from
        self.register_buffer("is_started", torch.tensor(False))

    def start(self, mean: Tensor, components: Tensor) -> None:
        """mean (inputs,), components (outputs, inputs) of unit rows"""
        self.mean.copy_(mean)
        self.components.copy_(components)
        self.is_started.fill_(True)

    @property
    def started(self) -> bool:
        return bool(self.is_started)

    @property
    def takes_directions(self) -> bool:
        """Can rows that are in the main directions already be told from features?"""
        return self.components.shape[0] != self.components.shape[1]

    @staticmethod
    def directions(features: Tensor, mean: Tensor, components: Tensor) -> Tensor:
        """The part that stays as it is; see main_directions."""
        return main_directions(features, mean, components)

    def forward(self, features: Tensor) -> Tensor:
        """features (n, inputs), or (n, outputs) rows in the main directions already"""
        if not (self.takes_directions and features.shape[-1] == len(self.components)):
            features = main_directions(features, self.mean, self.components)
        return super().forward(features)


def linear_head(inputs: int, outputs: int) -> nn.Sequential:
    """One linear map; its output is h."""
    return nn.Sequential(ComponentsHead(inputs, outputs))


class KnownFeatures(nn.Module):
    """The backbone of runs on feature arrays: features (n, d) in, the same out."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, features: Tensor) -> Tensor:
        if features.ndim != 2:
            raise ValueError(
                f"this run was trained on features (n, {self.features}), got {tuple(features.shape)};"
                " give it features of the same kind instead of images"
            )
        return features


def prediction_head(width: int, hidden: int) -> nn.Sequential:
    """BN-Linear-BN-ReLU-Linear; its output is z."""
    return nn.Sequential(
        nn.BatchNorm1d(width),
        nn.Linear(width, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, width),
    )


class Encoder(nn.Module):
    """The trained network. Computes in half precision where asked, and always answers in float32.

    A batch with two dimensions holds features of the backbone, which they skip, or these in the main
    directions of a linear head: training on features that are known and prediction on images share one
    network. With frozen the backbone stays as it is; its features have the precision of those that a cache
    keeps, so that both ways give the same. With train_blocks only its last so many blocks are trained.
    """

    def __init__(
        self,
        backbone: nn.Module,
        projection: nn.Sequential,
        prediction: nn.Module,
        *,
        autocast: torch.dtype | None = None,
        frozen: bool = False,
        train_blocks: int | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection = projection
        self.prediction = prediction  # nn.Identity: z is h
        self.autocast = autocast
        self.frozen = frozen
        self.train_blocks = train_blocks
        self.requires_grad_()

    def requires_grad_(self, requires_grad: bool = True) -> "Encoder":
        super().requires_grad_(requires_grad)
        for weight in self._fixed()[0]:
            weight.requires_grad_(False)
        return self

    def train(self, mode: bool = True) -> "Encoder":
        if not self.frozen:
            super().train(mode)
            for module in self._fixed()[1]:
                module.eval()  # its batch statistics stay too
            return self
        self.training = mode
        for part in self.children():
            part.train(mode and part is not self.backbone)
        return self

    def _fixed(self) -> tuple[list[nn.Parameter], list[nn.Module]]:
        """Weights that are never trained, and the modules they are in."""
        if self.frozen:
            return list(self.backbone.parameters()), [self.backbone]
        return ([], []) if self.train_blocks is None else before_last_blocks(self.backbone, self.train_blocks)

    def forward(self, batches: Sequence[Tensor]) -> list[Embeddings]:
        """Embed batches of crops; batches of one size go through the network as one.

        Batch statistics are thus shared within a size and never mixed between sizes.
        batches: each (n_i, channels, size_i, size_i) or (n_i, feature_dims)  ->  one Embeddings (n_i, d) each
        """
        by_size: dict[torch.Size, list[int]] = {}
        for index, batch in enumerate(batches):
            by_size.setdefault(batch.shape[2:], []).append(index)
        embedded: dict[int, Embeddings] = {}
        for indices in by_size.values():
            together = self._embed(torch.cat([batches[i] for i in indices]))
            lengths = [batches[i].shape[0] for i in indices]
            parts = zip(together.h.split(lengths), together.z.split(lengths), strict=True)
            embedded.update({i: Embeddings(h, z) for i, (h, z) in zip(indices, parts, strict=True)})
        return [embedded[i] for i in range(len(batches))]

    def features(self, images: Tensor) -> Tensor:
        """What the backbone says of images, for methods with heads of their own.   ->  (n, feature_dims)

        images: (n, channels, size, size), or (n, feature_dims) features that are known already
        """
        if images.ndim == 2:
            return self._known(images)
        with self._precision(images):
            features = self.backbone(images.contiguous(memory_format=torch.channels_last))
        return _widen(features.half() if self.frozen else features)

    def trained_features(self, images: Tensor) -> Tensor:
        """What a classifier of a method's own stands on.   ->  (n, trained_dims)

        The features of the backbone; those of a frozen one go through the projection head, which is trained.
        """
        features = self.features(images)
        return _widen(self.projection(features)) if self.frozen else features

    @property
    def trained_dims(self) -> int:
        """Dimensions of trained_features."""
        return self.embedding_dims if self.frozen else self.feature_dims

    @property
    def embedding_dims(self) -> int:
        """Dimensions of the embeddings h and z."""
        return int(self.projection[-1].out_features)  # type: ignore[arg-type]

    @property
    def feature_dims(self) -> int:
        """Dimensions of the backbone's features."""
        return int(self.backbone.features)  # type: ignore[arg-type]

    def backbone_digest(self) -> str:
        """A fingerprint of the backbone's weights, but for counters that do not change what it computes."""
        state = hashlib.blake2b(digest_size=16)
        for name, value in sorted(self.backbone.state_dict().items()):
            if not name.endswith("num_batches_tracked"):
                state.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                state.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return state.hexdigest()

    def _known(self, features: Tensor) -> Tensor:
        head = next(iter(self.projection), None)
        directed = isinstance(head, ComponentsHead) and head.takes_directions
        if features.shape[1] != self.feature_dims and not (
            directed and features.shape[1] == head.out_features  # type: ignore[union-attr]
        ):
            raise ValueError(
                f"features have {features.shape[1]} dimensions, but the network takes {self.feature_dims};"
                " use features of the same backbone"
            )
        return features

    def _embed(self, images: Tensor) -> Embeddings:
        if self.frozen or images.ndim == 2:  # the head is small: in full precision
            h = self.projection(self.features(images))
            z = self.prediction(h)
        else:
            images = images.contiguous(memory_format=torch.channels_last)
            with self._precision(images):
                h = self.projection(self.backbone(images))
                z = self.prediction(h)
        unit = F.normalize(_widen(h), dim=1)
        return Embeddings(unit, unit if z is h else F.normalize(_widen(z), dim=1))

    def _precision(self, images: Tensor) -> AbstractContextManager[object]:
        kind = images.device.type
        if self.autocast is None and not torch.is_autocast_enabled(kind):
            return nullcontext()  # nothing to keep out; an exported graph would hold a block for it
        half = self.autocast or torch.bfloat16
        return torch.autocast(kind, dtype=half, enabled=self.autocast is not None)


def _widen(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
