"""Projection and prediction heads on top of a backbone."""

import torch
from torch import Tensor, nn

from ropaws.core.features import main_directions


def projection_head(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Linear-BN-ReLU twice, then Linear; its output is h."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


class ComponentsHead(nn.Linear):
    """A linear map that starts where the features are good: as their principal components.

    Rows are scaled to unit length and seen as their main directions around a mean; both are set once, from
    the pool. The trained part maps these directions to the embedding and starts as the identity, so that the
    nearest neighbors at the start are those of the features themselves.
    """

    mean: Tensor
    components: Tensor
    is_started: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(outputs, outputs)
        with torch.no_grad():  # not nn.init.eye_, which loads 800 modules for a second on a meta tensor
            self.weight.zero_().fill_diagonal_(1.0)
        nn.init.zeros_(self.bias)
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("components", torch.empty(outputs, inputs))
        nn.init.orthogonal_(self.components)  # random directions, where no features are known to start from
        self.register_buffer("is_started", torch.tensor(False))

    def start(self, mean: Tensor, components: Tensor) -> None:
        """mean (inputs,), components (outputs, inputs) of unit rows"""
        self.mean.copy_(mean)
        self.components.copy_(components)
        self.is_started.fill_(True)

    @property
    def started(self) -> bool:
        return bool(self.is_started)

    @property
    def takes_directions(self) -> bool:
        """Can rows that are in the main directions already be told from features?"""
        return self.components.shape[0] != self.components.shape[1]

    @staticmethod
    def directions(features: Tensor, mean: Tensor, components: Tensor) -> Tensor:
        """The part that stays as it is; see main_directions."""
        return main_directions(features, mean, components)

    def forward(self, features: Tensor) -> Tensor:
        """features (n, inputs), or (n, outputs) rows in the main directions already"""
        if not (self.takes_directions and features.shape[-1] == len(self.components)):
            features = main_directions(features, self.mean, self.components)
        return super().forward(features)


def linear_head(inputs: int, outputs: int) -> nn.Sequential:
    """One linear map; its output is h."""
    return nn.Sequential(ComponentsHead(inputs, outputs))


class KnownFeatures(nn.Module):
    """The backbone of runs on feature arrays: features (n, d) in, the same out."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, features: Tensor) -> Tensor:
        if features.ndim != 2:
            raise ValueError(
                f"this run was trained on features (n, {self.features}), got {tuple(features.shape)};"
                " give it features of the same kind instead of images"
            )
        return features


def prediction_head(width: int, hidden: int) -> nn.Sequential:
    """BN-Linear-BN-ReLU-Linear; its output is z."""
    return nn.Sequential(
        nn.BatchNorm1d(width),
        nn.Linear(width, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, width),
    )
