"""UDA: its loss, where the gradient goes, annealing."""

import math
from dataclasses import replace

import pytest
import torch

from ropaws.methods.uda import UDA, annealed_cross_entropy, annealed_threshold
from tests import oracles
from tests.methods.one_step import CLASSES, make_batch, make_model, touched

ROLES = ("weak", "strong")


def model_and_batch(method, *, scale=1.5, **batch):
    model = make_model(method, scale=scale)
    return model, make_batch(ROLES, dims=model.encoder.feature_dims, **batch)


def logits_of(model, batch):
    """Labeled, weak, strong; features skip the backbone."""
    head = model.network.heads["classes"]
    with torch.no_grad():
        return [head(x).tolist() for x in (batch.labeled.images, *(batch.views[role] for role in ROLES))]


@pytest.mark.parametrize("confidence", [0.5, 0.8])
def test_the_loss(confidence):
    method = UDA(confidence=confidence, temperature=0.6, unlabeled_weight=3.0)
    model, batch = model_and_batch(method)
    labeled, weak, strong = logits_of(model, batch)
    known = oracles.labeled_loss(labeled, batch.labeled.classes.tolist())
    consistency, learned = oracles.uda_unlabeled(weak, strong, 0.6, confidence)
    assert 0 < sum(learned) < len(learned)
    losses = method.step(model, batch)
    assert losses.selected.tolist() == learned
    assert float(losses.parts["consistency"]) == pytest.approx(consistency, abs=1e-12)
    assert losses.total.item() == pytest.approx(known + 3 * consistency, abs=1e-12)


def test_gradient_flows_through_the_strong_view_alone():
    method = UDA(confidence=0.3)
    model, batch = model_and_batch(method)
    for view in batch.views.values():
        view.requires_grad_()
    method.step(model, batch).total.backward()
    assert not batch.views["weak"].grad.any()
    assert float(batch.views["strong"].grad.abs().sum()) > 0
    assert touched(model) == {"network.heads.classes.weight", "network.heads.classes.bias"}


def test_no_row_is_confident():
    method = UDA(confidence=0.9999)
    model, batch = model_and_batch(method)
    losses = method.step(model, batch)
    assert losses.total.item() == float(losses.parts["cross_entropy"])
    assert not losses.selected.any()


@pytest.mark.parametrize(
    ("annealing", "first", "middle"),
    [("linear", 0.25, 0.625), ("exp", 0.25 + 0.75 * math.exp(-5), 0.25 + 0.75 * math.exp(-2.5)),
     ("log", 0.25, 0.25 + 0.75 * (1 - math.exp(-2.5))), ("none", 1.0, 1.0)],
)  # fmt: skip
def test_the_threshold_grows_from_chance_to_one(annealing, first, middle):
    assert annealed_threshold(0.0, 4, annealing) == pytest.approx(first)
    assert annealed_threshold(0.5, 4, annealing) == pytest.approx(middle)
    assert annealed_threshold(1.0, 4, annealing) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("step", [1, 5, 9])
def test_annealing_leaves_out_what_is_learned(step):
    method = UDA(annealing="linear", unlabeled_weight=0.0)
    model, batch = model_and_batch(method, scale=4.0, step=step)
    labeled, _, _ = logits_of(model, batch)
    classes = batch.labeled.classes.tolist()
    threshold = 1 / CLASSES + step / 10 * (1 - 1 / CLASSES)
    right = [oracles.softmax(row)[y] for row, y in zip(labeled, classes, strict=True)]
    assert min(right) <= threshold < max(right)
    expected = oracles.uda_labeled(labeled, classes, threshold)
    assert method.step(model, batch).total.item() == pytest.approx(expected, abs=1e-12)
    plain = replace(method, annealing="none")
    assert plain.step(model, batch).total.item() != pytest.approx(expected, abs=1e-6)


def test_everything_is_learned_already():
    logits = (50 * torch.eye(3)).requires_grad_()
    loss = annealed_cross_entropy(logits, torch.arange(3), 0.5)
    loss.backward()
    assert loss.item() == 0
    assert float(logits.grad.abs().sum()) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0},
        {"confidence": 1.0},
        {"unlabeled_weight": -1.0},
        {"annealing": "cosine"},
        {"ema": 1.0},
    ],
)
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match=rf"method\.{next(iter(wrong))} must be"):
        UDA(**wrong)
