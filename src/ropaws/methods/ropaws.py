"""RoPAWS: PAWS with targets calibrated by label propagation and an in-domain prior."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ropaws import equations as eq
from ropaws.batch import Losses, Support, Views
from ropaws.distributed import gather_constants, share
from ropaws.methods.protocol import Network, check_positive, check_share
from ropaws.methods.supports import anchor_predictions, gather_support, global_mean, nearest_gap

GAP_MOMENTUM = 0.9
# Embeddings of a class may shrink to a point; the prior must not become a step function.
LEAST_PRIOR_TEMPERATURE = 0.01


@dataclass(frozen=True, kw_only=True)
class RoPAWS:
    """RoPAWS: doubts what lies far from every label. The last three switches are the ablations."""

    temperature: float = 0.1
    """Of the similarity kernel."""
    sharpen_temperature: float = 0.25
    """Of the targets; lower is sharper."""
    label_smoothing: float = 0.1
    """Share of a support's label spread over all classes."""
    label_ratio: float = 5.0
    """Weight r of the labelled batch as a whole against the unlabelled one."""
    prior_temperature: float | Literal["auto"] = 0.1
    """Of the in-domain prior, or 'auto': from the distances among the supports themselves."""
    typical_prior: float = 0.7
    """With 'auto': the prior that a labelled image gets from its nearest fellow of the class."""
    reweight_power: float = 1.0
    """Power k of the in-domain posterior that weighs the loss."""
    reweight_entropy: bool = False
    """Let doubtful samples count less in me-max too; not in the paper, see docs/method.md."""
    self_vote: bool = False
    """Let a sample vote for itself, as the paper's formula does and its released code does not."""
    semi_supervised_density: bool = True
    """Let unlabelled samples vote for one another."""
    in_domain_prior: bool = True
    """Expect a sample far from every label to be out-of-class."""
    reweighting: bool = True
    """Give less weight to samples that look out-of-class."""
    solver: Literal["exact", "iterative"] = "exact"
    """Closed form, or label propagation until it hardly moves: faster where a batch is large."""
    tolerance: float = 1e-4
    """With 'iterative': stop when no probability moves by more; the last movement is logged as residual."""

    needs_unlabeled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(self, "temperature", "sharpen_temperature", "label_ratio", "typical_prior")
        check_positive(self, "tolerance")
        check_share(self, "label_smoothing", "typical_prior")
        if self.prior_temperature != "auto":
            check_positive(self, "prior_temperature")
        if not 0 <= self.reweight_power < math.inf:
            raise ValueError(f"method.reweight_power must be at least 0, got {self.reweight_power}")

    def step(self, model: Network, views: Views, support: Support) -> Losses:
        supports, first, second, *crops = model([support.images, views.first, views.second, *views.crops])
        known = gather_support(supports, support, self.label_smoothing)
        anchors = anchor_predictions([first, second, *crops], known.z, known.labels, self.temperature)
        with torch.no_grad():
            prior_temperature = self._prior_temperature(model, known.h, known.labelled)
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

    def _prior_temperature(self, model: Network, embeddings: Tensor, support: Support) -> float | None:
        """The number set, or with 'auto' the one that fits the supports; None without prior."""
        if not self.in_domain_prior:
            return None
        if self.prior_temperature != "auto":
            return self.prior_temperature
        update_support_gap(model, nearest_gap(embeddings, support))
        return auto_prior_temperature(float(model.support_gap), self.typical_prior)


def update_support_gap(model: Network, gap: Tensor) -> None:
    """Exponential moving average; the first value counts in full, a missing one not at all."""
    gap = gap.to(model.support_gap.dtype)
    known, new = model.support_gap.isfinite(), gap.isfinite()
    average = torch.where(known, torch.lerp(gap, model.support_gap, GAP_MOMENTUM), gap)
    model.support_gap.copy_(torch.where(new, average, model.support_gap))


def auto_prior_temperature(gap: float, typical_prior: float) -> float:
    """Solve exp(-gap / t) = typical_prior for t; t = 0.1, the paper's, while no gap is known."""
    if not math.isfinite(gap):
        return 0.1
    return max(LEAST_PRIOR_TEMPERATURE, gap / -math.log(typical_prior))
