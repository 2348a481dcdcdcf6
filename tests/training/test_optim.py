"""Learning rates, LARS and SGD, and the optimizer settings that a method brings."""

import pytest
import torch
from torch import nn

from ropaws.models import ModelConfig, build_encoder
from ropaws.training.optim import LARS, OptimConfig
from ropaws.training.schedules import warmup_cosine


def test_schedule_goes_up_straight_and_down_on_a_cosine():
    def rate(step):
        return warmup_cosine(step, peak=3.2, start=0.8, end=0.032, warmup=10, total=101)

    assert rate(0) == 0.8
    assert rate(5) == pytest.approx(2.0)
    assert rate(10) == pytest.approx(3.2)
    assert rate(55) == pytest.approx((3.2 + 0.032) / 2)
    assert rate(100) == pytest.approx(0.032)
    assert rate(500) == pytest.approx(0.032)
    falling = [rate(step) for step in range(10, 101)]
    assert falling == sorted(falling, reverse=True)


def test_schedule_without_warmup_and_of_one_step():
    assert warmup_cosine(0, peak=1.0, start=0.1, end=0.01, warmup=0, total=1) == 1.0


def test_lars_scales_matrices_and_leaves_vectors_alone():
    weight, bias = nn.Parameter(torch.tensor([[3.0, 4.0]])), nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = LARS([weight, bias], lr=0.5, momentum=0.9, weight_decay=0.1, trust=0.01)
    expected_weight, expected_bias = weight.detach().clone(), bias.detach().clone()
    momentum = torch.zeros(1, 2)
    bias_momentum = torch.zeros(2)
    for _ in range(3):
        gradient, bias_gradient = torch.tensor([[0.6, -0.8]]), torch.tensor([0.5, -0.5])
        weight.grad, bias.grad = gradient.clone(), bias_gradient.clone()
        optimizer.step()
        size = expected_weight.norm()
        rate = 0.01 * size / (gradient.norm() + 0.1 * size + 1e-8)
        momentum = 0.9 * momentum + rate * (gradient + 0.1 * expected_weight)
        bias_momentum = 0.9 * bias_momentum + bias_gradient
        expected_weight = expected_weight - 0.5 * momentum
        expected_bias = expected_bias - 0.5 * bias_momentum
    torch.testing.assert_close(weight.detach(), expected_weight)
    torch.testing.assert_close(bias.detach(), expected_bias)


def test_lars_leaves_every_norm_layer_without_decay():
    model = build_encoder(ModelConfig(backbone="resnet18"), channels=3)
    optimizer = LARS(model.parameters(), lr=1.0, weight_decay=100.0, trust=1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # also the batch norms of the downsampling layers
            assert torch.equal(parameter, before[name]), name


def test_lars_leaves_a_weight_without_gradient_alone():
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.zeros(2, 2)
    LARS([weight], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(weight.detach(), torch.ones(2, 2))


def test_lars_moves_a_zero_weight():
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2)
    LARS([weight], lr=0.1).step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), -0.1))


@pytest.mark.parametrize("settings", [{"peak": 0}, {"start": -1}, {"warmup": -1}, {"momentum": 1.0}])
def test_bad_optimizer_settings_are_named(settings):
    with pytest.raises(ValueError, match=rf"optim\.{next(iter(settings))} must be"):
        OptimConfig(**settings)
