"""Predictions by the features of labels and pool as well as by distances in the embedding.

The embedding is fitted to the labels most; the backbone's features below it less. Compared there once, after
the last step, labels and pool tell who is in-class, and class probabilities are averaged with logistic
regression.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ropaws.classify.class_prior import (
    ClassPrior,
    ClassPriorChoice,
    bounded,
    checked_class_prior,
    starting_class_prior,
)
from ropaws.classify.in_class_share import BORDER
from ropaws.classify.pool_prior import PoolPrior
from ropaws.classify.soft_nn import LabeledEmbeddings, class_probabilities
from ropaws.core.records import Outputs, Share
from ropaws.embedding.backbones import Encoder
from ropaws.embedding.encoder import ComponentsHead
from ropaws.methods.method import Method, encoder_of
from ropaws.training.loaders import PoolPass

POOL_PRIOR = "pool_prior"
CLASS_PRIOR = "class_prior"


@dataclass(frozen=True, kw_only=True)
class JudgedMethod(Method):
    """A method with a soft nearest-neighbor classifier, whose predictions a PoolPrior may judge."""

    judge: Literal["embedding", "pool"] = "embedding"
    """Predictions after training: by distances in the embedding alone; or who is in-class by the densities of
    labels and pool in the final features, averaged with logistic regression (docs/prior.md)."""

    class_prior: Literal["auto", "uniform", "labels"] | tuple[float, ...] = "uniform"
    """How frequent the classes are in the in-class part of the pool: equally, as in the paper; as the labels
    are; the frequencies themselves, in the order of the classes; or 'auto', estimated from labels and pool,
    which goes with prior 'pool' or judge 'pool' (docs/imbalance.md)."""

    def check_class_prior(self, *, pool: bool) -> None:
        """pool: whether there are densities to estimate it from."""
        checked_class_prior("method.class_prior", self.class_prior)
        if self.class_prior == "auto" and not pool:
            raise ValueError(
                "method.class_prior 'auto' is estimated from densities, which these settings do not have;"
                " use 'labels' or frequencies, or --method.judge pool"
            )

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        checked_class_prior("method.class_prior", self.class_prior, classes)
        if self.class_prior not in ("uniform", "auto"):
            encoder.register_buffer(CLASS_PRIOR, torch.full((classes,), 1 / classes))
        if self.judge == "pool":
            encoder.add_module(POOL_PRIOR, PoolPrior(encoder.feature_dims, classes, pool))
        return encoder

    def before_epoch(self, model: nn.Module, pool: PoolPass) -> None:
        """A class prior that needs no density is known from the start."""
        if self.class_prior not in ("uniform", "auto"):
            buffer = encoder_of(model).get_buffer(CLASS_PRIOR)
            counts = torch.bincount(pool.data.labels.cpu(), minlength=len(buffer))
            found = starting_class_prior(self.class_prior, counts)
            assert found is not None
            buffer.copy_(bounded(found))

    def trained_class_prior(self, model: nn.Module) -> Tensor | None:
        """What me-max draws the mean prediction to; None for equal classes.   ->  (c,)"""
        if self.class_prior in ("uniform", "auto"):
            return None
        return encoder_of(model).get_buffer(CLASS_PRIOR)

    def after_training(self, model: nn.Module, pool: PoolPass) -> None:
        """Fit the judge to the features as they are now, and how sure the classifier may be."""
        encoder = encoder_of(model)
        if self.judge == "pool":
            fit_pool_prior(model, pool, self.class_prior)
        if (judge := self._judge(encoder)) is None:
            return
        labeled = pool.map(lambda views: self.embed(model, views), pool.data.labeled_indices)
        support = LabeledEmbeddings(labeled, pool.data.labels.to(labeled.device), judge.classes)
        rows = judge.unlabeled_sample(pool.data.labeled_indices)
        features = pool.map(encoder.features, rows)
        judge.calibrate(self._near(self.embed(model, features), support), features, rows, share=self._share)

    def predict(self, model: nn.Module, images: Tensor, support: LabeledEmbeddings) -> Outputs:
        """With a judge, the features say who is in-class, and have a say on the class."""
        encoder = encoder_of(model)
        if (judge := self._judge(encoder)) is None:
            return super().predict(model, images, support)
        features = encoder.features(images)
        embedding = self.embed(model, features)
        return judge.outputs(embedding, self._near(embedding, support), features, share=self._share)

    def in_class_share(self, model: nn.Module) -> Share | None:
        """Estimated share of the pool that belongs to the classes; None without a judge."""
        if self.judge != "pool" or not (judge := pool_prior(model)).fitted:
            return None
        return judge.estimated_share()

    def estimated_class_prior(self, model: nn.Module) -> ClassPrior | None:
        """How frequent the classes are in the pool; None where they are taken for equal."""
        if (judge := self._judge(encoder_of(model))) is not None:
            return judge.estimated_class_prior()
        return None

    def threshold(self, support: LabeledEmbeddings) -> float:
        """Where the in-domain score is a probability, more likely out-of-class than in-class."""
        return BORDER if self.judge == "pool" else super().threshold(support)

    def _judge(self, encoder: Encoder) -> PoolPrior | None:
        """The judge of predictions, where there is one and it is fitted."""
        return judge if self.judge == "pool" and (judge := pool_prior(encoder)).fitted else None

    @property
    def _share(self) -> float:
        """Of logistic regression in the class probabilities."""
        return 0.5

    def _near(self, embedding: Tensor, support: LabeledEmbeddings) -> Tensor:
        return class_probabilities(embedding, support, temperature=self.kernel(support).temperature)


def pool_prior(model: nn.Module) -> PoolPrior:
    """The PoolPrior of a model with one."""
    found = encoder_of(model).get_submodule(POOL_PRIOR)
    assert isinstance(found, PoolPrior)
    return found


def fit_pool_prior(model: nn.Module, pool: PoolPass, class_prior: ClassPriorChoice) -> None:
    """Fit the PoolPrior of a model to its pool, in the directions of the linear head of a frozen backbone."""
    encoder, prior = encoder_of(model), pool_prior(model)
    directions, first = None, next(iter(encoder.projection), None)
    if encoder.frozen and isinstance(first, ComponentsHead) and first.started:
        directions = (first.mean, first.components)
    if directions is not None and directions[1].shape != prior.components.shape:
        directions = None  # a head of fewer dimensions
    prior.fit(
        pool.of(encoder.features),
        pool.data.labeled_indices,
        pool.data.labels,
        outside_rows=pool.data.outside,
        directions=directions,
        class_prior=class_prior,
    )
