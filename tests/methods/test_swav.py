"""SwAV: codes and loss against slow derivations, and when prototypes are trained."""

import copy

import numpy as np
import pytest
import torch

from ropaws.methods import SwAV
from ropaws.methods.swav import sinkhorn_codes, swap_loss
from ropaws.pool.augment import AugmentConfig
from tests import oracles
from tests.methods.test_simclr import make_batch, make_model

METHOD = SwAV(prototypes=6)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
def test_codes_are_those_of_the_published_rounds(shape, rounds):
    scores = np.random.default_rng(0).uniform(-1, 1, shape)
    found = sinkhorn_codes(torch.from_numpy(scores), epsilon=0.1, rounds=rounds)
    np.testing.assert_allclose(found.numpy(), oracles.sinkhorn_codes(scores, 0.1, rounds), rtol=1e-10)


def test_many_rounds_use_all_prototypes_alike():
    scores = torch.rand(12, 4, dtype=torch.float64)
    scores[:, 0] += 1  # all rows prefer the first one
    codes = sinkhorn_codes(scores, epsilon=0.1, rounds=300)
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(12, dtype=torch.float64))
    torch.testing.assert_close(codes.sum(dim=0), torch.full((4,), 3.0, dtype=torch.float64))


def test_a_small_epsilon_does_not_underflow():
    """exp(-2 / 0.001) is 0 in any precision; each row goes to a prototype of its own."""
    scores = 2 * torch.eye(3) - 1
    torch.testing.assert_close(sinkhorn_codes(scores, epsilon=0.001, rounds=3), torch.eye(3))


def test_the_swapped_loss_is_that_of_the_formula():
    random = np.random.default_rng(0)
    scores = list(random.uniform(-1, 1, (4, 5, 3)))
    codes = [oracles.sharpen(np.exp(rows), 1.0) for rows in scores[:2]]
    found = swap_loss(
        [torch.from_numpy(rows) for rows in codes],
        [torch.from_numpy(rows) for rows in scores],
        temperature=0.2,
    )
    assert float(found) == pytest.approx(oracles.swap_loss(codes, scores, 0.2), abs=1e-12)


def test_a_step_is_the_loss_of_the_formula_and_no_gradient_flows_through_codes():
    model, batch = make_model(METHOD), make_batch(METHOD)
    before = copy.deepcopy(model)
    found = METHOD.step(model, batch)
    assert list(batch.views) == ["large1", "large2", "small1"]
    rows = [view.h.detach().double().numpy() for view in before.encoder(list(batch.views.values()))]
    scores = [view @ before.prototypes.detach().double().numpy().T for view in rows]
    codes = [oracles.sinkhorn_codes(view, 0.05, 3) for view in scores[:2]]
    assert float(found.total.detach()) == pytest.approx(oracles.swap_loss(codes, scores, 0.1), rel=1e-4)
    assert not METHOD.codes(torch.rand(4, 3, requires_grad=True)).requires_grad


def test_prototypes_wait_for_the_second_epoch_but_not_longer_than_a_tenth_of_the_run():
    """6 images in batches of 2: an epoch has 3 steps."""
    model = make_model(METHOD)

    def trained(step, steps):
        model.zero_grad()
        batch = make_batch(METHOD, rows=2, step=step)._replace(steps=steps)
        METHOD.step(model, batch).total.backward()
        return model.prototypes.grad is not None

    assert [trained(step, 1000) for step in range(5)] == [False, False, False, True, True]
    assert [trained(step, 20) for step in range(5)] == [False, False, True, True, True]


def test_prototypes_keep_unit_length():
    model = make_model(METHOD)
    torch.testing.assert_close(model.prototypes.norm(dim=1), torch.ones(6))
    with torch.no_grad():
        model.prototypes.mul_(3.0)
        METHOD.after_step(model, make_batch(METHOD))
    torch.testing.assert_close(model.prototypes.norm(dim=1), torch.ones(6))


def test_crops_are_those_of_the_run():
    views = METHOD.views(AugmentConfig(small_crops=2, small_size=14))
    assert list(views) == ["large1", "large2", "small1", "small2"]
    assert (views["small1"].size, views["small1"].grayscale, views["large1"].equalize) == (14, 0.2, 0.0)


@pytest.mark.parametrize("name", ["temperature", "epsilon", "prototypes", "sinkhorn_rounds"])
def test_settings_out_of_range(name):
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        SwAV(**{name: 0})
