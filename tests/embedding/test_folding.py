"""Batch norms folded into convolutions change the speed and nothing else."""

import copy

import pytest
import torch
from torch import nn

from ropaws.embedding.backbones import BACKBONES
from ropaws.embedding.frozen_features import folded


def trained(name, channels):
    """A network whose batch norms have statistics and weights of their own, in float64."""
    random = torch.Generator().manual_seed(3)
    network = BACKBONES[name](channels).double()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low, high in (
                (module.running_mean, -0.5, 0.5),
                (module.running_var, 0.5, 2.0),
                (module.weight.data, 0.5, 1.5),
                (module.bias.data, -0.3, 0.3),
            ):
                tensor.uniform_(low, high, generator=random)
    return network


@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["efficientnet-lite0", "resnet18", "resnet50", "small", "wrn-28-2"])
def test_the_features_stay(name, channels):
    network = trained(name, channels)
    images = torch.randn(3, channels, 37, 45, generator=torch.Generator().manual_seed(1)).double()
    fast = folded(network)
    expected = network.eval()(images)
    torch.testing.assert_close(fast(images), expected, rtol=1e-9, atol=1e-9)
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in fast.modules())
    before = sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    assert norms <= (before // 2 + 1 if name == "wrn-28-2" else 0)  # there each block's first has no partner
    assert fast.features == network.features


def test_the_original_is_untouched():
    network = trained("efficientnet-lite0", 3)
    state = copy.deepcopy(network.state_dict())
    fast = folded(network)
    assert network.training
    assert not fast.training
    assert list(network.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert all(weight.requires_grad for weight in network.parameters())
    assert not any(weight.requires_grad for weight in fast.parameters())


def test_the_memory_format_stays():
    network = trained("small", 3).to(memory_format=torch.channels_last)
    assert folded(network).stem.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_network_without_declared_pairs_is_returned_as_it_is():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert folded(network) is network
