"""Batches that batch norm normalizes but does not remember."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def kept_norm_statistics(module: nn.Module) -> Iterator[None]:
    """Within, batch norm in training mode uses the statistics of its batch and leaves the running ones."""
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    momenta = [layer.momentum for layer in norms]
    try:
        for layer in norms:
            layer.momentum = 0.0
        yield
    finally:
        for layer, momentum in zip(norms, momenta, strict=True):
            layer.momentum = momentum
