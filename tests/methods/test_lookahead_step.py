"""A step that is only tried: against torch's own optimizer on a copy, with batch norm."""

import copy

import torch
import torch.nn.functional as F

from ropaws.methods.classifier import handed_over, logits_with, slopes_of, stepped, trained_weights
from ropaws.methods.fixmatch import FixMatch
from tests.methods.one_step import make_model

IMAGES = torch.randn(6, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 2, 1, 0])


def loss_of(network):
    return F.cross_entropy(network.logits(network(IMAGES)), CLASSES)


def test_a_trial_is_the_step_of_plain_sgd_and_leaves_the_network_alone():
    network = make_model(FixMatch()).network
    real = copy.deepcopy(network)
    optimizer = torch.optim.SGD(real.parameters(), lr=0.3)
    loss_of(real).backward()
    optimizer.step()
    weights = trained_weights(network)
    slopes = slopes_of(loss_of(network), weights)
    assert not any(name.startswith("encoder.projection") for name in slopes)  # the loss does not use it
    moved = stepped(weights, slopes, 0.3)
    before = copy.deepcopy(network.state_dict())
    found = logits_with(network, moved, IMAGES)
    torch.testing.assert_close(found, real.logits(real(IMAGES)))
    assert (found - logits_with(network, {}, IMAGES)).abs().max() > 0.01
    for name, value in network.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(value, before[name]), name


def test_gradients_are_handed_over_as_they_are():
    network = make_model(FixMatch()).network
    weights = trained_weights(network)
    slopes = slopes_of(loss_of(network), weights)
    term = handed_over(weights, slopes)
    assert term.item() == 0
    term.backward()
    for name, weight in weights.items():
        expected = slopes.get(name)
        assert weight.grad is None if expected is None else torch.equal(weight.grad, expected)
