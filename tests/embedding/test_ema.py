"""The moving average of a network's weights."""

import pytest
import torch
from torch import nn

from ropaws.methods.classifier import EMA, warmed_decay


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def move(model):
    """As a training step does: other weights, other batch statistics."""
    model.train()(torch.randn(8, 3))
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights))


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_weights_follow_the_formula_after_a_first_copy(decay):
    model = network()
    average = EMA(model, decay=decay)
    move(model)
    average.update(model)
    expected = [weights.detach().clone() for weights in model.parameters()]
    for own, copied in zip(average.module.parameters(), expected, strict=True):
        assert torch.equal(own, copied)
    for number in range(1, 6):
        move(model)
        average.update(model)
        kept = min(decay, (1 + number) / (10 + number))
        expected = [
            kept * old + (1 - kept) * new.detach()
            for old, new in zip(expected, model.parameters(), strict=True)
        ]
    for own, wanted in zip(average.module.parameters(), expected, strict=True):
        torch.testing.assert_close(own, wanted)


def test_buffers_are_copied_not_averaged():
    model = network()
    average = EMA(model, decay=0.9)
    for step in range(1, 4):
        move(model)
        average.update(model)
        norm, own = model[1], average.module[1]
        assert torch.equal(own.running_mean, norm.running_mean)
        assert torch.equal(own.running_var, norm.running_var)
        assert int(own.num_batches_tracked) == step


def test_it_is_not_trained_and_leaves_the_network_alone():
    model = network()
    average = EMA(model)
    assert not any(weights.requires_grad for weights in average.parameters())
    assert all(weights.requires_grad for weights in model.parameters())
    before = [weights.detach().clone() for weights in model.parameters()]
    average.update(model)
    average.update(model)
    for weights, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(weights, old)
    assert not average(torch.randn(2, 3)).requires_grad
    own = {weights.data_ptr() for weights in average.parameters()}
    assert not own & {weights.data_ptr() for weights in model.parameters()}


def test_it_stays_in_evaluation_mode_and_is_called_like_the_network():
    model = network()
    move(model)
    both = nn.ModuleDict({"network": model, "average": EMA(model)})
    both.train()
    assert both["network"].training
    assert not any(module.training for module in both["average"].modules())
    both["average"].update(model)
    assert not any(module.training for module in both["average"].modules())
    points = torch.randn(5, 3)
    torch.testing.assert_close(both["average"](points), model.eval()(points))


def test_a_saved_average_goes_on_where_it_was():
    model = network()
    average = EMA(model, decay=0.9)
    for _ in range(3):
        move(model)
        average.update(model)
    again = EMA(network(seed=1), decay=0.9)
    again.load_state_dict(average.state_dict())
    move(model)
    for one in (average, again):
        one.update(model)  # the second would copy, if it did not know that it is not the first time
    saved = average.state_dict()
    assert saved.keys() == again.state_dict().keys()
    for name, value in again.state_dict().items():
        assert torch.equal(value, saved[name])


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_wrong_decay_is_refused(decay):
    with pytest.raises(ValueError, match="decay must be at least 0 and below 1"):
        EMA(network(), decay=decay)


def test_the_decay_warms_up():
    """A run of 300 steps forgets its start; in a long one the decay is the stated one."""
    left = 1.0
    for number in range(1, 300):
        left *= warmed_decay(0.999, number)
    assert left < 1e-6
    assert warmed_decay(0.999, 8_000) < 0.999 == warmed_decay(0.999, 9_000)
