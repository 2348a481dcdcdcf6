"""Projection and prediction heads on top of a backbone."""

import torch
from torch import Tensor, nn


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


def linear_head(inputs: int, outputs: int) -> nn.Sequential:
    """One Linear; its output is h. It can start where the features are good, see start_from_components."""
    return nn.Sequential(nn.Linear(inputs, outputs))


@torch.no_grad()
def start_from_components(head: nn.Sequential, mean: Tensor, components: Tensor) -> None:
    """Start a linear head as h = components (x - mean): nearest neighbors are those of the features.

    mean (inputs,), components (outputs, inputs)
    """
    linear = head[0]
    assert isinstance(linear, nn.Linear)
    linear.weight.copy_(components)
    linear.bias.copy_(-(components @ mean))


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
