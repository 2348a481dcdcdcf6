"""A run folder as one object: lazy, and with the same answers as the functions."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import get_origin, get_type_hints

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ropaws
from ropaws import RoPAWS, Run
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.run import run as run_module
from ropaws.run.predict import Prediction
from ropaws.run.results import Evaluation, LabelError, PoolFigures, PropagationRow
from ropaws.run.suggest import Suggestion
from tests import tiny
from tests.photos import fails

IMAGE = np.zeros((12, 12), np.uint8)
READERS = ("load_model", "load_corpus", "load_support", "read_outputs", "read_facts")


@pytest.fixture
def folder(tiny_run, tmp_path):
    return tiny.copy(tiny_run, tmp_path / "run")


@pytest.fixture
def reads(monkeypatch):
    """Names of the readers that were called."""
    called = []
    for name in READERS:
        real = getattr(run_module, name)

        def call(*args, name=name, real=real, **kwargs):
            called.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(run_module, name, call)
    return called


def test_nothing_is_read_before_it_is_asked_for(folder, reads):
    ropaws.evaluate(folder, only=["soft-nn"])  # leaves its outputs in the folder
    reads.clear()
    run = Run(folder)
    assert run.config.train.steps == 6
    assert isinstance(run.method, RoPAWS)
    assert reads == []
    assert run.class_names == ("rows", "columns", "block")
    assert run.class_names == run.facts.class_names
    assert reads == ["read_facts"]
    assert run.support.embeddings.shape == (6, 16)
    assert run.kernel.temperature == 0.1
    assert 0 < run.threshold < 1
    assert reads == ["read_facts", "load_support"]
    assert len(run.pool.positions) == 34
    assert len(run.test.labels) == 20
    assert reads == ["read_facts", "load_support", "read_outputs"]
    assert not run.model.training
    assert run.model is run.model
    assert reads == ["read_facts", "load_support", "read_outputs", "load_model"]
    assert run.corpus is run.corpus
    assert sorted(reads) == sorted(READERS)


def test_class_names_need_neither_model_nor_images(folder):
    for name in ("model.safetensors", "support.safetensors", "checkpoint.pt"):
        (folder / name).unlink()
    run = Run(folder)
    assert run.class_names == ("rows", "columns", "block")
    with pytest.raises(FileNotFoundError, match=r"no trained model at .*train --resume"):
        _ = run.model
    (folder / "data.json").unlink()
    assert Run(folder).config == run.config
    with pytest.raises(FileNotFoundError, match=r"data\.json"):
        _ = Run(folder).facts


def test_a_run_is_a_path(folder):
    run = Run(str(folder))
    assert os.fspath(run) == str(folder)
    assert Path(run) == run.path == folder
    assert repr(run) == f"Run({str(folder)!r})"
    assert Run(run).path == folder
    assert (Path(run) / "config.json").is_file()


def test_wrong_arguments_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match="pool must be at least 0"):
        Run(folder, pool=-1)
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        Run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="device"):
        Run(folder, device="nonsense")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        Run(folder)


@pytest.mark.parametrize(
    "change", [lambda config: config.pop("format"), lambda config: config.update(format=1)]
)
@pytest.mark.parametrize("command", ["export RUN", "evaluate RUN", "suggest RUN", "train --resume RUN"])
def test_a_folder_of_another_format_is_refused_in_one_line(folder, capsys, change, command):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    config["data"]["picture_size"] = 8  # not what the error is about
    (folder / "config.json").write_text(json.dumps(config))
    before = sorted(folder.iterdir())
    assert fails(capsys, *command.replace("RUN", str(folder)).split()) == (
        f"ropaws: {folder / 'config.json'}: this run was made by another version of ropaws;"
        " train again with this version"
    )
    assert sorted(folder.iterdir()) == before


def test_kept_outputs_have_the_codes_of_core_labels(folder):
    """In memory and on disk: -1 in the .npz is unlabeled in training and out-of-class in testing."""
    run = Run(folder)
    _ = run.test
    kept = load_file(folder / "embeddings.safetensors")
    assert set(kept["test.labels"].tolist()) == {0, 1, 2, OUT_OF_CLASS}
    assert UNLABELED in kept["pool.truth"]
    assert OUT_OF_CLASS not in kept["pool.truth"]
    assert torch.equal(kept["test.labels"], run.corpus.test_labels)


def test_the_pool_may_be_a_sample(folder):
    some, everything = Run(folder, pool=10).pool, Run(folder, pool=0).pool
    assert (len(some.positions), some.size) == (10, 34)
    assert (len(everything.positions), everything.size) == (34, 34)
    rows = torch.isin(everything.positions, some.positions)
    torch.testing.assert_close(everything.outputs.probs[rows], some.outputs.probs)
    assert some.name(0) == f"training image {int(some.positions[0])}"


def test_outputs_of_any_images(folder):
    run = Run(folder)
    images = run.corpus.test_images
    chosen = torch.tensor([3, 0, 7])
    embedding = run.embed(images)
    assert embedding.shape == (20, 16)
    torch.testing.assert_close(embedding.norm(dim=1), torch.ones(20))
    torch.testing.assert_close(run.embed(images, chosen), embedding[chosen])
    outputs = run.outputs(images, chosen)
    torch.testing.assert_close(outputs.embedding, embedding[chosen])
    torch.testing.assert_close(outputs.probs.sum(dim=1), torch.ones(3))
    expected = run.method.classify(outputs.embedding, run.support)
    for value, same in zip(outputs, expected, strict=True):
        torch.testing.assert_close(value, same)
    nothing = run.outputs(images, chosen[:0])
    assert [tuple(value.shape) for value in nothing] == [(0, 16), (0, 3), (0,), (0,)]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("backbone.norm.running_var", lambda v: v * math.nan, "has weights that are not finite"),
        ("backbone.norm.weight", lambda v: v * math.nan, "has weights that are not finite"),
        ("backbone.norm.weight", torch.Tensor.half, r"is torch.float16 and must be torch.float32"),
        ("backbone.norm.weight", lambda v: v[1:].clone(), "size mismatch for backbone.norm.weight"),
    ],
)
def test_a_damaged_network_is_named(folder, name, change, words):
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, name: change(weights[name])}, folder / "model.safetensors")
    for question in (lambda: ropaws.evaluate(folder), lambda: ropaws.predict(folder, [IMAGE])):
        with pytest.raises(ValueError, match=words):
            question()


def test_images_in_memory_are_not_read_again(folder, reads):
    corpus = Run(folder).corpus
    reads.clear()
    run = Run(folder, corpus=corpus)
    assert len(run.pool.positions) == 34
    assert "load_corpus" not in reads


def test_methods_answer_like_the_functions(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    run = Run(folder)
    assert run.evaluate() == ropaws.evaluate(other)
    assert run.evaluate(only=["labels"]) == ropaws.evaluate(other, only=["labels"])
    assert run.suggest(5) == ropaws.suggest(other, n=5)
    random = np.random.default_rng(0)
    images = [tiny.draw(label, random) for label in (0, 1, 2, -1)]
    assert run.predict(images) == ropaws.predict(other, images)
    assert run.predict(images, threshold=0.3, propagate=True) == ropaws.predict(
        other, images, threshold=0.3, propagate=True
    )
    page = run.report()
    assert page == folder / "report.html"
    assert "<h2>Calibration</h2>" in page.read_text()
    elsewhere = run.report(tmp_path / "page.html")
    assert elsewhere == tmp_path / "page.html"
    assert elsewhere.read_text() == page.read_text()


def test_functions_take_a_run_too(folder):
    run = Run(folder)
    assert ropaws.evaluate(run, only=["soft-nn"]) == run.evaluate(only=["soft-nn"])
    assert ropaws.suggest(run, n=2) == run.suggest(2)
    pixels = tiny.draw(1, np.random.default_rng(0))
    assert ropaws.predict(run, [pixels]) == run.predict([pixels])


def test_a_report_evaluates_what_was_not(folder):
    assert not (folder / "evaluation.json").exists()
    Run(folder).report()
    found = json.loads((folder / "evaluation.json").read_text())
    assert {"accuracy", "suggestions"} <= found.keys()


def test_results_have_the_fields_that_their_types_say(folder):
    run = Run(folder)
    found = run.evaluate()
    assert found.keys() <= get_type_hints(Evaluation).keys()
    assert found["pool"].keys() <= get_type_hints(PoolFigures).keys()
    for row in found["propagation"]:
        assert row.keys() <= get_type_hints(PropagationRow).keys()
    for item in found["label_errors"]:
        assert item.keys() == get_type_hints(LabelError).keys()
    suggestions = run.suggest(3)
    for item in suggestions:
        assert item.keys() == get_type_hints(Suggestion).keys()
        for name, kind in get_type_hints(Suggestion).items():
            assert type(item[name]) is kind
    (prediction,) = run.predict([tiny.draw(0, np.random.default_rng(0))])
    assert isinstance(prediction, Prediction)
    for name, kind in get_type_hints(Prediction).items():
        assert isinstance(getattr(prediction, name), tuple if get_origin(kind) is tuple else kind)
    assert len(prediction.probabilities) == 3
