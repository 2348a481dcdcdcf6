"""What every method offers to the training loop, and what it may ask of the network."""

import math
from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from ropaws.batch import Embeddings, Losses, Support, Views


class Network(Protocol):
    """What a method needs of a model; ropaws.models.Encoder is one."""

    support_gap: Tensor  # () running statistic; see Encoder

    def __call__(self, batches: Sequence[Tensor], /) -> list[Embeddings]: ...


class Method(Protocol):
    """A way to turn a batch into a loss."""

    needs_unlabeled: ClassVar[bool]  # False: its views come empty

    def step(self, model: Network, views: Views, support: Support) -> Losses: ...


def check_positive(method: object, *names: str) -> None:
    for name in names:
        if not 0 < (value := getattr(method, name)) < math.inf:
            raise ValueError(f"method.{name} must be positive, got {value}")


def check_share(method: object, *names: str) -> None:
    for name in names:
        if not 0 <= (value := getattr(method, name)) < 1:
            raise ValueError(f"method.{name} must be at least 0 and below 1, got {value}")
