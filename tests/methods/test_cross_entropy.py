"""Labels alone: the loss, where its gradient goes, and that no unlabeled image is asked for."""

import pytest
import torch

from ropaws.methods.cross_entropy import CrossEntropy
from ropaws.pool.augment import AugmentConfig
from ropaws.pool.rand_augment import WeakView
from tests import oracles
from tests.methods.one_step import make_batch, make_model, touched


def test_the_loss_and_its_gradient():
    method = CrossEntropy()
    model = make_model(method, scale=1.5)
    batch = make_batch((), dims=model.encoder.feature_dims, unlabeled=0)
    with torch.no_grad():
        logits = model.network.heads["classes"](batch.labeled.images).tolist()
    losses = method.step(model, batch)
    expected = oracles.labeled_loss(logits, batch.labeled.classes.tolist())
    assert losses.total.item() == pytest.approx(expected, abs=1e-12)
    assert losses.selected is None
    losses.total.backward()
    assert touched(model) == {"network.heads.classes.weight", "network.heads.classes.bias"}


def test_weak_views_of_labeled_images_alone():
    assert CrossEntropy().views(AugmentConfig()) == {}
    assert CrossEntropy().labeled_view(AugmentConfig(size=24)) == WeakView(size=24)


def test_settings_out_of_range():
    with pytest.raises(ValueError, match=r"method\.ema must be at least 0 and below 1, got 1"):
        CrossEntropy(ema=1.0)
