"""Learning rates, LARS and SGD, and the optimizer settings that a method brings."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from ropaws.core.optimizers import (
    LARS,
    Adam,
    OptimConfig,
    build_optimizer,
    fixmatch_cosine,
    learning_rate,
    warmup_cosine,
)
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.methods import PAWS, FineTune
from ropaws.run.config import RunConfig, with_method
from tests.methods.foreign import MemoryMethod


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


def test_the_schedule_of_fixmatch_ends_near_a_fifth_of_the_peak():
    rates = [fixmatch_cosine(step, peak=0.03, total=1000) for step in range(1000)]
    assert rates[0] == 0.03
    assert rates[500] == pytest.approx(0.03 * math.cos(7 * math.pi / 32))
    assert rates[-1] == pytest.approx(0.03 * math.cos(7 * math.pi / 16), rel=0.01)
    assert rates == sorted(rates, reverse=True)


def test_settings_choose_the_schedule():
    plain = OptimConfig(peak=2.0, start=1.0, end=0.1, warmup=5)
    for step in (0, 3, 5, 19):
        expected = warmup_cosine(step, peak=2.0, start=1.0, end=0.1, warmup=5, total=20)
        assert learning_rate(plain, 20)(step) == expected
        other = learning_rate(dataclasses.replace(plain, schedule="fixmatch"), 20)
        assert other(step) == fixmatch_cosine(step, peak=2.0, total=20)  # no warm-up, no end


class Layers(nn.Module):
    """A matrix, two vectors, and a part that is not trained."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[3.0, 4.0]]))
        self.bias = nn.Parameter(torch.tensor([1.0]))
        self.norm = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_sgd_has_nesterov_momentum_and_no_decay_on_vectors():
    model = Layers()
    optimizer = build_optimizer(model, OptimConfig(name="sgd", momentum=0.9, weight_decay=0.1))
    assert isinstance(optimizer, torch.optim.SGD)
    weights = {"matrix": model.matrix, "bias": model.bias, "norm": model.norm}
    expected = {name: weight.detach().clone() for name, weight in weights.items()}
    velocity = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        for name, weight in weights.items():
            weight.grad = torch.full_like(weight, 0.2 + step)
            gradient = weight.grad + (0.1 * expected[name] if name == "matrix" else 0)
            velocity[name] = 0.9 * velocity[name] + gradient
            expected[name] = expected[name] - 0.5 * (gradient + 0.9 * velocity[name])
        optimizer.step()
    for name, weight in weights.items():
        torch.testing.assert_close(weight.detach(), expected[name])


@pytest.mark.parametrize("name", ["lars", "sgd"])
def test_frozen_weights_are_left_out(name):
    model = Layers()
    optimizer = build_optimizer(model, OptimConfig(name=name))
    found = [weight for group in optimizer.param_groups for weight in group["params"]]
    assert {id(weight) for weight in found} == {id(model.matrix), id(model.bias), id(model.norm)}
    assert len(found) == 3


def test_without_momentum_sgd_is_plain():
    model = Layers()
    optimizer = build_optimizer(model, OptimConfig(name="sgd", momentum=0.0, start=0.1, weight_decay=0.0))
    model.matrix.grad = torch.ones(1, 2)
    optimizer.step()
    torch.testing.assert_close(model.matrix.detach(), torch.tensor([[2.9, 3.9]]))


def test_a_method_brings_the_settings_of_its_optimizer():
    base = RunConfig(optim=OptimConfig(peak=1.6, weight_decay=0.5))
    for method in (FineTune(), MemoryMethod()):
        found = with_method(base, method)
        assert found.method == method
        # Beside its own, defaults that fit its peak: those of the recipe were chosen for another optimizer.
        assert found.optim == OptimConfig(
            **{"start": found.optim.peak, "end": 0.0, "warmup": 0, **method.optim}
        )
        assert found.optim.name == "sgd"
        assert dataclasses.replace(found, method=base.method, optim=base.optim) == base
    assert with_method(base, PAWS()).optim == base.optim


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_that_of_torch_to_the_bit(decay):
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(5, 3, generator=generator), torch.randn(20, 5, 3, generator=generator)
    found = []
    for build in (
        lambda w: Adam([w], lr=0.01, betas=(0.8, 0.999), weight_decay=decay),
        lambda w: torch.optim.Adam([w], lr=0.01, betas=(0.8, 0.999), weight_decay=decay, foreach=False),
    ):
        weight = nn.Parameter(start.clone())
        optimizer = build(weight)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found)
