"""MPL: both losses, the feedback against a real step, who learns from what."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ropaws.core.records import Batch, Support
from ropaws.methods.mpl import MPL
from tests import oracles
from tests.methods.one_step import CLASSES, make_batch, make_model, touched

ROLES = ("weak", "strong")
STUDENT = {"network.heads.classes.weight", "network.heads.classes.bias"}
TEACHER = {"teacher.heads.classes.weight", "teacher.heads.classes.bias"}


def model_and_batch(method, **batch):
    model = make_model(method)
    return model, make_batch(ROLES, dims=model.encoder.feature_dims, **batch)


def image_batch(step=5):
    random = torch.Generator().manual_seed(0)
    labeled, weak, strong = (
        torch.randn(n, 3, 12, 12, generator=random, dtype=torch.float64) for n in (6, 8, 8)
    )
    classes = torch.tensor([0, 1, 2, 2, 1, 0])
    support = Support(labeled, F.one_hot(classes).double(), torch.arange(6), classes)
    return Batch(step, 10, {"weak": weak, "strong": strong}, torch.arange(8), support)


def linear_of(network):
    head = network.heads["classes"]
    return oracles.LinearSoftmax(head.weight.detach().numpy(), head.bias.detach().numpy())


@pytest.mark.parametrize("sign", [1, -1])
def test_the_loss(sign):
    method = MPL(confidence=0.8, consistency_weight=2.0, trial_rate=0.8, feedback_sign=sign)
    model, batch = model_and_batch(method)
    student, teacher = linear_of(model.network), linear_of(model.teacher)
    labeled, truth = batch.labeled.images.numpy(), batch.labeled.classes.tolist()
    weak, strong = (batch.views[role].numpy() for role in ROLES)
    known = oracles.smoothed_loss(teacher.logits(labeled), truth, 0.15)
    soft = [oracles.softmax(row / 0.7) for row in teacher.logits(weak)]
    strong_logits = teacher.logits(strong)
    terms = [
        oracles.cross_entropy(oracles.softmax(row), q) if max(q) >= 0.8 else 0.0
        for q, row in zip(soft, strong_logits, strict=True)
    ]
    assert 0 < sum(term > 0 for term in terms) < len(terms)
    lessons = [int(np.argmax(q)) for q in soft]
    learned = oracles.smoothed_loss(student.logits(strong), lessons, 0.15)
    targets = [[0.05 + 0.85 * (c == y) for c in range(CLASSES)] for y in lessons]
    slopes = oracles.cross_entropy_slopes(student.logits(strong), targets)
    moved = student.stepped(strong, slopes, 0.8)
    before, after = (oracles.labeled_loss(s.logits(labeled), truth) for s in (student, moved))
    feedback = sign * (before - after)
    assert abs(feedback) > 1e-3
    own = oracles.labeled_loss(strong_logits, [int(np.argmax(row)) for row in strong_logits])
    losses = method.step(model, batch)
    assert losses.parts["feedback"].item() == pytest.approx(feedback, abs=1e-10)
    assert losses.parts["student"].item() == pytest.approx(learned, abs=1e-10)
    expected = known + 2 * sum(terms) / len(terms) + learned + feedback * own
    assert losses.total.item() == pytest.approx(expected, abs=1e-10)


def test_the_feedback_is_that_of_a_real_step_with_batch_norm():
    method = MPL(trial_rate=0.4, smoothing=0.1)
    model, batch = make_model(method), image_batch()
    student, teacher = copy.deepcopy(model.network), copy.deepcopy(model.teacher)
    feedback = method.step(model, batch).parts["feedback"].item()
    _, weak, _ = teacher.features(batch.labeled.images, *batch.views.values())
    lessons = teacher.logits(weak).argmax(dim=1)

    def labeled_loss():
        logits = student.logits(student(batch.labeled.images))
        return F.cross_entropy(logits, batch.labeled.classes).item()

    before = labeled_loss()
    _, strong = student.features(batch.labeled.images, batch.views["strong"])
    F.cross_entropy(student.logits(strong), lessons, label_smoothing=0.1).backward()
    torch.optim.SGD(student.parameters(), lr=0.4).step()
    assert feedback == pytest.approx(before - labeled_loss(), abs=1e-10)


def test_gradients_are_those_of_each_network_alone():
    """The student learns pseudo-labels only; the teacher never hears of the student but through h."""
    method = MPL(confidence=0.3)
    model, batch = make_model(method), image_batch()
    losses = method.step(model, batch)
    losses.total.backward()
    other = make_model(method)
    _, strong = other.network.features(batch.labeled.images, batch.views["strong"])
    _, weak, strong_t = other.teacher.features(batch.labeled.images, *batch.views.values())
    lessons = other.teacher.logits(weak).argmax(dim=1)
    F.cross_entropy(other.network.logits(strong), lessons, label_smoothing=0.15).backward()
    for (name, weight), expected in zip(
        model.network.named_parameters(), other.network.parameters(), strict=True
    ):
        assert (weight.grad is None) == (expected.grad is None), name
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, expected.grad)
    # The teacher's gradient is linear in h, with the slope of learning its own labels.
    logits = other.teacher.logits(strong_t)
    own = F.cross_entropy(logits, logits.argmax(dim=1))
    slope = torch.autograd.grad(own, other.teacher.heads["classes"].weight)[0]
    opposite = make_model(method)
    replace(method, feedback_sign=-1).step(opposite, batch).total.backward()
    difference = model.teacher.heads["classes"].weight.grad - opposite.teacher.heads["classes"].weight.grad
    torch.testing.assert_close(difference, 2 * losses.parts["feedback"] * slope)


def test_the_student_waits():
    method = MPL(student_wait=0.5)
    model, batch = model_and_batch(method, step=4)
    losses = method.step(model, batch)
    losses.total.backward()
    assert touched(model) == TEACHER
    assert all(weight.grad is None for weight in model.network.parameters())  # no weight decay either
    assert losses.parts["student"] == losses.parts["feedback"] == 0
    model, batch = model_and_batch(method, step=5)
    method.step(model, batch).total.backward()
    assert touched(model) == TEACHER | STUDENT


def test_the_baseline_is_subtracted_and_follows():
    plain, centered = MPL(), MPL(baseline=0.9)
    model, batch = model_and_batch(centered)
    model.baseline.fill_(0.5)
    losses = centered.step(model, batch)
    feedback = losses.parts["feedback"].item()
    assert model.baseline.item() == pytest.approx(0.9 * 0.5 + 0.1 * feedback)
    other, _ = model_and_batch(plain)
    reference = plain.step(other, batch)
    logits = other.teacher.logits(batch.views["strong"])
    own = F.cross_entropy(logits, logits.argmax(dim=1)).item()
    assert (reference.total - losses.total).item() == pytest.approx(0.5 * own)
    assert other.baseline == 0


def test_no_row_is_confident():
    method = MPL(confidence=0.9999)
    model, batch = model_and_batch(method)
    assert method.step(model, batch).parts["consistency"] == 0


def test_the_average_follows_the_student_alone():
    method = MPL(ema=0.5)
    model, batch = model_and_batch(method)
    with torch.no_grad():
        model.network.heads["classes"].weight.fill_(2.0)
        model.teacher.heads["classes"].weight.fill_(7.0)
    method.after_step(model, batch)  # the first update copies
    assert (model.predictor.heads["classes"].weight == 2).all()


def test_settings_out_of_range_are_refused():
    for name in ("confidence", "ramp", "smoothing", "student_wait", "baseline", "ema"):
        with pytest.raises(ValueError, match=f"method.{name} must be at least 0 and below 1, got 1.0"):
            replace(MPL(), **{name: 1.0})
    for name in ("temperature", "trial_rate"):
        with pytest.raises(ValueError, match=f"method.{name} must be positive"):
            replace(MPL(), **{name: 0.0})
    with pytest.raises(ValueError, match="feedback_sign must be 1 or -1, got 0"):
        MPL(feedback_sign=0)
    with pytest.raises(ValueError, match="consistency_weight must be at least 0"):
        MPL(consistency_weight=-1.0)
