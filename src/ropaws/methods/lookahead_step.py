"""Batches that batch norm normalizes but does not remember."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from ropaws.core.distributed import all_mean
from ropaws.methods.classifier import Network


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


Tensors = Mapping[str, Tensor]


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Trained weights by name, without those of a frozen backbone."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def slopes_of(loss: Tensor, weights: Tensors, *, create_graph: bool = False) -> dict[str, Tensor]:
    """Gradients of a loss in this process, by name; a weight that the loss does not use is left out."""
    found = torch.autograd.grad(loss, list(weights.values()), create_graph=create_graph, allow_unused=True)
    return {name: slope for name, slope in zip(weights, found, strict=True) if slope is not None}


def stepped(weights: Tensors, slopes: Tensors, rate: float) -> dict[str, Tensor]:
    """weight - rate * slope, with the mean slope of all processes; weights without a slope are left out."""
    flat = all_mean(torch.cat([slope.flatten() for slope in slopes.values()]))
    parts = flat.split([slope.numel() for slope in slopes.values()])
    return {
        name: weights[name] - rate * part.view_as(weights[name])
        for name, part in zip(slopes, parts, strict=True)
    }


def logits_with(network: Network, weights: Tensors, images: Tensor) -> Tensor:
    """Logits of images where some weights are others; batch norm remembers nothing of it.   ->  (n, c)"""
    named = {f"network.{name}": weight for name, weight in weights.items()}
    with kept_norm_statistics(network):
        logits: Tensor = functional_call(_Classifier(network), named, (images,))
    return logits


def handed_over(weights: Tensors, slopes: Tensors) -> Tensor:
    """A term of value 0 whose gradients are the given ones, for the optimizer of the run.   ->  ()"""
    terms = torch.stack([(weights[name] * slope.detach()).sum() for name, slope in slopes.items()])
    return (terms - terms.detach()).sum()


class _Classifier(nn.Module):
    """Logits as the forward pass, which is all that functional_call can call."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network.logits(self.network(images))
