"""RoPAWS: PAWS with targets calibrated by label propagation and an in-domain prior."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ropaws import equations as eq
from ropaws.batch import Batch, Losses, Share
from ropaws.data.augment import AugmentConfig, View
from ropaws.data.loaders import PoolPass
from ropaws.distributed import gather_constants, gather_together, share
from ropaws.methods.contrast import with_contrast
from ropaws.methods.judged import POOL_PRIOR, JudgedMethod, pool_prior
from ropaws.methods.method import check_positive, check_share, check_weight, encoder_of
from ropaws.methods.pool_prior import PoolPrior
from ropaws.methods.propagation import Kernel
from ropaws.methods.soft_nn import (
    GlobalSupport,
    LabeledEmbeddings,
    anchor_predictions,
    auto_prior_temperature,
    fitted_prior_temperature,
    gather_support,
    global_mean,
    nearest_gap,
)
from ropaws.models import Encoder

GAP_MOMENTUM = 0.9
GAP = "support_gap"  # running mean of the distance 1 - cos of a support to the nearest one of its class


@dataclass(frozen=True, kw_only=True)
class RoPAWS(JudgedMethod):
    """RoPAWS: distrusts images far from every label. The boolean switches are the paper's ablations."""

    temperature: float = 0.1
    """Of the similarity kernel."""
    sharpen_temperature: float = 0.25
    """Of the targets; lower is sharper."""
    label_smoothing: float = 0.1
    """Share of a support's label that is spread over all classes."""
    label_ratio: float = 5.0
    """Weight r of the labeled batch as a whole against the unlabeled one."""
    prior: Literal["distance", "pool"] = "distance"
    """In-domain prior: by the distance to the nearest label as in the paper, or from the density of labels
    against that of the pool, on the features at the start (docs/prior.md)."""
    prior_temperature: float | Literal["auto"] = 0.1
    """Of the prior by distance, or 'auto': from the distances among the supports themselves."""
    typical_prior: float = 0.7
    """With 'auto': the prior that a labeled image gets from the nearest one of its class."""
    reweight_power: float = 1.0
    """Power k of the in-domain posterior that weighs the loss."""
    reweight_entropy: bool | None = None
    """Weight me-max by the in-domain posterior too; not in the paper, see docs/method.md. None: with prior
    'pool' only."""
    regression_share: float = 0.5
    """With prior 'pool' and a frozen backbone, or judge 'pool': share of logistic regression on the features
    in the class probabilities, a geometric mean with the soft nearest-neighbor classifier; 0 for none."""
    contrast_weight: float = 0.0
    """Weight of a contrastive loss beside: the two large views of an image attract, all others repel. Not in
    the paper; for short training from scratch, see docs/method.md."""
    contrast_temperature: float = 0.2
    """Of the contrastive loss."""
    self_vote: bool = False
    """Let a sample vote for itself, as the paper's formula does and its released code does not."""
    semi_supervised_density: bool = True
    """Propagate labels among the unlabeled samples."""
    in_domain_prior: bool = True
    """Expect a sample far from every label to be out-of-class."""
    reweighting: bool = True
    """Give less weight to samples that look out-of-class."""
    solver: Literal["exact", "iterative"] = "exact"
    """Closed form, or iterated label propagation, which is faster for large batches."""
    tolerance: float = 1e-4
    """With 'iterative': stop when no probability changes by more; the last change is logged as residual."""

    def __post_init__(self) -> None:
        check_positive(self, "temperature", "sharpen_temperature", "label_ratio", "typical_prior")
        check_positive(self, "tolerance", "contrast_temperature")
        check_weight(self, "contrast_weight")
        check_share(self, "label_smoothing", "typical_prior", "regression_share")
        if self.prior_temperature != "auto":
            check_positive(self, "prior_temperature")
        if not 0 <= self.reweight_power < math.inf:
            raise ValueError(f"method.reweight_power must be at least 0, got {self.reweight_power}")
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
        if self.prior == "pool" and not (prior := pool_prior(model)).fitted:
            prior.fit(encoder_of(model), pool)

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        supports, first, second, *crops = model([batch.labeled.images, *batch.views.values()])
        known = gather_support(supports, batch.labeled, self.label_smoothing)
        anchors = anchor_predictions([first, second, *crops], known.z, known.labels, self.temperature)
        with torch.no_grad():
            prior = self._batch_prior(model, batch, known)
            targets = [self.posterior(view.h, known.h, known.labels, prior) for view in (first, second)]
            posteriors = [posterior for posterior, _ in targets]
        in_domain = torch.stack([posterior.in_domain for posterior in posteriors])
        power = self.reweight_power if self.reweighting else 0.0
        weights = eq.sample_weights(in_domain, power=power) if self._reweights_entropy else None
        losses = eq.ropaws_loss(
            anchors,
            torch.stack([posterior.probs for posterior in posteriors]),
            in_domain,
            sharpen_temperature=self.sharpen_temperature,
            reweight_power=power,
            reweight_entropy=self._reweights_entropy,
            mean=global_mean(anchors, weights, self.sharpen_temperature),
        )
        parts = dict(losses.parts)
        if isinstance(prior, float):
            parts["prior_temperature"] = torch.tensor(prior)
        if self.semi_supervised_density and self.solver == "iterative":
            parts["residual"] = torch.stack([residual for _, residual in targets]).amax()
        losses = Losses(losses.total, parts, eq.sample_weights(in_domain, power=power))
        return with_contrast(
            losses, first.z, second.z, weight=self.contrast_weight, temperature=self.contrast_temperature
        )

    def posterior(
        self, queries: Tensor, support: Tensor, labels: Tensor, prior: float | Tensor | None
    ) -> tuple[eq.Posterior, Tensor]:
        """Targets of one view, and the residual of the solver: 0 for the closed form.

        queries (u, d): of this process; those of all processes vote. support (s, d), labels (s, c)
        prior: the temperature of Eq. (13), the prior of each query (u,), or None for none
        """
        solved = queries.new_zeros(())
        inside = prior if isinstance(prior, Tensor) else None
        if isinstance(prior, float):
            inside = eq.in_domain_prior(queries, support, temperature=prior)
        if not self.semi_supervised_density:
            mass = eq.soft_nn(queries, support, labels, temperature=self.temperature)
            mass = mass if inside is None else mass * inside[:, None]
            return eq.complete_posterior(mass), solved
        if self.solver == "iterative":
            everyone = gather_constants(queries)
            return self._iterate(everyone, share(len(everyone)), support, labels, inside)
        everyone, *priors = gather_together(queries, *([] if inside is None else [inside]))
        rows = share(len(everyone))
        # In every process alike: sharing a solve would take longer than doing it.
        whole = eq.ropaws_posterior(
            everyone,
            support,
            labels,
            temperature=self.temperature,
            prior_temperature=None,
            label_ratio=self.label_ratio,
            self_vote=self.self_vote,
            prior=priors[0] if priors else None,
        )
        return eq.Posterior(whole.probs[rows], whole.in_domain[rows]), solved

    def _iterate(
        self, queries: Tensor, rows: slice, support: Tensor, labels: Tensor, prior: Tensor | None
    ) -> tuple[eq.Posterior, Tensor]:
        """Each process has the votes of its own rows only, and learns the others' result every round."""
        to_support, to_unlabeled = eq.neighbor_weights(
            queries,
            support,
            temperature=self.temperature,
            label_ratio=self.label_ratio,
            self_vote=self.self_vote,
            rows=rows,
        )
        if prior is not None:
            to_support, to_unlabeled = prior[:, None] * to_support, prior[:, None] * to_unlabeled
        mass, residual = eq.propagate_until(
            to_support,
            to_unlabeled,
            labels,
            tolerance=self.tolerance,
            gather=partial(gather_constants, of=len(queries)),
        )
        return eq.complete_posterior(mass), residual

    def in_class_share(self, model: nn.Module) -> Share | None:
        """Estimated share of the pool that belongs to the classes; None with neither prior nor judge."""
        if self.prior != "pool":
            return super().in_class_share(model)
        return prior.estimated_share() if (prior := pool_prior(model)).fitted else None

    @property
    def _reweights_entropy(self) -> bool:
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
        return 0.5 if self.prior == "pool" else super().threshold(support)

    def kernel(self, support: LabeledEmbeddings) -> Kernel:
        """As in training; a prior that is 'auto' fits the labeled images."""
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


def update_running_gap(average: Tensor, gap: Tensor) -> None:
    """Exponential moving average, in place; the first value counts in full, a missing one not at all."""
    gap = gap.to(average.dtype)
    smoothed = torch.where(average.isfinite(), torch.lerp(gap, average, GAP_MOMENTUM), gap)
    average.copy_(torch.where(gap.isfinite(), smoothed, average))
