"""UASD: averages of predictions, the threshold of the labeled images, ramps."""

import types

import pytest
import torch

from ropaws.methods.uasd import UASD, known_confidence, mean_predictions
from tests import oracles
from tests.methods.one_step import CLASSES, POOL, make_batch, make_model

LABELED = torch.tensor(
    [2, 0, 19, 5, 11, 7]
)  # positions of the labeled images; 5, 7 and 11 are unlabeled rows too


def model_and_batch(method, **batch):
    model = make_model(method, scale=1.5)
    method.before_epoch(model, types.SimpleNamespace(data=types.SimpleNamespace(labeled_indices=LABELED)))
    return model, make_batch(("weak",), dims=model.encoder.feature_dims, **batch)


def logits_of(model, batch):
    with torch.no_grad():
        rows = torch.cat([batch.labeled.images, batch.views["weak"]])
        return model.network.heads["classes"](rows)


def positions(batch):
    return LABELED.tolist() + batch.pool_index.tolist()


def test_means_of_what_was_said():
    sums = torch.tensor([[1.5, 0.5], [0.0, 0.0], [0.25, 0.75]])
    assert mean_predictions(sums).tolist() == [[0.75, 0.25], [0.0, 0.0], [0.25, 0.75]]
    assert float(known_confidence(sums)) == 0.75
    assert float(known_confidence(sums[1:2])) == pytest.approx(0.9)
    assert float(known_confidence(sums[:0])) == pytest.approx(0.9)


def test_three_steps_against_a_notebook_of_all_that_was_said():
    """The current prediction is noted for later steps, and is no part of its own target."""
    method = UASD(begin=0.0, ramp=0.0, unlabeled_weight=0.5)
    model, _ = model_and_batch(method)
    notebook = {position: [] for position in range(POOL)}
    for step in range(3):
        _, batch = model_and_batch(method, step=step, seed=step)
        with torch.no_grad():
            model.network.heads["classes"].weight.mul_(1.3)
        logits, rows = logits_of(model, batch).tolist(), positions(batch)
        known = [notebook[p] for p in LABELED.tolist() if notebook[p]]
        means = [[sum(c) / len(said) for c in zip(*said, strict=True)] for said in known]
        gamma = sum(map(max, means)) / len(means) if means else 0.9
        learned, mask = oracles.uasd_learned([notebook[p] for p in rows], logits, gamma)
        labeled = oracles.labeled_loss(logits[:6], batch.labeled.classes.tolist())
        losses = method.step(model, batch)
        assert float(losses.parts["gamma"]) == pytest.approx(gamma, abs=1e-12)
        assert losses.selected.tolist() == mask[6:]
        assert losses.total.item() == pytest.approx(labeled + 0.5 * learned, abs=1e-12)
        for position, row in zip(rows, logits, strict=True):
            notebook[position].append(oracles.softmax(row))
    assert 0 < sum(mask[6:]) < 10  # of both kinds in the last step
    expected = [[sum(c) for c in zip(*said, strict=True)] or [0.0] * CLASSES for said in notebook.values()]
    torch.testing.assert_close(model.sums, torch.tensor(expected, dtype=torch.float64))


def test_nothing_is_learned_before_it_was_seen():
    method = UASD(begin=0.0, ramp=0.0)
    model, batch = model_and_batch(method, step=0)
    losses = method.step(model, batch)
    assert losses.total.item() == float(losses.parts["cross_entropy"])
    assert not losses.selected.any()


def test_no_gradient_through_targets_and_memory():
    method = UASD(begin=0.0, ramp=0.0)
    model, batch = model_and_batch(method)
    method.step(model, batch).total.backward()
    assert not model.sums.requires_grad
    method.step(model, batch).total.backward()  # would fail through a graph that was freed


@pytest.mark.parametrize(
    ("step", "weight"), [(0, 0.0), (19, 0.0), (20, 0.28650479686), (30, 0.73161562895), (40, 1.0), (99, 1.0)]
)
def test_the_loss_begins_late_and_grows(step, weight):
    """exp(-5 (1 - t / 40)^2) from step 20 of 100 on."""
    batch = types.SimpleNamespace(step=step, steps=100)
    assert UASD().weight_at(batch) == pytest.approx(weight, abs=1e-10)


def test_rows_are_not_selected_before_the_loss_begins():
    model, batch = model_and_batch(UASD(), step=1)
    model.sums[:, 0] = 1.0
    assert not UASD().step(model, batch).selected.any()
    assert UASD(begin=0.0).step(model, batch).selected.any()


def test_a_step_before_the_first_epoch_is_an_error():
    model = make_model(UASD())
    batch = make_batch(("weak",), dims=model.encoder.feature_dims)
    with pytest.raises(IndexError):
        UASD().step(model, batch)


@pytest.mark.parametrize("wrong", [{"begin": 1.0}, {"ramp": -0.1}, {"unlabeled_weight": -1.0}, {"ema": 1.0}])
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match=rf"method\.{next(iter(wrong))} must be"):
        UASD(**wrong)
