"""Every example runs as it is, and prints what its first lines promise."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from ropaws import Run
from ropaws.core.records import Batch, Support
from ropaws.embedding.backbones import ModelConfig, build_encoder
from tests.tiny import write_data

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
COMMANDS = "import json, sys; from ropaws.cli.main import main; [main(c) for c in json.loads(sys.argv[1])]"


def run_python(*arguments, cwd, scratch):
    """A new process with one thread; temporary folders are made in scratch."""
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(scratch),
    }
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def example(tmp_path):
    """Runs an example in an empty folder; returns what it printed."""
    return lambda name, *arguments: run_python(
        EXAMPLES / f"{name}.py", *arguments, cwd=tmp_path, scratch=tmp_path
    )


def percents(text):
    return [float(number) / 100 for number in re.findall(r"([\d.]+)%", text)]


def aurocs(text):
    return [float(number) for number in re.findall(r"AUROC ([\d.]+)", text)]


def test_ropaws_loss_learns_classes_and_what_belongs_to_none(example):
    printed = example("ropaws_loss")
    before, after = percents(printed)
    auroc_before, auroc_after = aurocs(printed)
    assert after > before + 0.03
    assert auroc_after > auroc_before + 0.02


def test_estimator_digits_compares_three_classifiers(example):
    rows = [line.split() for line in example("estimator_digits").splitlines()[1:]]
    figures = {name: (float(accuracy.rstrip("%")), float(auroc)) for name, accuracy, auroc in rows}
    assert len(figures) == 3
    ours = figures.pop("RoPAWSClassifier")
    assert all(ours[0] > accuracy and ours[1] > auroc for accuracy, auroc in figures.values())


def test_two_moons_writes_its_figure(example, tmp_path):
    printed = example("two_moons")
    paws, ropaws = percents(printed)
    assert paws < ropaws
    assert aurocs(printed)[1] > 0.95
    assert (tmp_path / "example-output/two_moons.png").stat().st_size > 10_000


def test_arrays_to_labels_labels_new_images(example, tmp_path):
    printed = example("arrays_to_labels")
    accuracy = percents(printed.split("accuracy")[1])[0]
    shapes, others = percents(printed.splitlines()[-1])
    assert accuracy > 0.45  # chance is a third
    assert shapes > others
    assert len(list(tmp_path.glob("*/shapes/model.safetensors"))) == 1  # in a temporary folder


def test_analyze_run_finds_the_wrong_labels(example, tmp_path):
    printed = example("analyze_run", "out")
    assert percents(printed)[0] > 0.5  # chance is a third
    suspected = re.findall(r"suspected label error: labeled.npz#(\d+) ", printed)
    assert len({"3", "11", "23", "31", "43", "51"} & set(suspected)) >= 3
    assert printed.count("label next: unlabeled-0.npz#") == 3
    assert "<html" in (tmp_path / "out/textures/report.html").read_text()


def test_compare_runs_prints_a_row_for_each_method(example, tmp_path):
    head, *rows, _ = [line.split() for line in example("compare_runs", "out").splitlines()]
    assert [row[0] for row in rows] == ["paws", "ropaws"]
    assert all(float(row[head.index("accuracy")]) > 30 for row in rows)  # chance is 20
    assert all((tmp_path / "out" / row[0] / "evaluation.json").is_file() for row in rows)


def test_own_method_trains_from_python(example, tmp_path):
    printed = example("own_method", "out")
    assert percents(printed)[0] > 0.4  # chance is 0.2
    assert (tmp_path / "out/own-method/model.safetensors").is_file()
    assert '"own_method:OwnMethod"' in (tmp_path / "out/own-method/config.json").read_text()


def test_own_method_works_on_the_command_line(tmp_path):
    run, data, table = tmp_path / "run", tmp_path / "data.npz", tmp_path / "labels.csv"
    method = ["--method", "own_method:OwnMethod"]
    small = ["--data.source", str(write_data(data)), "--data.labels-per-class", "2", "--augment.size", "12"]
    small += ["--support.images-per-class", "2", "--train.steps", "3", "--train.batch", "8"]
    setting = ["--method.decay", "0.5"]
    train = ["train", "--recipe", "demo", *method, *setting, *small, "--no-report", "--out", str(run)]
    run_commands([train], tmp_path)
    images = tmp_path / "images.npz"
    with np.load(data) as arrays:
        np.savez(images, images=arrays["test_images"])
    # Another process, which has not imported the method yet.
    printed = run_commands(
        [
            ["evaluate", str(run), *method],
            ["predict", str(run), str(images), *method, "--out", str(table)],
            ["report", str(run), *method],
        ],
        tmp_path,
    )
    assert "accuracy" in printed
    assert len(table.read_text().splitlines()) == 1 + 20
    assert "own_method:OwnMethod" in (run / "report.html").read_text()


def test_label_folder_prints_a_line_for_each_image(example, trained, tmp_path):
    run, photos = trained
    model = Run(run).export(tmp_path / "model.onnx").path
    for path in (photos / "pool").glob("rows-*.png"):
        with Image.open(path) as image:
            image.save(tmp_path / f"{path.stem}.jpg")
    lines = example("label_folder", model, tmp_path).splitlines()
    assert len(lines) == 8
    assert all(len(line.split()) == 5 for line in lines)


def run_commands(commands, scratch):
    return run_python("-c", COMMANDS, json.dumps(commands), cwd=EXAMPLES, scratch=scratch)


def test_own_method_is_short():
    tree = ast.parse((EXAMPLES / "own_method.py").read_text())
    (method,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert method.end_lineno - method.lineno < 55
    lines = (EXAMPLES / "own_method.py").read_text().splitlines()
    assert len(lines) < 100


@pytest.fixture
def own_method(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import own_method

    yield own_method.OwnMethod(confidence=0.4, decay=0.5)
    del sys.modules["own_method"]


@pytest.fixture
def model(own_method):
    torch.manual_seed(0)
    encoder = build_encoder(ModelConfig(backbone="small-8"), channels=1)
    return own_method.build(encoder, classes=3, pool=8).double()


@pytest.fixture
def batch():
    random = torch.Generator().manual_seed(1)
    images = torch.randn(3, 8, 1, 12, 12, generator=random, dtype=torch.float64)
    classes = torch.tensor([0, 0, 1, 1, 2, 2, 0, 1])
    labeled = Support(images[0], F.one_hot(classes).double(), torch.arange(8), classes)
    return Batch(0, 1, {"weak": images[1], "strong": images[2]}, torch.arange(8), labeled)


def test_own_method_is_fixmatch(own_method, model, batch):
    """Loss and gradient are those of a loop over the rows in which the guesses are plain numbers."""
    losses = own_method.step(model, batch)
    losses.total.backward()
    gradient = model["head"].weight.grad.clone()
    model.zero_grad()

    images = torch.cat([batch.labeled.images, *batch.views.values()])
    probs = model["head"](model["encoder"].features(images)).softmax(dim=1)
    known, weak, strong = probs[:8], probs[8:16].tolist(), probs[16:]
    expected, confident = 0, 0
    for row in range(8):
        expected = expected - known[row, batch.labeled.classes[row]].log() / 8
        if max(weak[row]) >= 0.4:
            expected = expected - strong[row, int(np.argmax(weak[row]))].log() / 8
            confident += 1
    assert 0 < confident < 8
    expected.backward()
    torch.testing.assert_close(losses.total, expected)
    torch.testing.assert_close(model["head"].weight.grad, gradient)
    assert float(losses.parts["confident"]) == confident / 8


def test_own_method_predicts_with_the_average(own_method, model, batch):
    weights = []
    for _ in range(2):
        with torch.no_grad():
            model["head"].weight.normal_()
        own_method.after_step(model, batch)
        weights.append(model["head"].weight.detach().clone())
    expected = torch.lerp(weights[1], weights[0], 2 / 11)  # the decay of the second update, warming up
    torch.testing.assert_close(model["slow_head"].module.weight, expected)


def test_the_table_of_examples_is_complete():
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == NAMES
    source = Path(__file__).read_text()
    assert all(f'example("{name}"' in source for name in NAMES), "an example is not tested"
    for name in NAMES:
        docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
        assert "Expect" in docstring
