"""A disk that takes no more: one line that names the file, exit code 2, and every file as it was."""

import json
import resource

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

import ropaws
from ropaws.cli.main import main
from tests import tiny
from tests.photos import fails

COMMANDS = {
    "evaluate": ("evaluate", "RUN"),
    "report": ("report", "RUN"),
    "resume": ("train", "--resume", "RUN", "--no-report"),
    "predict": ("predict", "RUN", "IMAGE", "--out", "OUT"),
    "finetune": ("finetune", "RUN", "--rates", "0.1", "--epochs", "1"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    run = ropaws.train(tiny.config(tiny.write_data(folder / "data.npz"), steps=2), folder / "run")
    main(["report", str(run)])
    (run / "embeddings.safetensors").unlink()
    Image.fromarray(tiny.draw(0, np.random.default_rng(0))).save(folder / "image.png")
    return run


@pytest.mark.parametrize(("command", "most"), [(name, 60) for name in COMMANDS] + [("resume", 5000)])
def test_a_full_disk_is_one_line_and_loses_nothing(whole, tmp_path, capsys, command, most):
    """No file may grow beyond so many bytes, as if the disk ended there."""
    run = tiny.copy(whole, tmp_path / "run")
    named = {"RUN": run, "IMAGE": whole.parent / "image.png", "OUT": tmp_path / "out.csv"}
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        last = fails(capsys, *(named.get(word, word) for word in COMMANDS[command]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert last.startswith("ropaws: ")
    assert str(tmp_path) in last  # says which file
    for path in run.glob("*.json"):
        json.loads(path.read_text())
    for path in run.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.keys()
    assert not list(tmp_path.rglob("*.tmp"))
    assert not (tmp_path / "out.csv").exists()
