"""Self-training: its loss, where the teacher comes from, and that it stays as it is."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import ropaws
from ropaws.embedding.backbones import PRETRAINED
from ropaws.methods.cross_entropy import CrossEntropy
from ropaws.methods.self_training import SelfTraining
from ropaws.run.config import with_method
from tests import oracles, tiny
from tests.methods.one_step import make_batch, make_model, touched
from tests.training.test_train import assert_same_run

AVERAGE, TEACHER = "average.module.", "teacher.network."


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("data") / "data.npz")


def settings(data, method, init=None, **model):
    config = with_method(tiny.config(data, steps=3), method)
    return replace(config, model=replace(config.model, init=init, **model))


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):
    run = ropaws.train(settings(data, CrossEntropy()), tmp_path_factory.mktemp("teacher") / "run")
    return run / "model.safetensors"


def model_and_batch(method):
    """A teacher that knows other weights than the student."""
    model = make_model(method, scale=1.5)
    with torch.no_grad():
        model.teacher.network.heads["classes"].weight.mul_(-0.7)
    return model, make_batch(("weak",), dims=model.encoder.feature_dims)


@pytest.mark.parametrize(("share", "temperature"), [(0.7, 1.0), (0.2, 2.5), (0.0, 1.0), (1.0, 1.0)])
def test_the_loss(share, temperature):
    method = SelfTraining(distillation_share=share, temperature=temperature)
    model, batch = model_and_batch(method)
    rows = torch.cat([batch.labeled.images, batch.views["weak"]])
    with torch.no_grad():
        student, taught = (
            net.heads["classes"](rows).tolist() for net in (model.network, model.teacher.network)
        )
    known = oracles.labeled_loss(student[:6], batch.labeled.classes.tolist())
    distilled = oracles.distilled(taught, student, temperature)
    assert distilled > 0.01
    losses = method.step(model, batch)
    assert losses.selected is None
    assert losses.total.item() == pytest.approx((1 - share) * known + share * distilled, abs=1e-12)


def test_the_teacher_is_not_trained_and_stays_in_evaluation_mode():
    model, batch = model_and_batch(SelfTraining())
    model.train()
    assert not any(module.training for module in model.teacher.modules())
    assert model.network.encoder.backbone.training
    SelfTraining().step(model, batch).total.backward()
    assert touched(model) == {"network.heads.classes.weight", "network.heads.classes.bias"}
    assert not any(weight.requires_grad for weight in model.teacher.parameters())


def test_the_teacher_is_the_averaged_network_of_the_run(data, teacher, tmp_path):
    """It is part of the saved model, the same after training as before."""
    run = ropaws.train(settings(data, SelfTraining(), teacher), tmp_path / "run")
    given, found = load_file(teacher), load_file(run / "model.safetensors")
    names = [
        n.removeprefix(AVERAGE)
        for n in given
        if n.startswith((f"{AVERAGE}encoder.backbone", f"{AVERAGE}heads"))
    ]
    assert len(names) > 10
    for name in names:
        assert torch.equal(found[TEACHER + name], given[AVERAGE + name]), name
    again = settings(data, SelfTraining(), run / "model.safetensors")  # a student may teach
    second = load_file(ropaws.train(again, tmp_path / "second") / "model.safetensors")
    assert torch.equal(second[f"{TEACHER}heads.classes.weight"], found[f"{AVERAGE}heads.classes.weight"])


@pytest.mark.parametrize("warm", [True, False])
def test_where_the_student_starts(data, teacher, tmp_path, warm):
    method = SelfTraining(warm_start=warm)
    config = settings(data, method, teacher)
    still = replace(config, optim=replace(config.optim, peak=1e-30, start=0.0, weight_decay=0.0))
    found = load_file(ropaws.train(still, tmp_path / "run") / "model.safetensors")
    given = load_file(teacher)
    name = next(n for n in found if n.startswith("network.encoder.backbone") and n.endswith("weight"))
    averaged = given[name.replace("network.", AVERAGE, 1)]
    assert torch.allclose(found[name], averaged) == warm
    assert not torch.allclose(found[name], given[name])  # of the network before averaging
    assert not torch.allclose(found["network.heads.classes.weight"], given[f"{AVERAGE}heads.classes.weight"])


@pytest.mark.parametrize("init", [None, PRETRAINED])
def test_a_run_without_a_teacher_is_refused_before_anything_is_written(data, tmp_path, init):
    model = {} if init is None else {"backbone": "efficientnet-lite0"}
    words = (
        r"self-training needs a teacher: .*such as one of cross-entropy.*give --init RUN/model\.safetensors"
    )
    with pytest.raises(ValueError, match=words):
        ropaws.train(settings(data, SelfTraining(), init, **model), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_that_cannot_teach_are_refused(data, teacher, tmp_path):
    weights = load_file(teacher)
    backbone = {n: v for n, v in weights.items() if n.startswith("network.encoder.backbone")}
    more = {**weights, f"{AVERAGE}heads.classes.weight": torch.zeros(5, 96)}
    fewer = {n: v for n, v in weights.items() if not n.startswith(f"{AVERAGE}encoder.backbone")}
    for tensors, words in (
        (backbone, "no classifier that could teach; name a run with a linear classifier"),
        (more, r"does not fit this run: heads\.classes\.weight \(has \(5, 96\), needs \(3, 96\)\)"),
        (fewer, r"does not fit this run: no encoder\.backbone"),
    ):
        save_file(tensors, tmp_path / "weights.safetensors")
        with pytest.raises(ValueError, match=words):
            ropaws.train(settings(data, SelfTraining(), tmp_path / "weights.safetensors"), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_stopped_run_resumes_without_the_file_of_its_teacher(data, teacher, tmp_path, monkeypatch):
    copied = tmp_path / "weights.safetensors"
    copied.write_bytes(teacher.read_bytes())
    config = settings(data, SelfTraining(), copied)
    config = replace(config, train=replace(config.train, checkpoint_every=1))
    whole = ropaws.train(config, tmp_path / "whole")
    real = SelfTraining.step
    with monkeypatch.context() as patch:
        patch.setattr(SelfTraining, "step", lambda *args: 1 / 0 if args[2].step == 2 else real(*args))
        with pytest.raises(ZeroDivisionError):
            ropaws.train(config, tmp_path / "part")
    copied.unlink()
    ropaws.resume(tmp_path / "part")
    assert_same_run(whole, tmp_path / "part")


def test_on_frozen_features_the_teacher_has_the_same_backbone(data, teacher, tmp_path):
    """Teacher and student are heads on the features of one network."""
    frozen = {"frozen": True, "frozen_views": 2}
    first = ropaws.train(settings(data, CrossEntropy(), teacher, **frozen), tmp_path / "teacher")
    config = settings(data, SelfTraining(), first / "model.safetensors", **frozen)
    found = load_file(ropaws.train(config, tmp_path / "student") / "model.safetensors")
    given = load_file(first / "model.safetensors")
    for name in ("encoder.projection.0.weight", "heads.classes.weight"):
        assert torch.equal(found[TEACHER + name], given[AVERAGE + name])
        assert not torch.equal(found[f"network.{name}"], found[TEACHER + name])
    for name in given:  # a run starts from the average of another one, which is what predicts there
        if name.startswith(f"{AVERAGE}encoder.backbone"):
            inside = name.removeprefix(AVERAGE)
            assert torch.equal(found[f"network.{inside}"], given[name])
            assert torch.equal(found[TEACHER + inside], given[name])


@pytest.mark.parametrize(
    "wrong", [{"distillation_share": 1.1}, {"distillation_share": -0.1}, {"temperature": 0.0}]
)
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match=rf"method\.{next(iter(wrong))} must be"):
        SelfTraining(**wrong)
