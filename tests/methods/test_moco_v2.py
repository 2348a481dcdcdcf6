"""MoCo-v2: the loss against a slow derivation, the queue, and the key encoder."""

import copy

import numpy as np
import pytest
import torch

from ropaws.methods import MoCoV2
from ropaws.methods.moco_v2 import NO_IMAGE, info_nce
from tests import oracles
from tests.methods.test_simclr import make_batch, make_model


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_the_loss_is_that_of_the_formula(temperature):
    random = np.random.default_rng(0)
    queries, keys, queue = (oracles.unit(random.normal(size=(rows, 3))) for rows in (4, 4, 7))
    tensors = [torch.from_numpy(rows) for rows in (queries, keys, queue)]
    found = info_nce(*tensors, temperature=temperature)
    assert float(found) == pytest.approx(oracles.info_nce(queries, keys, queue, temperature), abs=1e-12)
    same = random.random((4, 7)) < 0.5
    found = info_nce(*tensors, temperature=temperature, same_image=torch.from_numpy(same))
    expected = np.mean(
        [
            oracles.info_nce(queries[[i]], keys[[i]], queue[~same[i]].reshape(-1, 3), temperature)
            for i in range(4)
        ]
    )
    assert float(found) == pytest.approx(expected, abs=1e-12)


def test_without_any_negative_there_is_no_loss():
    """All keys of the queue show the image itself: one image in the pool."""
    rows = torch.eye(3)[:1].requires_grad_()
    same = torch.ones(1, 5, dtype=torch.bool)
    loss = info_nce(rows, rows.detach(), torch.randn(5, 3), temperature=0.2, same_image=same)
    loss.backward()
    assert float(loss.detach()) == 0
    assert rows.grad.abs().max() == 0


def test_keys_enter_the_queue_first_and_the_oldest_leave():
    method = MoCoV2(queue=8)
    model = make_model(method)
    start = model.queue.clone()
    assert (model.shown == NO_IMAGE).all()
    torch.testing.assert_close(start.norm(dim=1), torch.ones(8))
    batch = make_batch(method, step=1)
    with torch.no_grad():
        expected = copy.deepcopy(model.key_encoder)([batch.views["second"]])[0].h
    method.step(model, batch).total.backward()
    torch.testing.assert_close(model.queue, torch.cat([expected, start[:2]]))
    assert model.shown.tolist() == [0, 1, 2, 3, 4, 5, NO_IMAGE, NO_IMAGE]
    second = model.queue.clone()
    method.step(model, make_batch(method, step=2)).total.backward()
    torch.testing.assert_close(model.queue[6:], second[:2])


def test_a_queue_shorter_than_the_batch():
    method = MoCoV2(queue=4)
    model = make_model(method)
    for step in range(2):
        method.step(model, make_batch(method, step=step)).total.backward()
    assert model.shown.tolist() == [0, 1, 2, 3]


def test_a_step_is_the_loss_of_query_and_key_encoder_without_keys_of_the_same_image():
    method = MoCoV2(queue=8, temperature=0.3)
    model = make_model(method)
    method.step(model, make_batch(method, step=1))
    with torch.no_grad():
        for weight in model.key_encoder.parameters():
            weight.add_(0.05)
    batch, before = make_batch(method, step=2), copy.deepcopy(model)
    found = float(method.step(model, batch).total.detach())
    queries, keys = (
        encoder([batch.views[role]])[0].h.detach().double().numpy()
        for encoder, role in ((before.encoder, "first"), (before.key_encoder, "second"))
    )
    queue, shown = before.queue.double().numpy(), before.shown.numpy()
    expected = np.mean(
        [oracles.info_nce(queries[[i]], keys[[i]], queue[shown != i], 0.3) for i in range(len(queries))]
    )
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_key_encoder_moves_after_the_step():
    method = MoCoV2(queue=8, momentum=0.75)
    model = make_model(method)
    before = [weight.clone() for weight in model.key_encoder.parameters()]
    with torch.no_grad():
        for weight in model.encoder.parameters():
            weight.add_(1.0)
    method.after_step(model, make_batch(method))
    for was, weight in zip(before, model.key_encoder.parameters(), strict=True):
        torch.testing.assert_close(weight, was + 0.25)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature must be positive"),
        ({"queue": 0}, "queue must be positive"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        MoCoV2(**settings)
