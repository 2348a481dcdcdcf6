"""Exported files say what the run says, hold all that is needed, and are not written where they would not."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import ropaws
from ropaws import RoPAWS, Run
from ropaws.core.optimizers import OptimConfig
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.methods import METHODS, FixMatch
from ropaws.run import export_graph, export_model
from ropaws.run import export_graph as onnx_files
from ropaws.run.config import with_method
from ropaws.run.export_graph import OUTPUTS, ExportedModel, OnnxModel, record
from ropaws.run.export_model import Samples
from ropaws.run.predict import Predictor
from tests import tiny
from tests.photos import fails

TOLERANCE = 1e-3
EXAMPLE = Path(__file__).parent.parent.parent / "examples/label_folder.py"
KEYS = {
    "ropaws", "method", "class_names", "threshold", "preprocessing", "outputs", "labeled_names",
    "labeled_classes", "verification",
}  # fmt: skip


ADAM = OptimConfig(name="adam", peak=1e-3, start=1e-3, end=0.0, warmup=0, weight_decay=0.0)


def on_features(config, **model):
    """The run on frozen features: prior of the pool, regression, calibration."""
    settings = ModelConfig(frozen=True, frozen_views=2, head="linear", projection_dims=8, **model)
    return replace(config, model=settings, optim=ADAM, method=RoPAWS(prior="pool", sharpen_temperature=0.5))


def frozen_run(folder):
    torch.manual_seed(0)
    backbone = build_encoder(ModelConfig(backbone="small-8"), channels=1).backbone
    save_file({k: v.contiguous() for k, v in backbone.state_dict().items()}, folder / "small.safetensors")
    config = tiny.config(tiny.write_data(folder / "data.npz"))
    config = on_features(config, backbone="small-8", init=folder / "small.safetensors")
    return ropaws.train(config, folder / "run")


def features_run(folder):
    """On feature arrays of a person's own; the last kind has no label."""
    random = np.random.default_rng(0)
    kinds = np.arange(40) % 4
    features = random.standard_normal((40, 12)) + 3 * np.eye(12)[kinds]
    np.savez(folder / "data.npz", features=features, labels=np.array(["one", "two", "three", ""])[kinds])
    return ropaws.train(on_features(tiny.config(folder / "data.npz"), backbone="features"), folder / "run")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, trained, tiny_run):
    """By kind of prediction; each in full precision."""
    folder = tmp_path_factory.mktemp("ship")
    for name in ("classifier", "frozen", "features"):
        (folder / name).mkdir()
    config = tiny.config(tiny.write_data(folder / "data.npz"))
    classifier = ropaws.train(with_method(config, FixMatch()), folder / "classifier/run")
    paths = {
        "soft-nn": trained[0],
        "gray": tiny_run,
        "classifier": classifier,
        "frozen": frozen_run(folder / "frozen"),
        "features": features_run(folder / "features"),
    }
    return {name: Run(path).in_full_precision() for name, path in paths.items()}


@pytest.fixture(scope="module")
def files(runs, tmp_path_factory):
    """Exports a run as ONNX, once."""
    folder, made = tmp_path_factory.mktemp("onnx"), {}

    def file_of(name):
        if name not in made:
            made[name] = runs[name].export(folder / f"{name}.onnx")
        return made[name]

    return file_of


def inputs_of(run, count):
    random = np.random.default_rng(1)
    if run.facts.feature_dims:
        return random.standard_normal((count, run.facts.feature_dims)).astype(np.float32)
    size = run.config.data.image_size
    return random.integers(0, 256, (count, 3, size, size), dtype=np.uint8)


def assert_same(answers, run, inputs):
    """As `ropaws predict` on the same inputs."""
    rows = inputs if run.facts.feature_dims else inputs.transpose(0, 2, 3, 1)
    expected = run.predict(rows if run.facts.feature_dims else list(rows))
    probs, in_domain, nearest, similarity = answers
    names = run.facts.labeled_names or tuple(map(str, run.facts.split.indices.tolist()))
    for row, item in enumerate(expected):
        assert probs[row] == pytest.approx(item.probabilities, abs=TOLERANCE)
        assert in_domain[row] == pytest.approx(item.in_domain, abs=TOLERANCE)
        assert similarity[row] == pytest.approx(item.similarity, abs=TOLERANCE)
        assert names[nearest[row]] == item.nearest


@pytest.mark.parametrize("name", ["soft-nn", "gray", "classifier", "frozen", "features"])
def test_an_onnx_file_says_what_the_run_says(files, runs, name):
    import onnxruntime

    made, run = files(name), runs[name]
    session = onnxruntime.InferenceSession(made.path.read_bytes(), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape[0] == "batch"
    for count in (1, 3, 0):
        inputs = inputs_of(run, count)
        answers = session.run(list(OUTPUTS), {session.get_inputs()[0].name: inputs})
        assert [len(values) for values in answers] == [count] * 4
        if count:
            assert_same(answers, run, inputs)
    facts = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}
    assert facts == json.loads(json.dumps(made.metadata))
    assert set(facts) == KEYS
    assert facts["class_names"] == list(run.class_names)
    assert facts["threshold"] == pytest.approx(run.threshold)
    assert facts["preprocessing"]["shape"][1:] == session.get_inputs()[0].shape[1:]
    assert len(facts["labeled_names"]) == len(facts["labeled_classes"]) == len(run.support.labels)
    assert max(facts["verification"]["differences"].values()) <= facts["verification"]["tolerance"]
    assert made.bytes == made.path.stat().st_size


def test_a_file_tells_nothing_of_the_machine(files, runs, tmp_path):
    made = files("gray")
    torch_file = runs["gray"].export(tmp_path / "model.pt2", format="torch", names=False)
    assert torch_file.metadata["labeled_names"] == []
    for content in (made.path.read_bytes(), torch_file.path.read_bytes()):
        for word in (b"site-packages", str(Path(ropaws.__file__).parent).encode(), b"methods/"):
            assert word not in content


def test_a_torch_file_needs_torch_alone(runs, tmp_path):
    run = runs["soft-nn"]
    made = run.export(tmp_path / "model.pt2", format="torch")
    inputs = inputs_of(run, 3)
    np.save(tmp_path / "inputs.npy", inputs)
    code = (
        "import json, sys, numpy, torch\n"
        "extra = {'ropaws.json': ''}\n"
        "network = torch.export.load(sys.argv[1] + '/model.pt2', extra_files=extra).module()\n"
        "images = torch.from_numpy(numpy.load(sys.argv[1] + '/inputs.npy'))\n"
        "for name, rows in (('three', images), ('one', images[:1])):\n"
        "    numpy.savez(f'{sys.argv[1]}/{name}.npz', *[value.numpy() for value in network(rows)])\n"
        "print(extra['ropaws.json'])\n"
        "assert 'ropaws' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(made.metadata))
    assert made.metadata["verification"]["runtime"].startswith("torch ")
    for name, rows in (("three", inputs), ("one", inputs[:1])):
        with np.load(tmp_path / f"{name}.npz") as found:
            assert_same([found[key] for key in found.files], run, rows)


def test_the_example_labels_a_folder_without_torch(files, runs, trained, tmp_path):
    """Real files, from decoding on: turned by EXIF, wide, large enough to be decoded at a fraction."""
    random = np.random.default_rng(0)
    for place, shape in enumerate([(90, 120), (121, 80), (700, 900)]):
        exif = Image.Exif()
        exif[0x0112] = 6 if place == 1 else 1
        coarse = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize(shape[::-1], Image.Resampling.BICUBIC).save(tmp_path / f"{place}.jpg", exif=exif)
    code = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0])\n"
        "assert not {'torch', 'ropaws'} & set(sys.modules), 'torch is loaded'\n"
    )
    line = [sys.executable, "-c", code, EXAMPLE, files("soft-nn").path, tmp_path]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [text.split() for text in done.stdout.splitlines()]
    for row, item in zip(rows, runs["soft-nn"].predict(tmp_path), strict=True):
        assert row[0] == item.path
        assert row[1] == ("out-of-class" if item.out_of_class else item.label)
        assert float(row[3]) == pytest.approx(item.in_domain, abs=1e-3)
        if item.out_of_class:
            assert row[2] == "-"
        else:
            assert float(row[2]) == pytest.approx(item.confidence, abs=1e-3)
        assert row[4] == item.nearest


def test_the_example_is_short():
    lines = EXAMPLE.read_text().split('"""')[2].splitlines()
    code = [line for line in lines if line and not line.startswith(("import", "from"))]
    assert len(code) <= 15


# What is refused


def test_a_file_that_does_not_say_what_the_run_says_is_not_written(runs, tmp_path, monkeypatch):
    view = ExportedModel._view
    monkeypatch.setattr(ExportedModel, "_view", lambda self, squares: 1.05 * view(self, squares))
    with pytest.raises(ValueError, match=r"does not say what .* says: \w+ is off by .* more than 0.001"):
        runs["gray"].export(tmp_path / "model.pt2", format="torch")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_replaced_unless_asked_for(runs, tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="replace it with --overwrite"):
        runs["gray"].export(path)
    assert path.read_text() == "mine"
    for arguments, words in (
        ({"path": tmp_path / "model.bin"}, "must end in .onnx, got model.bin"),
        ({"format": "tf"}, "format must be onnx or torch, got 'tf'"),
        ({"format": "torch", "int8": True}, "int8 goes with format onnx"),
        ({"threshold": 2.0}, "threshold must be a probability from 0 to 1, got 2.0"),
    ):
        with pytest.raises(ValueError, match=words):
            runs["gray"].export(**arguments)
    with pytest.raises(FileNotFoundError, match="create it first"):
        runs["gray"].export(tmp_path / "nowhere/model.onnx")


def test_a_missing_package_is_one_line(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(onnx_files.importlib.util, "find_spec", lambda name: None)
    line = fails(capsys, "export", tiny_run, "--out", tmp_path / "model.onnx")
    assert line.endswith("pip install 'ropaws[export]'")


def test_a_method_that_cannot_be_recorded_is_named(runs):
    @dataclass(frozen=True, kw_only=True)
    class Odd(RoPAWS):
        def predict(self, model, images, support):
            return super().predict(model, torch.from_numpy(images.numpy()), support)

    model = ExportedModel(runs["gray"])
    model.parts = model.parts._replace(method=Odd())
    with pytest.raises(ValueError, match=r"Odd.predict cannot be exported .* images.shape\[0\]"):
        record(model)


# int8


def test_int8_is_written_with_its_cost(runs, tmp_path, monkeypatch):
    import onnx

    monkeypatch.setattr(export_model, "MOST_COST", 1.0)
    run = runs["soft-nn"]
    made = run.export(tmp_path / "model.onnx", int8=True)
    nodes = [node.op_type for node in onnx.load(made.path).graph.node]
    assert "DequantizeLinear" in nodes
    facts = OnnxModel(made.path).metadata["int8"]
    assert facts["measured_on"] == "test images"
    assert facts["images"] == 12
    assert facts["cost"] == pytest.approx(facts["accuracy_fp32"] - facts["accuracy"])
    inputs = inputs_of(run, 3)
    plain = Predictor(run).look(torch.from_numpy(inputs)).probs.numpy()
    found = OnnxModel(made.path)(inputs)[0]
    assert 0 < np.abs(found - plain).max() < 0.3


def test_int8_that_costs_too_much_is_refused(runs, tmp_path, monkeypatch):
    """The measured cost decides: here that of a file whose convolutions were lost."""
    from onnx import numpy_helper

    def lossy(model, calibration, **_):
        assert calibration.dtype == np.uint8
        lost = type(model)()
        lost.CopyFrom(model)
        names = {node.input[1] for node in lost.graph.node if node.op_type == "Conv"}
        for weight in lost.graph.initializer:
            if weight.name in names:
                zeros = np.zeros_like(numpy_helper.to_array(weight))
                weight.CopyFrom(numpy_helper.from_array(zeros, weight.name))
        return lost

    monkeypatch.setattr(export_model, "quantize", lossy)
    with pytest.raises(ValueError, match=r"--int8 would cost too much: accuracy .* on 12 test images; the"):
        runs["soft-nn"].export(tmp_path / "model.onnx", int8=True)
    assert list(tmp_path.iterdir()) == []


def test_without_test_images_the_cost_is_the_share_of_changed_labels():
    def model(*labels):
        return lambda rows: [np.eye(4)[list(labels)], np.ones(4), np.zeros(4), np.zeros(4)]

    tried = Samples(np.zeros((4, 1)), np.full(4, -1), "pool images")
    same = export_model.compare(model(0, 1, 2, 3), model(0, 1, 2, 3), tried, 0.5)
    other = export_model.compare(model(0, 1, 2, 3), model(0, 1, 2, 2), tried, 0.5)
    assert (same["cost"], other["cost"]) == (0, 0.25)
    assert "accuracy" not in other


def test_int8_needs_convolutions(runs, tmp_path):
    with pytest.raises(ValueError, match="--int8 is for convolutions"):
        runs["features"].export(tmp_path / "model.onnx", int8=True)


# Every method


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(METHODS) - {"self-training", "opencos"}))
def test_every_method_can_be_recorded(name, tmp_path):
    config = with_method(tiny.config(tiny.write_data(tmp_path / "data.npz")), METHODS[name]())
    run = Run(ropaws.train(config, tmp_path / "run")).in_full_precision()
    graph = record(ExportedModel(run)).module()
    for count in (1, 3):
        inputs = inputs_of(run, count)
        with torch.no_grad():
            assert_same([value.numpy() for value in graph(torch.from_numpy(inputs))], run, inputs)


def test_the_tolerance_is_the_one_that_is_stated():
    assert export_model.TOLERANCE == TOLERANCE
    assert export_graph.OUTPUTS == ("probabilities", "in_domain", "nearest", "similarity")
