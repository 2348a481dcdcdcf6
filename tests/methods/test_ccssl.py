"""CCSSL: the soft contrast against loops over pairs, and its place beside FixMatch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ropaws.methods.ccssl import CCSSL, contrastive_loss, positive_weights
from ropaws.methods.fixmatch import FixMatch
from ropaws.pool.augment import AugmentConfig
from tests import oracles
from tests.methods.one_step import make_batch, make_model, touched

ROLES = ("weak", "strong", "contrast")


def model_and_batch(method, **batch):
    model = make_model(method, scale=1.5)
    return model, make_batch(ROLES, dims=model.encoder.feature_dims, **batch)


def test_weights_by_hand():
    classes = torch.tensor([0, 0, 1, 0])
    confidence = torch.tensor([0.9, 0.8, 0.7, 0.4])
    expected = torch.tensor([
        [1.0, 0.72, 0.0, 0.36],
        [0.72, 1.0, 0.0, 0.32],
        [0.0, 0.0, 1.0, 0.0],
        [0.36, 0.32, 0.0, 1.0],
    ])  # fmt: skip
    torch.testing.assert_close(positive_weights(classes, confidence, push=0.0), expected)
    expected[3, :3] = expected[:3, 3] = 0
    torch.testing.assert_close(positive_weights(classes, confidence, push=0.5), expected)


@pytest.mark.parametrize("push", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_every_part_of_the_loss(push, temperature):
    method = CCSSL(
        confidence=0.6, push=push, temperature=temperature, contrast_weight=2.0, unlabeled_weight=3.0
    )
    model, batch = model_and_batch(method)
    heads = model.network.heads
    with torch.no_grad():
        probs = heads["classes"](batch.views["weak"]).softmax(dim=1).numpy()
        first, second = (oracles.unit(heads["projection"](batch.views[role])) for role in ROLES[1:])
    contrast = oracles.ccssl_contrast(first, second, probs, push, temperature)
    fixmatch = FixMatch(confidence=0.6, unlabeled_weight=3.0).step(model, batch)
    losses = method.step(model, batch)
    expected = {**fixmatch.parts, "contrast": contrast}
    assert {k: float(v) for k, v in losses.parts.items()} == pytest.approx(
        {k: float(v) for k, v in expected.items()}
    )
    assert float(losses.total.detach()) == pytest.approx(float(fixmatch.total.detach()) + 2 * contrast)
    assert torch.equal(losses.selected, fixmatch.selected)
    assert 0 < losses.selected.sum() < 10


def test_with_all_pushed_away_it_is_instance_discrimination():
    """Each view finds its other one among all: the cross-entropy of SimCLR."""
    random = torch.Generator().manual_seed(0)
    views = [F.normalize(torch.randn(5, 4, generator=random, dtype=torch.float64), dim=1) for _ in range(2)]
    weights = positive_weights(torch.zeros(5), torch.full((5,), 0.6), push=0.7)
    rows = torch.cat(views)
    found = contrastive_loss(rows, rows, weights.repeat(2, 2), torch.arange(10), temperature=0.2)
    for i in range(10):
        others = [j for j in range(10) if j != i]
        logits = (rows[i] @ rows[others].T / 0.2).numpy()
        partner = others.index((i + 5) % 10)
        assert float(found[i]) == pytest.approx(math.log(np.exp(logits).sum()) - logits[partner])


def test_confidences_and_pseudo_labels_are_constants():
    method = CCSSL(confidence=0.3)
    model, batch = model_and_batch(method)
    views = {role: view.clone().requires_grad_() for role, view in batch.views.items()}
    method.step(model, batch._replace(views=views)).total.backward()
    assert views["weak"].grad.abs().sum() == 0
    assert (views["strong"].grad.abs().sum(dim=1) > 0).all()
    assert (views["contrast"].grad.abs().sum(dim=1) > 0).all()
    assert {"projection.0.weight", "projection.2.weight", "classes.weight"} <= touched(model.network.heads)
    assert not touched(model.average)


def test_nobody_sure_leaves_the_contrast():
    method = CCSSL(confidence=0.999, push=0.999)
    model, batch = model_and_batch(method)
    losses = method.step(model, batch)
    assert losses.selected.sum() == 0
    assert float(losses.parts["pseudo_label"]) == 0
    assert 0 < float(losses.parts["contrast"]) < math.inf
    losses.total.backward()
    assert all(torch.isfinite(w.grad).all() for w in model.network.parameters() if w.grad is not None)


def test_one_unlabeled_image_has_one_answer():
    method = CCSSL()
    model, batch = model_and_batch(method, unlabeled=1)
    assert float(method.step(model, batch).parts["contrast"]) == pytest.approx(0, abs=1e-12)


def test_the_third_view_is_that_of_simclr():
    views = CCSSL().views(AugmentConfig(size=20, interpolation="bicubic", blur=0.5))
    assert list(views) == list(ROLES)
    simclr = views["contrast"]
    assert (simclr.size, simclr.scale, simclr.interpolation) == (20, (0.08, 1.0), "bicubic")
    # Strength 0.5: brightness, contrast and saturation by up to 40 %, hue by up to 10 % of the circle.
    assert (simclr.flip, simclr.jitter, simclr.jitter_strength, simclr.grayscale) == (0.5, 0.8, 0.5, 0.2)
    assert (simclr.solarize, simclr.equalize, simclr.blur) == (0, 0, 0)


@pytest.mark.parametrize(
    "setting", [{"contrast_weight": -1.0}, {"temperature": 0.0}, {"push": 1.0}, {"confidence": -0.5}]
)
def test_settings_out_of_range(setting):
    with pytest.raises(ValueError, match=f"method.{next(iter(setting))} must be"):
        replace(CCSSL(), **setting)
