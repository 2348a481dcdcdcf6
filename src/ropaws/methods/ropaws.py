"""RoPAWS: PAWS with targets calibrated by label propagation and an in-domain prior."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ropaws.classify.in_class_share import BORDER
from ropaws.classify.objective import RoPAWSObjective
from ropaws.classify.pool_prior import PoolPrior
from ropaws.classify.propagation import Kernel
from ropaws.classify.soft_nn import (
    GlobalSupport,
    LabeledEmbeddings,
    auto_prior_temperature,
    fitted_prior_temperature,
    gather_support,
    nearest_gap,
    update_running_gap,
)
from ropaws.core.records import Batch, Losses, Share
from ropaws.embedding.backbones import Encoder
from ropaws.methods.method import check_positive, check_share, check_weight
from ropaws.methods.pool_calibration import POOL_PRIOR, JudgedMethod, fit_pool_prior, pool_prior
from ropaws.methods.simclr import with_contrast
from ropaws.methods.supervised import with_supervision
from ropaws.pool.augment import AugmentConfig, View
from ropaws.training.loaders import PoolPass

GAP = "support_gap"  # running mean of the distance 1 - cos of a support to the nearest one of its class


@dataclass(frozen=True, kw_only=True)
class RoPAWS(JudgedMethod, RoPAWSObjective):
    """RoPAWS: distrusts images far from every label. The boolean switches are the paper's ablations."""

    prior: Literal["distance", "pool"] = "distance"
    """In-domain prior: by the distance to the nearest label as in the paper, or from the density of labels
    against that of the pool, on the features at the start (docs/prior.md)."""
    prior_temperature: float | Literal["auto"] = 0.1
    """Of the prior by distance, or 'auto': from the distances among the supports themselves."""
    typical_prior: float = 0.7
    """With 'auto': the prior that a labeled image gets from the nearest one of its class."""
    regression_share: float = 0.5
    """With prior 'pool' and a frozen backbone, or judge 'pool': share of logistic regression on the features
    in the class probabilities, a geometric mean with the soft nearest-neighbor classifier; 0 for none."""
    contrast_weight: float = 0.0
    """Weight of a contrastive loss beside: the two large views of an image attract, all others repel. Not in
    the paper; for short training from scratch, see docs/method.md."""
    contrast_temperature: float = 0.2
    """Of the contrastive loss."""
    supervised_weight: float = 0.0
    """Weight of the loss of the supervised baseline beside. Not in the paper; for training from scratch."""
    in_domain_prior: bool = True
    """Expect a sample far from every label to be out-of-class."""

    def __post_init__(self) -> None:
        check_positive(self, "temperature", "sharpen_temperature", "label_ratio", "typical_prior")
        check_positive(self, "tolerance", "contrast_temperature")
        check_weight(self, "contrast_weight", "supervised_weight")
        check_share(self, "label_smoothing", "typical_prior", "regression_share")
        if self.prior_temperature != "auto":
            check_positive(self, "prior_temperature")
        self.check()
        self.check_class_prior(pool="pool" in (self.prior, self.judge))
        if self.prior == self.judge == "pool":
            raise ValueError("method.judge 'pool' goes with prior 'distance': with prior 'pool', that judges")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        return augment.multi_crop()

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        """The encoder with one more running statistic, NaN until measured, and with the prior of the pool."""
        encoder.register_buffer(GAP, torch.tensor(math.nan))
        if self.prior == "pool":
            encoder.add_module(POOL_PRIOR, PoolPrior(encoder.feature_dims, classes, pool))
        return super().build(encoder, classes=classes, pool=pool)

    def before_epoch(self, model: nn.Module, pool: PoolPass) -> None:
        """The pool's prior is fitted once, before anything has been learned from the labels."""
        super().before_epoch(model, pool)
        if self.prior == "pool" and not pool_prior(model).fitted:
            fit_pool_prior(model, pool, self.class_prior)

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        supports, first, second, *crops = model([batch.labeled.images, *batch.views.values()])
        known = gather_support(supports, batch.labeled, self.label_smoothing)
        with torch.no_grad():
            prior = self._batch_prior(model, batch, known)
        losses = self.losses([first, second, *crops], known, prior, self.trained_class_prior(model))
        if self.prior == "pool" and losses.mean is not None:
            pool_prior(model).follow(losses.mean, known.labeled)
        if isinstance(prior, float):
            parts = {**losses.parts, "prior_temperature": torch.tensor(prior)}
            losses = losses._replace(parts=parts)
        losses = with_supervision(losses, known, weight=self.supervised_weight, temperature=self.temperature)
        return with_contrast(
            losses, first.z, second.z, weight=self.contrast_weight, temperature=self.contrast_temperature
        )

    def in_class_share(self, model: nn.Module) -> Share | None:
        """Estimated share of the pool that belongs to the classes; None with neither prior nor judge."""
        if self.prior != "pool":
            return super().in_class_share(model)
        return prior.estimated_share() if (prior := pool_prior(model)).fitted else None

    def trained_class_prior(self, model: nn.Module) -> Tensor | None:
        """Frequencies that training keeps to; with prior 'pool', those of the start or what followed."""
        if self.prior == "pool":
            return pool_prior(model).trained_class_prior
        return super().trained_class_prior(model)

    @property
    def weighs_entropy(self) -> bool:
        """Whether entropy is weighed: with prior 'pool' by default."""
        return self.prior == "pool" if self.reweight_entropy is None else self.reweight_entropy

    def _judge(self, encoder: Encoder) -> PoolPrior | None:
        """With prior 'pool', that of the start; in features that have changed since, it means nothing."""
        if self.prior != "pool":
            return super()._judge(encoder)
        return prior if encoder.frozen and (prior := pool_prior(encoder)).fitted else None

    @property
    def _share(self) -> float:
        return self.regression_share

    def threshold(self, support: LabeledEmbeddings) -> float:
        """Where the prior is a probability, more likely out-of-class than in-class."""
        return BORDER if self.prior == "pool" else super().threshold(support)

    def kernel(self, support: LabeledEmbeddings) -> Kernel:
        """The kernel of training; a prior that is 'auto' fits the labeled images."""
        prior = (
            self.in_domain_temperature(support)
            if self.prior_temperature == "auto"
            else self.prior_temperature
        )
        return Kernel(
            temperature=self.temperature,
            prior_temperature=prior if self.in_domain_prior else None,
            label_ratio=self.label_ratio,
            self_vote=self.self_vote,
        )

    def in_domain_temperature(self, support: LabeledEmbeddings) -> float:
        return fitted_prior_temperature(support.nearest_same_class, self.typical_prior)

    def _batch_prior(self, model: nn.Module, batch: Batch, known: GlobalSupport) -> float | Tensor | None:
        """Of each query, from the pool; or a temperature, with 'auto' the one that fits the supports."""
        if not self.in_domain_prior:
            return None
        if self.prior == "pool":
            return pool_prior(model).prior[batch.pool_index]
        if self.prior_temperature != "auto":
            return self.prior_temperature
        gap = model.get_buffer(GAP)
        update_running_gap(gap, nearest_gap(known.h, known.labeled))
        return auto_prior_temperature(float(gap), self.typical_prior)
