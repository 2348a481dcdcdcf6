"""The supervised baseline: the same network and classifier on the labeled images alone."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ropaws import equations as eq
from ropaws.classify.propagation import Kernel
from ropaws.classify.soft_nn import GlobalSupport, LabeledEmbeddings, gather_support, may_vote
from ropaws.core.records import Batch, Losses
from ropaws.methods.method import check_positive, check_share
from ropaws.methods.pool_calibration import JudgedMethod


def supervised_loss(known: GlobalSupport, *, temperature: float) -> Tensor:
    """Cross-entropy of each labeled view by its soft nearest neighbors among the other labeled images.  -> ()

    Of all processes in every one of them: there are few labeled images.
    """
    votes = (eq.cosine(known.z, known.z) / temperature).masked_fill(~may_vote(known.labeled), -torch.inf)
    return eq.cross_entropy(known.labels, votes.softmax(dim=1) @ known.labels).mean()


def with_supervision(losses: Losses, known: GlobalSupport, *, weight: float, temperature: float) -> Losses:
    """Add the loss of the labeled images to the losses; with weight 0 they stay as they were."""
    if weight == 0:
        return losses
    loss = supervised_loss(known, temperature=temperature)
    parts = {**losses.parts, "cross_entropy": loss.detach()}
    return losses._replace(total=losses.total + weight * loss, parts=parts)


@dataclass(frozen=True, kw_only=True)
class Supervised(JudgedMethod):
    """Labeled images only: each is classified by its soft nearest neighbors among the others."""

    temperature: float = 0.1
    """Of the similarity kernel."""
    label_smoothing: float = 0.1
    """Share of a support's label that is spread over all classes."""

    def __post_init__(self) -> None:
        check_positive(self, "temperature")
        check_share(self, "label_smoothing")

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        (supports,) = model([batch.labeled.images])
        known = gather_support(supports, batch.labeled, self.label_smoothing)
        loss = supervised_loss(known, temperature=self.temperature)
        return Losses(loss, {"cross_entropy": loss.detach()})

    def kernel(self, support: LabeledEmbeddings) -> Kernel:
        return Kernel(temperature=self.temperature, prior_temperature=self.in_domain_temperature(support))
