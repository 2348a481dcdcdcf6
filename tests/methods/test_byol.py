"""BYOL: the loss against a slow derivation, the rising momentum, and where gradient flows."""

import copy
import math

import pytest
import torch

from ropaws.methods import BYOL
from ropaws.methods.byol import distance, rising_momentum
from ropaws.pool.augment import AugmentConfig
from tests import oracles
from tests.methods.test_simclr import make_batch, make_model

METHOD = BYOL(predictor_hidden=8)


def test_distance_of_rows_of_any_length():
    rows = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    other = torch.tensor([[5.0, 0.0], [0.0, -1.0], [1.0, 0.0]])
    torch.testing.assert_close(distance(rows, other), torch.tensor([0.0, 4.0, 2 - math.sqrt(2)]))


def test_a_step_is_the_loss_of_the_formula():
    """The target differs from the encoder, so that swapped roles would show."""
    model = make_model(METHOD)
    with torch.no_grad():
        for weight in model.target.parameters():
            weight.add_(torch.linspace(-0.2, 0.2, weight.numel()).view_as(weight))
    batch, before = make_batch(METHOD), copy.deepcopy(model)
    found = METHOD.step(model, batch)
    views = [batch.views["first"], batch.views["second"]]
    online = [view.h for view in before.encoder(views)]
    predicted = before.predictor(torch.cat(online)).split(len(views[0]))
    targets = [view.h for view in before.target(views)]
    arrays = [[rows.detach().double().numpy() for rows in both] for both in (predicted, targets)]
    assert float(found.total.detach()) == pytest.approx(oracles.byol_loss(*arrays), rel=1e-5)
    found.total.backward()
    assert all(weight.grad is not None for weight in model.predictor.parameters())
    assert all(weight.grad is None for weight in model.target.parameters())


def test_the_momentum_rises_by_a_cosine_to_one():
    assert rising_momentum(0, 100, start=0.9) == pytest.approx(0.9)
    assert rising_momentum(50, 100, start=0.9) == pytest.approx(0.95)
    assert rising_momentum(100, 100, start=0.9) == 1
    assert rising_momentum(25, 100, start=0.9) == pytest.approx(1 - 0.1 * (math.sqrt(0.5) + 1) / 2)


def test_the_target_follows_with_the_momentum_of_the_step():
    model = make_model(METHOD)
    before = [weight.clone() for weight in model.target.parameters()]
    with torch.no_grad():
        for weight in model.encoder.parameters():
            weight.add_(1.0)
    batch = make_batch(METHOD, step=5)  # of 10
    BYOL(momentum=0.6).after_step(model, batch)
    for was, weight in zip(before, model.target.parameters(), strict=True):
        torch.testing.assert_close(weight, was + 0.2)


def test_only_the_second_view_is_solarized():
    views = METHOD.views(AugmentConfig())
    assert (views["first"].solarize, views["second"].solarize) == (0.0, 0.2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": -0.1}, "momentum must be at least 0"),
        ({"predictor_hidden": 0}, "predictor_hidden must be positive"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        BYOL(**settings)
