"""Pseudo-label: its loss, its ramp, and batch norm that remembers labeled images alone."""

import copy

import pytest
import torch
from torch import nn

from ropaws.methods.classifier import kept_norm_statistics
from ropaws.methods.cross_entropy import CrossEntropy
from ropaws.methods.pseudo_label import PseudoLabel
from tests import oracles
from tests.methods.one_step import make_batch, make_model


def model_and_batch(method, *, scale=1.5, **batch):
    model = make_model(method, scale=scale)
    return model, make_batch(("weak",), dims=model.encoder.feature_dims, **batch)


def images(batch):
    """The same rows with images in the place of features."""
    random = torch.Generator().manual_seed(0)
    shape = (3, 12, 12)
    labeled = torch.randn(len(batch.labeled.images), *shape, generator=random, dtype=torch.float64)
    weak = 3 + 2 * torch.randn(len(batch.pool_index), *shape, generator=random, dtype=torch.float64)
    return batch._replace(labeled=batch.labeled._replace(images=labeled), views={"weak": weak})


def statistics(model):
    return {k: v.clone() for k, v in model.network.named_buffers() if "backbone" in k and "running" in k}


@pytest.mark.parametrize(("step", "weight"), [(0, 0.0), (1, 0.5), (2, 1.0), (7, 2.0)])
def test_the_loss_and_its_ramp(step, weight):
    method = PseudoLabel(confidence=0.6, unlabeled_weight=2.0, ramp=0.4)
    model, batch = model_and_batch(method, step=step)
    head = model.network.heads["classes"]
    with torch.no_grad():
        labeled, weak = (head(x).tolist() for x in (batch.labeled.images, batch.views["weak"]))
    known = oracles.labeled_loss(labeled, batch.labeled.classes.tolist())
    pseudo = oracles.pseudo_label_unlabeled(weak, 0.6)
    losses = method.step(model, batch)
    assert 0 < float(losses.selected.mean()) < 1
    assert losses.selected.tolist() == [float(max(oracles.softmax(row)) >= 0.6) for row in weak]
    assert float(losses.parts["pseudo_label"]) == pytest.approx(pseudo, abs=1e-12)
    assert losses.total.item() == pytest.approx(known + weight * pseudo, abs=1e-12)


def test_no_row_is_confident():
    method = PseudoLabel(confidence=0.9999, ramp=0.0)
    model, batch = model_and_batch(method)
    losses = method.step(model, batch)
    assert losses.total.item() == float(losses.parts["cross_entropy"])
    assert not losses.selected.any()


def test_batch_norm_remembers_labeled_images_alone():
    """As if there were no unlabeled ones; yet these are normalized by their own statistics."""
    method = PseudoLabel(confidence=0.0, ramp=0.0)
    model, batch = model_and_batch(method)
    batch = images(batch)
    alone, own = copy.deepcopy(model), copy.deepcopy(model)
    losses = method.step(model, batch)
    CrossEntropy().step(alone, batch)
    before = statistics(own)
    weak = own.network.logits(own.network(batch.views["weak"])).tolist()
    assert float(losses.parts["pseudo_label"]) == pytest.approx(oracles.pseudo_label_unlabeled(weak, 0.0))
    for name, value in statistics(model).items():
        assert torch.equal(value, statistics(alone)[name]), name
        assert not torch.equal(value, before[name]), name
    losses.total.backward()
    assert all(weight.grad is not None for weight in model.network.encoder.backbone.parameters())


def test_statistics_are_remembered_again_also_after_an_error():
    norms = nn.Sequential(nn.BatchNorm1d(2, momentum=0.3), nn.BatchNorm1d(2, momentum=None))
    rows = torch.randn(5, 2)
    with kept_norm_statistics(norms):
        norms(rows)
    with pytest.raises(ValueError, match="expected 2D or 3D input"), kept_norm_statistics(norms):
        norms(rows[0])
    assert [norm.momentum for norm in norms] == [0.3, None]
    assert norms[0].running_mean.tolist() == [0, 0]
    norms(rows)
    torch.testing.assert_close(norms[0].running_mean, 0.3 * rows.mean(dim=0))


@pytest.mark.parametrize(
    "wrong", [{"confidence": 1.0}, {"ramp": 1.0}, {"ramp": -0.1}, {"unlabeled_weight": -1.0}]
)
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match=rf"method\.{next(iter(wrong))} must be"):
        PseudoLabel(**wrong)
