"""Predictions that the features of labels and pool have a say in, beside the distances in the embedding.

The embedding is fitted to the labels most; the backbone's features below it less. Compared there once, after
the last step, labels and pool tell who is in-class, and logistic regression has half a say on the class.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from ropaws.batch import Outputs, Share
from ropaws.data.loaders import PoolPass
from ropaws.methods.confidence import mixed_probs
from ropaws.methods.method import Method, encoder_of
from ropaws.methods.pool_prior import PoolPrior
from ropaws.methods.soft_nn import LabeledEmbeddings, class_probabilities
from ropaws.models import Encoder

POOL_PRIOR = "pool_prior"


@dataclass(frozen=True, kw_only=True)
class JudgedMethod(Method):
    """A method with a soft nearest-neighbor classifier, whose predictions a PoolPrior may judge."""

    judge: Literal["embedding", "pool"] = "embedding"
    """Predictions after training: by distances in the embedding alone; or who is in-class by the densities of
    labels and pool in the final features, and logistic regression with half a say (docs/prior.md)."""

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        if self.judge == "pool":
            encoder.add_module(POOL_PRIOR, PoolPrior(encoder.feature_dims, classes, pool))
        return encoder

    def after_training(self, model: nn.Module, pool: PoolPass) -> None:
        """Fit the judge to the features as they are now, and how sure the classifier may be."""
        encoder = encoder_of(model)
        if self.judge == "pool":
            pool_prior(model).fit(encoder, pool)
        if (judge := self._judge(encoder)) is None:
            return
        labeled = pool.map(lambda views: self.embed(model, views), pool.data.labeled_indices)
        support = LabeledEmbeddings(labeled, pool.data.labels.to(labeled.device), judge.classes)
        features = pool.map(encoder.features, rows := judge.unlabeled_sample(pool))
        judge.calibrate(self._near(self.embed(model, features), support), features, rows, share=self._share)

    def predict(self, model: nn.Module, images: Tensor, support: LabeledEmbeddings) -> Outputs:
        """With a judge, the features say who is in-class, and have a say on the class."""
        encoder = encoder_of(model)
        if (judge := self._judge(encoder)) is None:
            return super().predict(model, images, support)
        features = encoder.features(images)
        embedding = self.embed(model, features)
        judged = judge(features)
        near = self._near(embedding, support)
        probs = mixed_probs(near, judged.log_probs, self._share, judge.confidence_temperature)
        return Outputs(embedding, probs, judged.in_domain, judged.score)

    def in_class_share(self, model: nn.Module) -> Share | None:
        """Estimated share of the pool that belongs to the classes; None without a judge."""
        if self.judge != "pool" or not (judge := pool_prior(model)).fitted:
            return None
        return judge.estimated_share()

    def threshold(self, support: LabeledEmbeddings) -> float:
        """Where the in-domain score is a probability, more likely out-of-class than in-class."""
        return 0.5 if self.judge == "pool" else super().threshold(support)

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
