"""Projection and prediction heads on top of a backbone."""

from torch import nn


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


def prediction_head(width: int, hidden: int) -> nn.Sequential:
    """BN-Linear-BN-ReLU-Linear; its output is z."""
    return nn.Sequential(
        nn.BatchNorm1d(width),
        nn.Linear(width, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, width),
    )
