"""SwAV (Caron et al., NeurIPS 2020): a view predicts to which prototypes another view is assigned.

L = mean over pairs (a, b), b != a, of  mean_u H( Q_a, softmax(z_b C / T) ),  Q = Sinkhorn(z C / epsilon)

C are unit prototypes. The codes Q of the two large views spread the whole batch of all processes evenly over
the prototypes (three rounds of Sinkhorn, no gradient); every other view learns them, small crops too.
Prototypes are not trained in the first epoch. Defaults: T 0.1, epsilon 0.05, and LARS at 0.6 with trust 0.02
and weight decay 1e-6 as usual on CIFAR for a batch of 256; on ImageNet 3000 prototypes, LARS at 4.8 for a
batch of 4096, 800 epochs, views of 14 % to 100 % and 5 % to 14 % of the area.

Deviations: 300 prototypes by default, as batches here are small against 3000, and no queue of past
embeddings, which the paper has for small batches; prototypes are trained after a tenth of the run at the
latest, so that short runs train them; sizes, areas and number of crops are the run's (`--augment.*`); the
projection head has three layers; no warm-up, which the paper has for 10 epochs (`--optim.warmup`).
Predictions are those of soft nearest neighbors on z, without prototypes. On data that are features the head
and the prototypes are trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.core.distributed import gather_constants, place, share
from ropaws.core.records import Batch, Losses
from ropaws.embedding.backbones import Encoder
from ropaws.methods.classifier import soft_cross_entropy
from ropaws.methods.method import Method, check_positive
from ropaws.methods.simclr import GRAYSCALE
from ropaws.pool.augment import AugmentConfig, View
from ropaws.pool.rand_augment import WeakView

LARGE_VIEWS = 2  # that have codes
MOST_FROZEN = 0.1  # share of the run in which prototypes are not trained


@torch.no_grad()
def sinkhorn_codes(scores: Tensor, *, epsilon: float, rounds: int) -> Tensor:
    """Soft assignments of rows to prototypes that use all prototypes alike.

    exp(scores / epsilon), scaled in turns: all prototypes to one sum, all rows to one sum.
    (n, k)  ->  (n, k), rows sum to 1. In logarithms, as the exponentials may underflow.
    """
    log_codes = scores / epsilon
    for _ in range(rounds):
        log_codes = log_codes.log_softmax(dim=0).log_softmax(dim=1)
    return log_codes.exp()


def swap_loss(codes: Sequence[Tensor], scores: Sequence[Tensor], *, temperature: float) -> Tensor:
    """Every view but the one that has them learns the codes; mean over all such pairs and rows.

    codes: of the first views, each (u, k); scores: of all views, each (u, k)  ->  ()
    """
    pairs = [
        soft_cross_entropy(target, view / temperature).mean()
        for number, target in enumerate(codes)
        for other, view in enumerate(scores)
        if other != number
    ]
    return torch.stack(pairs).mean()


@dataclass(frozen=True, kw_only=True)
class SwAV(Method):
    """Pretraining without labels: views agree on their prototypes, which share the pool evenly."""

    temperature: float = 0.1
    """Of the predicted assignments (T)."""
    epsilon: float = 0.05
    """Of the codes; lower is harder."""
    prototypes: int = 300
    """Number of prototypes (k)."""
    sinkhorn_rounds: int = 3
    """Rounds in which codes are spread evenly."""

    optim: ClassVar[Mapping[str, Any]] = {"name": "lars", "peak": 0.6, "trust": 0.02, "weight_decay": 1e-6}
    uses_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive(self, "temperature", "epsilon", "prototypes", "sinkhorn_rounds")

    def views(self, augment: AugmentConfig) -> Mapping[str, View]:
        return replace(augment, grayscale=GRAYSCALE, solarize=0.0, equalize=0.0).multi_crop()

    def labeled_view(self, augment: AugmentConfig) -> View:
        """The cheapest one: labeled images are seen as a part of the pool."""
        return WeakView(size=augment.size)

    def build(self, encoder: Encoder, *, classes: int, pool: int) -> nn.Module:
        return PrototypeModel(encoder, self.prototypes, pool)

    def step(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, PrototypeModel)
        prototypes = model.prototypes if self.trains_prototypes(model, batch) else model.prototypes.detach()
        scores = [view.h @ prototypes.T for view in model.encoder(list(batch.views.values()))]
        codes = [self.codes(view) for view in scores[:LARGE_VIEWS]]
        loss = swap_loss(codes, scores, temperature=self.temperature)
        return Losses(loss, {"swap": loss.detach()})

    def codes(self, scores: Tensor) -> Tensor:
        """Codes of this process's rows, spread together with those of the others.   (u, k)  ->  (u, k)"""
        whole = gather_constants(scores)
        codes = sinkhorn_codes(whole, epsilon=self.epsilon, rounds=self.sinkhorn_rounds)
        return codes[share(len(whole))]

    def trains_prototypes(self, model: "PrototypeModel", batch: Batch) -> bool:
        """After the first epoch, or a tenth of the run."""
        epoch = model.pool // (len(batch.pool_index) * place().size)
        return batch.step >= min(epoch, MOST_FROZEN * batch.steps)

    def after_step(self, model: nn.Module, batch: Batch) -> None:
        assert isinstance(model, PrototypeModel)
        model.prototypes.copy_(F.normalize(model.prototypes, dim=1))


class PrototypeModel(nn.Module):
    """The encoder, and unit prototypes of its embeddings (k, d)."""

    def __init__(self, encoder: Encoder, count: int, pool: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.pool = pool  # images of an epoch
        self.prototypes = nn.Parameter(F.normalize(torch.randn(count, encoder.embedding_dims), dim=1))
