"""IOMatch: its losses, where their gradients go, and what its outputs mean."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from ropaws.methods.iomatch import IOMatch, open_set_targets
from tests import oracles
from tests.methods.one_step import CLASSES, make_batch, make_model, touched

ROLES = ("weak", "strong")


def model_and_batch(method, *, scale=1.5, **batch):
    model = make_model(method, scale=scale)
    return model, make_batch(ROLES, dims=model.encoder.feature_dims, **batch)


def favor_known(model):
    """Detectors that say "in class" of everything."""
    with torch.no_grad():
        head = model.network.heads["one_vs_all"]
        projection = model.network.heads["projection"][-1]
        projection.weight.zero_()
        projection.bias.fill_(1.0)
        head.weight[:CLASSES].fill_(-1.0)
        head.weight[CLASSES:].fill_(1.0)


def test_open_set_targets_by_hand():
    probs = torch.tensor([[0.5, 0.3, 0.2]])
    inside = torch.tensor([[1.0, 0.5, 0.0]])
    torch.testing.assert_close(open_set_targets(probs, inside), torch.tensor([[0.5, 0.15, 0.0, 0.35]]))


@pytest.mark.parametrize("confidence", [0.5, 0.7])
def test_every_part_of_the_loss(confidence):
    method = IOMatch(confidence=confidence, open_confidence=0.45, detector_weight=2.0, open_weight=3.0)
    model, batch = model_and_batch(method)
    heads = model.network.heads

    def detect(images):
        return heads["one_vs_all"](heads["projection"](images)).tolist()

    with torch.no_grad():
        classes = batch.labeled.classes.tolist()
        logits = heads["classes"](batch.labeled.images).tolist()
        known = sum(-math.log(oracles.softmax(r)[y]) for r, y in zip(logits, classes, strict=True)) / 6
        scores = detect(batch.labeled.images)
        detectors = sum(oracles.one_vs_all_loss(r, y) for r, y in zip(scores, classes, strict=True)) / 6
        inlier, open_set, taught = oracles.iomatch_unlabeled(
            heads["classes"](batch.views["weak"]).tolist(),
            detect(batch.views["weak"]),
            heads["classes"](batch.views["strong"]).tolist(),
            heads["open_set"](heads["projection"](batch.views["strong"])).tolist(),
            confidence,
            0.45,
        )
    losses = method.step(model, batch)
    found = {name: float(value) for name, value in losses.parts.items()}
    expected = {"cross_entropy": known, "one_vs_all": detectors, "pseudo_label": inlier, "open_set": open_set}
    assert found == pytest.approx(expected)
    assert float(losses.total.detach()) == pytest.approx(known + 2 * detectors + inlier + 3 * open_set)
    assert losses.selected.tolist() == taught
    assert 0 < sum(taught) < len(taught)  # else the case would say little
    assert open_set > 0


def test_labels_and_the_projection_alone_teach_the_detectors():
    """The unlabeled targets are constants: without labels no gradient reaches the detectors' layer."""
    method = IOMatch(confidence=0.4, detector_weight=0.0)
    model, batch = model_and_batch(method)
    for weight in model.parameters():
        weight.grad = None
    method.step(model, batch).total.backward()
    heads = touched(model.network.heads)
    assert "one_vs_all.weight" not in heads
    assert {"classes.weight", "open_set.weight", "projection.0.weight"} <= heads
    weak = batch.views["weak"].clone().requires_grad_()
    method.step(model, batch._replace(views={**batch.views, "weak": weak})).total.backward()
    assert weak.grad is None or weak.grad.abs().sum() == 0
    assert not touched(model.average)


def test_the_open_set_loss_waits():
    method = IOMatch(warmup=0.5)
    model, _ = model_and_batch(method)
    for step in (0, 4, 5, 9):
        batch = make_batch(ROLES, dims=model.encoder.feature_dims, step=step)
        losses = method.step(model, batch)
        rest = sum(value for name, value in losses.parts.items() if name != "open_set")
        expected = rest + (losses.parts["open_set"] if step >= 5 else 0)
        assert float(losses.total.detach()) == pytest.approx(float(expected))
    no_warmup = replace(method, warmup=0.0).step(
        model, make_batch(ROLES, dims=model.encoder.feature_dims, step=0)
    )
    assert float(no_warmup.total.detach()) == pytest.approx(float(sum(no_warmup.parts.values())))


def test_images_that_the_detectors_reject_teach_no_class():
    method = IOMatch(confidence=0.0)
    model, batch = model_and_batch(method)
    favor_known(model)
    assert method.step(model, batch).selected.tolist() == [1.0] * 10
    with torch.no_grad():
        model.network.heads["one_vs_all"].weight.neg_()
    losses = method.step(model, batch)
    assert losses.selected.tolist() == [0.0] * 10
    assert float(losses.parts["pseudo_label"]) == 0
    assert float(losses.parts["open_set"]) > 0  # as outliers they are learned


def test_nobody_sure_is_a_loss_of_labels_alone():
    method = IOMatch(confidence=0.999, open_confidence=0.999)
    model, batch = model_and_batch(method, scale=0.5)
    losses = method.step(model, batch)
    labeled = losses.parts["cross_entropy"] + losses.parts["one_vs_all"]
    assert float(losses.total.detach()) == pytest.approx(float(labeled))
    losses.total.backward()
    assert all(torch.isfinite(w.grad).all() for w in model.network.parameters() if w.grad is not None)


def test_alignment_changes_targets_and_is_remembered():
    plain, aligning = IOMatch(confidence=0.4), IOMatch(confidence=0.4, alignment=4)
    model, batch = model_and_batch(plain)
    other, _ = model_and_batch(aligning)
    other.load_state_dict(model.state_dict(), strict=False)
    assert model.alignment is None
    before = copy.deepcopy(other.alignment)
    plain_loss, aligned_loss = plain.step(model, batch), aligning.step(other, batch)
    assert float(plain_loss.parts["open_set"]) != pytest.approx(float(aligned_loss.parts["open_set"]))
    assert int(other.alignment.batches) == int(before.batches) + 1
    probs = model.network.logits(batch.views["weak"]).softmax(dim=1).mean(dim=0)
    torch.testing.assert_close(other.alignment.means[0], probs.detach())
    assert "alignment.means" in other.state_dict()


def test_one_half_is_where_the_open_set_classifier_changes_its_mind():
    method = IOMatch()
    model, batch = model_and_batch(method)
    network = model.predictor
    with torch.no_grad():
        network.heads["open_set"].bias[-1] = 0.7  # else it prefers a known class everywhere
    images = batch.views["weak"]
    outputs = method.predict(model.eval(), images, None)
    q = network.heads["open_set"](network.heads["projection"](images)).softmax(dim=1)
    assert ((outputs.in_domain >= method.threshold(None)) == (q.argmax(dim=1) < CLASSES)).all()
    assert 0 < (q.argmax(dim=1) < CLASSES).sum() < len(images)
    best = q[:, :-1].amax(dim=1)
    torch.testing.assert_close(outputs.in_domain, best / (best + q[:, -1]))
    torch.testing.assert_close(outputs.score, 1 - q[:, -1])
    torch.testing.assert_close(outputs.probs, network.logits(images).softmax(dim=1))


@pytest.mark.parametrize(
    "setting",
    [
        {"open_confidence": 1.0},
        {"open_confidence": -0.1},
        {"detector_weight": -1.0},
        {"open_weight": math.inf},
        {"warmup": 1.0},
        {"alignment": -1},
        {"confidence": 2.0},
        {"ema": 1.0},
    ],
)
def test_settings_out_of_range(setting):
    with pytest.raises(ValueError, match=f"method.{next(iter(setting))} must be"):
        IOMatch(**setting)
