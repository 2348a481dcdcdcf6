"""RoPAWS: PAWS with targets calibrated by label propagation and an in-domain prior."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ropaws import equations as eq
from ropaws.batch import Batch, Losses, Support
from ropaws.data.augment import AugmentConfig, View
from ropaws.distributed import gather_constants, share
from ropaws.methods.method import Method, check_positive, check_share
from ropaws.methods.propagation import Kernel
from ropaws.methods.soft_nn import (
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
class RoPAWS(Method):
    """RoPAWS: distrusts images far from every label. The boolean switches are the paper's ablations."""

    temperature: float = 0.1
    """Of the similarity kernel."""
    sharpen_temperature: float = 0.25
    """Of the targets; lower is sharper."""
    label_smoothing: float = 0.1
    """Share of a support's label that is spread over all classes."""
    label_ratio: float = 5.0
    """Weight r of the labeled batch as a whole against the unlabeled one."""
    prior_temperature: float | Literal["auto"] = 0.1
    """Of the in-domain prior, or 'auto': from the distances among the supports themselves."""
    typical_prior: float = 0.7
    """With 'auto': the prior that a labeled image gets from the nearest one of its class."""
    reweight_power: float = 1.0
    """Power k of the in-domain posterior that weighs the loss."""
    reweight_entropy: bool = False
    """Weight me-max by the in-domain posterior too; not in the paper, see docs/method.md."""
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
        check_positive(self, "tolerance")
        check_share(self, "label_smoothing", "typical_prior")
        if self.prior_temperature != "auto":
            check_positive(self, "prior_temperature")
        if not 0 <= self.reweight_power < math.inf:
            raise ValueError(f"method.reweight_power must be at least 0, got {self.reweight_power}")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        return augment.multi_crop()

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        """The encoder with one more running statistic, NaN until it was measured once."""
        encoder.register_buffer(GAP, torch.tensor(math.nan))
        return encoder

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        supports, first, second, *crops = model([batch.labeled.images, *batch.views.values()])
        known = gather_support(supports, batch.labeled, self.label_smoothing)
        anchors = anchor_predictions([first, second, *crops], known.z, known.labels, self.temperature)
        with torch.no_grad():
            prior_temperature = self._batch_prior_temperature(model, known.h, known.labeled)
            targets = [
                self.posterior(view.h, known.h, known.labels, prior_temperature) for view in (first, second)
            ]
            posteriors = [posterior for posterior, _ in targets]
        in_domain = torch.stack([posterior.in_domain for posterior in posteriors])
        power = self.reweight_power if self.reweighting else 0.0
        weights = eq.sample_weights(in_domain, power=power) if self.reweight_entropy else None
        losses = eq.ropaws_loss(
            anchors,
            torch.stack([posterior.probs for posterior in posteriors]),
            in_domain,
            sharpen_temperature=self.sharpen_temperature,
            reweight_power=power,
            reweight_entropy=self.reweight_entropy,
            mean=global_mean(anchors, weights, self.sharpen_temperature),
        )
        parts = dict(losses.parts)
        if prior_temperature is not None:
            parts["prior_temperature"] = torch.tensor(prior_temperature)
        if self.semi_supervised_density and self.solver == "iterative":
            parts["residual"] = torch.stack([residual for _, residual in targets]).amax()
        return Losses(losses.total, parts)

    def posterior(
        self, queries: Tensor, support: Tensor, labels: Tensor, prior_temperature: float | None
    ) -> tuple[eq.Posterior, Tensor]:
        """Targets of one view, and the residual of the solver: 0 for the closed form.

        queries (u, d): of this process; those of all processes vote. support (s, d), labels (s, c)
        """
        solved = queries.new_zeros(())
        if not self.semi_supervised_density:
            mass = eq.soft_nn(queries, support, labels, temperature=self.temperature)
            if prior_temperature is not None:
                mass = mass * eq.in_domain_prior(queries, support, temperature=prior_temperature)[:, None]
            return eq.complete_posterior(mass), solved
        everyone = gather_constants(queries)
        rows = share(len(everyone))
        if self.solver == "exact":
            # In every process alike: sharing a solve would take longer than doing it.
            whole = eq.ropaws_posterior(
                everyone,
                support,
                labels,
                temperature=self.temperature,
                prior_temperature=prior_temperature,
                label_ratio=self.label_ratio,
                self_vote=self.self_vote,
            )
            return eq.Posterior(whole.probs[rows], whole.in_domain[rows]), solved
        return self._iterate(everyone, rows, support, labels, prior_temperature)

    def _iterate(
        self, queries: Tensor, rows: slice, support: Tensor, labels: Tensor, prior_temperature: float | None
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
        if prior_temperature is not None:
            prior = eq.in_domain_prior(queries[rows], support, temperature=prior_temperature)[:, None]
            to_support, to_unlabeled = prior * to_support, prior * to_unlabeled
        mass, residual = eq.propagate_until(
            to_support, to_unlabeled, labels, tolerance=self.tolerance, gather=gather_constants
        )
        return eq.complete_posterior(mass), residual

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

    def _batch_prior_temperature(
        self, model: nn.Module, embeddings: Tensor, support: Support
    ) -> float | None:
        """The number set, or with 'auto' the one that fits the supports; None without prior."""
        if not self.in_domain_prior:
            return None
        if self.prior_temperature != "auto":
            return self.prior_temperature
        gap = model.get_buffer(GAP)
        update_running_gap(gap, nearest_gap(embeddings, support))
        return auto_prior_temperature(float(gap), self.typical_prior)


def update_running_gap(average: Tensor, gap: Tensor) -> None:
    """Exponential moving average, in place; the first value counts in full, a missing one not at all."""
    gap = gap.to(average.dtype)
    smoothed = torch.where(average.isfinite(), torch.lerp(gap, average, GAP_MOMENTUM), gap)
    average.copy_(torch.where(gap.isfinite(), smoothed, average))
