"""What RoPAWS minimizes: targets calibrated by label propagation with an in-domain prior, and their loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ropaws import equations as eq
from ropaws.classify.soft_nn import GlobalSupport, anchor_predictions, batch_class_prior, global_mean
from ropaws.core.distributed import gather_constants, gather_together, share
from ropaws.core.records import Embeddings, Losses


@dataclass(frozen=True, kw_only=True)
class RoPAWSObjective:
    """The objective and its settings. The boolean switches are the paper's ablations."""

    temperature: float = 0.1
    """Of the similarity kernel."""
    sharpen_temperature: float = 0.25
    """Of the targets; lower is sharper."""
    label_smoothing: float = 0.1
    """Share of a support's label that is spread over all classes."""
    label_ratio: float = 5.0
    """Weight r of the labeled batch as a whole against the unlabeled one."""
    reweight_power: float = 1.0
    """Power k of the in-domain posterior that weighs the loss."""
    reweight_entropy: bool | None = None
    """Weight me-max by the in-domain posterior too; not in the paper, see docs/method.md. None: with prior
    'pool' only."""
    self_vote: bool = False
    """Let a sample vote for itself, as the paper's formula does and its released code does not."""
    semi_supervised_density: bool = True
    """Propagate labels among the unlabeled samples."""
    reweighting: bool = True
    """Give less weight to samples that look out-of-class."""
    solver: Literal["exact", "iterative"] = "exact"
    """Closed form, or iterated label propagation, which is faster for large batches."""
    tolerance: float = 1e-4
    """With 'iterative': stop when no probability changes by more; the last change is logged as residual."""

    def losses(
        self,
        views: Sequence[Embeddings],
        known: GlobalSupport,
        prior: float | Tensor | None,
        class_prior: Tensor | None = None,
    ) -> Losses:
        """The loss of a batch.

        views: two large views of the same samples, then small crops; prior as for posterior; class_prior (c,)
        of all classes of the run, None for equal ones
        """
        class_prior = batch_class_prior(class_prior, known.labeled)
        first, second, *_ = views
        anchors = anchor_predictions(list(views), known.z, known.labels, self.temperature)
        with torch.no_grad():
            targets = [self.posterior(view.h, known.h, known.labels, prior) for view in (first, second)]
            posteriors = [posterior for posterior, _ in targets]
        in_domain = torch.stack([posterior.in_domain for posterior in posteriors])
        power = self.reweight_power if self.reweighting else 0.0
        weights = eq.sample_weights(in_domain, power=power)
        shares = weights if self.weighs_entropy else None
        mean = global_mean(anchors, shares, self.sharpen_temperature)
        losses = eq.ropaws_loss(
            anchors,
            torch.stack([posterior.probs for posterior in posteriors]),
            in_domain,
            sharpen_temperature=self.sharpen_temperature,
            reweight_power=power,
            reweight_entropy=self.weighs_entropy,
            mean=mean,
            class_prior=class_prior,
        )
        parts = dict(losses.parts)
        if self.semi_supervised_density and self.solver == "iterative":
            parts["residual"] = torch.stack([residual for _, residual in targets]).amax()
        if mean is None:  # the loss takes its own, of this process
            total, weight = eq.prediction_sum(
                anchors.detach(), shares, sharpen_temperature=self.sharpen_temperature
            )
            mean = total / weight.clamp_min(eq.TINY)
        return Losses(losses.total, parts, weights, mean.detach())

    @property
    def weighs_entropy(self) -> bool:
        """Whether me-max is weighted by the in-domain posterior."""
        return bool(self.reweight_entropy)

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

    def check(self) -> None:
        """Raise an error for a setting out of its range."""
        if not 0 <= self.reweight_power < math.inf:
            raise ValueError(f"method.reweight_power must be at least 0, got {self.reweight_power}")
