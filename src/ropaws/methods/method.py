"""The base of every method: what the rest of the package asks of one, with defaults for nearly all of it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ropaws.classify.propagation import Kernel
from ropaws.classify.soft_nn import (
    TYPICAL_PRIOR,
    LabeledEmbeddings,
    class_probabilities,
    default_threshold,
    fitted_prior_temperature,
    in_domain_scores,
    max_similarity,
)
from ropaws.core.records import Batch, Losses, Outputs, Share
from ropaws.embedding.backbones import Encoder
from ropaws.pool.augment import AugmentConfig, View
from ropaws.training.loaders import PoolPass


class Method(ABC):
    """A way to learn from labeled and unlabeled images.

    A method is a frozen dataclass below this class. Its fields are its settings; each is a command-line
    option (`--method.FIELD`). State lives in the modules and buffers that `build` returns, so checkpoints,
    exact resume and several processes work without a line of the method's own.
    """

    optim: ClassVar[Mapping[str, Any]] = {}
    """Fields of OptimConfig that suit this method. With a peak, the rate starts there and falls to 0."""
    init: ClassVar[tuple[str, ...]] = ("backbone",)
    """Parts of the encoder that start from the weights of `--init`; a frozen backbone always does."""
    needs_init: ClassVar[str] = ""
    """What `--init` must name, for methods that cannot start without a weight file; part of the error."""
    uses_labels: ClassVar[bool] = True
    """False for self-supervised methods, which do not look at the labeled batch."""

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        """The random views of each unlabeled image, by role.

        Args:
            augment: The settings of the run.

        Returns:
            A view for each role, such as {"weak": ..., "strong": ...}. Empty: no unlabeled images are used.
        """
        return {}

    def labeled_view(self, augment: AugmentConfig) -> View:
        """The random view of labeled images."""
        return augment

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        """The model to train: the encoder, or a module that holds it as `encoder` beside heads or averages.

        Args:
            encoder: Backbone and heads as the settings say, with random weights.
            classes: Number of known classes.
            pool: Number of training images, labeled and unlabeled; `batch.pool_index` counts them.
        """
        return encoder

    def start(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Called once before training, with the weights of the run or file that `--init` names.

        The backbone has its weights by then. For methods that take over more of an earlier run, such as a
        whole teacher; names are those of the other run's model.
        """

    @abstractmethod
    def step(self, model: nn.Module, batch: Batch) -> Losses:
        """The loss of one step, with gradient. The caller takes the optimizer step."""

    def after_step(self, model: nn.Module, batch: Batch) -> None:  # noqa: B027 - most methods need nothing
        """Called after the optimizer step: update averages, queues, banks."""

    def before_epoch(self, model: nn.Module, pool: PoolPass) -> None:  # noqa: B027
        """Called before the first step of each pass through the pool, for methods that score all of it."""

    def after_training(self, model: nn.Module, pool: PoolPass) -> None:  # noqa: B027
        """Called once after the last step, with the model in evaluation mode: fit what needs it as it is."""

    def embed(self, model: nn.Module, images: Tensor) -> Tensor:
        """Unit embeddings of normalized images.   (n, channels, size, size)  ->  (n, d)"""
        embedded: Tensor = encoder_of(model)([images])[0].h
        return embedded

    def predict(self, model: nn.Module, images: Tensor, support: LabeledEmbeddings) -> Outputs:
        """What the trained model says of images; by default the soft nearest-neighbor classifier.

        Args:
            model: What `build` returned, trained, in evaluation mode.
            images: Normalized center views (n, channels, size, size).
            support: The labeled images, embedded by `embed`.
        """
        return self.classify(self.embed(model, images), support)

    def classify(self, embedding: Tensor, support: LabeledEmbeddings) -> Outputs:
        """The soft nearest-neighbor classifier on embeddings.   (n, d)  ->  Outputs of n rows"""
        kernel = self.kernel(support)
        return Outputs(
            embedding,
            class_probabilities(embedding, support, temperature=kernel.temperature),
            in_domain_scores(embedding, support.embeddings, self.in_domain_temperature(support)),
            max_similarity(embedding, support.embeddings),
        )

    def kernel(self, support: LabeledEmbeddings) -> Kernel:
        """How labels propagate through a pool of embeddings of this method."""
        return Kernel(prior_temperature=self.in_domain_temperature(support))

    def in_domain_temperature(self, support: LabeledEmbeddings) -> float:
        """Temperature of the in-domain probability: the one that fits the labeled images."""
        return fitted_prior_temperature(support.nearest_same_class, TYPICAL_PRIOR)

    def in_class_share(self, model: nn.Module) -> Share | None:
        """Share of the pool that belongs to the known classes, for methods that estimate it."""
        return None

    def threshold(self, support: LabeledEmbeddings) -> float:
        """In-domain probability below which an image is out-of-class, judged by the labeled images."""
        return default_threshold(support.nearest_same_class, self.in_domain_temperature(support))


def encoder_of(model: nn.Module) -> Encoder:
    """The encoder of what a method has built."""
    encoder = model if isinstance(model, Encoder) else getattr(model, "encoder", None)
    if not isinstance(encoder, Encoder):
        raise ValueError(
            f"{type(model).__name__} has no `encoder`; a method with such a model overrides embed and predict"
        )
    return encoder


def check_positive(method: object, *names: str) -> None:
    for name in names:
        if not 0 < (value := getattr(method, name)) < math.inf:
            raise ValueError(f"method.{name} must be positive, got {value}")


def check_weight(method: object, *names: str) -> None:
    for name in names:
        if not 0 <= (value := getattr(method, name)) < math.inf:
            raise ValueError(f"method.{name} must be at least 0, got {value}")


def check_share(method: object, *names: str) -> None:
    for name in names:
        if not 0 <= (value := getattr(method, name)) < 1:
            raise ValueError(f"method.{name} must be at least 0 and below 1, got {value}")
