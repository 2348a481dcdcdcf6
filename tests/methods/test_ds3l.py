"""DS3L: the inner loss, and the outer gradient against a written-out step and finite differences."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ropaws.methods.classifier import gaussian_ramp
from ropaws.methods.ds3l import DS3L, weighted_mean
from tests import oracles
from tests.methods.one_step import CLASSES, make_batch, make_model
from tests.methods.test_mpl import image_batch as mpl_batch
from tests.methods.test_mpl import linear_of

ROLES = ("weak1", "weak2")
COEFFICIENT = 10 * gaussian_ramp(5, 10)


def model_and_batch(method, **batch):
    model = make_model(method, scale=1.5)
    return model, make_batch(ROLES, dims=model.encoder.feature_dims, **batch)


def image_batch():
    batch = mpl_batch()
    return batch._replace(views=dict(zip(ROLES, batch.views.values(), strict=True)))


def written_out(model, batch):
    """Inner loss as a function of weights, and the labeled loss after a step on it."""
    linear = linear_of(model.network)
    labeled, truth = batch.labeled.images.numpy(), batch.labeled.classes.tolist()
    first, second = (batch.views[role].numpy() for role in ROLES)
    targets = [oracles.softmax(row) for row in linear.logits(first)]

    def inner(weights):
        total = oracles.labeled_loss(linear.logits(labeled), truth)
        for row, target, g in zip(linear.logits(second), targets, weights, strict=True):
            squares = [(p - t) ** 2 for p, t in zip(oracles.softmax(row), target, strict=True)]
            total += COEFFICIENT * g / sum(weights) * sum(squares) / CLASSES
        return total

    def outer(weights, rate):
        shares = [COEFFICIENT * g / sum(weights) for g in weights]
        slopes = oracles.cross_entropy_slopes(linear.logits(labeled), np.eye(CLASSES)[truth])
        moved = linear.stepped(labeled, slopes, rate)
        more = oracles.squared_distance_slopes(linear.logits(second), targets, shares)
        stepped = moved.stepped(second, more, rate)  # the slopes are those of the old weights
        return oracles.labeled_loss(stepped.logits(labeled), truth)

    return inner, outer, torch.tensor(targets, dtype=torch.float64)


def test_losses_and_the_gradient_of_the_weights():
    method = DS3L(trial_rate=0.5)
    model, batch = model_and_batch(method)
    inner, outer, targets = written_out(model, batch)
    weights = model.weigher(targets).squeeze(1)
    given = weights.tolist()
    losses = method.step(model, batch)
    assert losses.total.item() == pytest.approx(inner(given), abs=1e-10)
    assert losses.parts["after_trial"].item() == pytest.approx(outer(given, 0.5), abs=1e-10)
    assert losses.selected.tolist() == pytest.approx(given)
    slopes = []
    for i in range(len(given)):
        high, low = (outer([g + e * (i == j) for j, g in enumerate(given)], 0.5) for e in (1e-5, -1e-5))
        slopes.append((high - low) / 2e-5)
    expected = torch.autograd.grad(
        weights, list(model.weigher.parameters()), torch.tensor(slopes, dtype=torch.float64)
    )
    losses.total.backward()
    for weight, value in zip(model.weigher.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, value, rtol=1e-5, atol=1e-12)
    assert model.weigher[2].bias.grad.abs() > 1e-6


def test_the_gradient_goes_through_a_step_of_a_network_with_batch_norm():
    method = DS3L(trial_rate=0.1)
    model, batch = make_model(method), image_batch()
    method.step(model, batch).total.backward()
    found = []
    for weight in model.weigher.parameters():
        place = int(weight.grad.flatten().abs().argmax())
        outer = []
        for change in (1e-4, -1e-4):
            other = copy.deepcopy(model)
            changed = dict(zip(model.weigher.parameters(), other.weigher.parameters(), strict=True))[weight]
            with torch.no_grad():
                changed.view(-1)[place] += change
            outer.append(method.step(other, batch).parts["after_trial"].item())
        slope = (outer[0] - outer[1]) / 2e-4
        assert weight.grad.flatten()[place].item() == pytest.approx(slope, rel=1e-4)
        found.append(abs(slope))
    assert max(found) > 1e-7


def test_the_network_learns_the_inner_loss_with_fixed_weights_and_one_look_at_the_batch():
    method = DS3L()
    model, batch = make_model(method), image_batch()
    other = copy.deepcopy(model)
    method.step(model, batch).total.backward()
    network = other.network
    features = network.features(batch.labeled.images, *batch.views.values())
    labeled, first, second = map(network.logits, features)
    targets = first.softmax(dim=1).detach()
    weights = other.weigher(targets).squeeze(1).detach()
    distances = (second.softmax(dim=1) - targets).square().mean(dim=1)
    inner = nn.functional.cross_entropy(labeled, batch.labeled.classes)
    (inner + COEFFICIENT * (weights * distances).sum() / weights.sum()).backward()
    for (name, weight), expected in zip(model.network.named_parameters(), network.parameters(), strict=True):
        assert (weight.grad is None) == (expected.grad is None), name
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, expected.grad)
    for (name, buffer), expected in zip(model.network.named_buffers(), network.buffers(), strict=True):
        if "num_batches" not in name:
            torch.testing.assert_close(buffer, expected, msg=name)


def test_weights_fall_where_a_step_harms():
    """A row whose consistency hurts the labeled images gets less after some steps of the outer gradient."""
    method = DS3L(trial_rate=0.5)
    model, batch = model_and_batch(method)
    _, outer, targets = written_out(model, batch)
    before = outer(model.weigher(targets).squeeze(1).tolist(), 0.5)
    optimizer = torch.optim.SGD(model.weigher.parameters(), lr=20.0)
    for _ in range(20):
        optimizer.zero_grad()
        method.step(model, batch).total.backward()
        optimizer.step()
    after = outer(model.weigher(targets).squeeze(1).tolist(), 0.5)
    assert after < before - 1e-5


def test_weighted_mean():
    values, weights = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.0, 0.25])
    assert weighted_mean(values, weights).item() == pytest.approx((0.5 + 1.0) / 0.75)


def test_torch_synchronized_batch_norm_is_refused():
    method = DS3L()
    model, batch = model_and_batch(method)
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    with pytest.raises(ValueError, match="train with a single process"):
        method.step(model, batch)


def test_settings_out_of_range_are_refused():
    for name in ("trial_rate", "hidden"):
        with pytest.raises(ValueError, match=f"method.{name} must be positive, got 0"):
            replace(DS3L(), **{name: 0})
    with pytest.raises(ValueError, match="unlabeled_weight must be at least 0"):
        DS3L(unlabeled_weight=-1.0)
