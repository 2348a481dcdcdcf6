"""A stranger's run folder: what is in it makes no command read, show, fill or wait for anything elsewhere."""

import json
import os
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import ropaws
from ropaws.cli.main import main
from ropaws.embedding.feature_cache import FeatureStore
from ropaws.report.run_files import RunFiles
from ropaws.report.run_page import render
from ropaws.run.config import read_config, recorded
from ropaws.run.run import BATCH, Run
from tests import tiny
from tests.photos import fails, train_on_photos

SECRET = "5da3e1c2"
READ = {  # file: a command that needs it
    "config.json": ("predict", "RUN", "IMAGE", "--out", "OUT"),
    "data.json": ("predict", "RUN", "IMAGE", "--out", "OUT"),
    "model.safetensors": ("predict", "RUN", "IMAGE", "--out", "OUT"),
    "support.safetensors": ("predict", "RUN", "IMAGE", "--out", "OUT"),
    "checkpoint.pt": ("train", "--resume", "RUN", "--no-report"),
    "environment.json": ("train", "--resume", "RUN", "--no-report"),
}
SHOWN = ("config.json", "data.json", "environment.json", "evaluation.json", "gallery.json", "metrics.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers")
    run = ropaws.train(tiny.config(tiny.write_data(folder / "data.npz"), steps=4), folder / "run")
    main(["report", str(run)])
    (run / "checkpoint.previous.pt").replace(run / "checkpoint.pt")
    Image.fromarray(tiny.draw(0, np.random.default_rng(0))).save(folder / "image.png")
    return run


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


@contextmanager
def within(seconds):
    """A test that hangs fails."""

    def stop(*_):
        raise AssertionError(f"not done after {seconds} seconds")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def words_of(name, run, tmp_path, whole):
    named = {"RUN": run, "IMAGE": whole.parent / "image.png", "OUT": tmp_path / "out.csv"}
    return [named.get(word, word) for word in READ[name]]


def linked(path, tmp_path):
    """The file is elsewhere, with a secret in it; a link to it is in its place."""
    place = tmp_path / "elsewhere"
    place.mkdir(exist_ok=True)
    path.rename(place / path.name)
    path.symlink_to(place / path.name)
    return place / path.name


# Links


@pytest.mark.parametrize("name", READ)
def test_a_link_is_not_read(run, whole, tmp_path, capsys, name):
    linked(run / name, tmp_path)
    assert "is a symbolic link" in fails(capsys, *words_of(name, run, tmp_path, whole))


@pytest.mark.parametrize("name", SHOWN)
def test_a_page_shows_nothing_that_a_link_points_to(run, whole, tmp_path, name):
    secret = linked(run / name, tmp_path)
    if name == "metrics.jsonl":
        secret.write_text(json.dumps({"step": 1, "loss": 0.1, SECRET: 1}) + "\n")
    else:
        secret.write_text(
            json.dumps({**json.loads(secret.read_text()), "secret": SECRET, "choices": [SECRET]})
        )
    main(["report", str(run), "--out", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    assert SECRET not in text
    assert f"{name} is a symbolic link" in text
    main(["compare", str(whole), str(run), "--out", str(tmp_path / "both.html")])
    assert SECRET not in (tmp_path / "both.html").read_text()


def test_a_linked_baseline_is_not_shown_unless_it_is_named(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"method": {"name": "supervised"}}')
    (other / "evaluation.json").write_text('{"accuracy": 0.1234}')
    (run / "supervised").symlink_to(other)
    assert RunFiles(run).supervised is None
    assert "12.3" not in render(RunFiles(run))
    assert RunFiles(run, other).supervised == {"accuracy": 0.1234}


def test_linked_kept_outputs_are_computed_again(run, tmp_path, capsys):
    linked(run / "embeddings.safetensors", tmp_path)
    assert "is a symbolic link" in fails(capsys, "evaluate", run)  # they would be written through the link


def test_a_snapshot_behind_a_link_is_not_loaded(run, tmp_path):
    (run / "snapshots").mkdir()
    linked(run / "model.safetensors", tmp_path).rename(tmp_path / "step-0000002.safetensors")
    (run / "snapshots" / "step-0000002.safetensors").symlink_to(tmp_path / "step-0000002.safetensors")
    with pytest.raises(OSError, match="is a symbolic link"):
        _ = Run(run).at_snapshot(run / "snapshots" / "step-0000002.safetensors").model


# Files that are none


@pytest.mark.parametrize("name", [*READ, "embeddings.safetensors", "evaluation.json", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_are_read(run, whole, tmp_path, capsys, name, kind):
    (run / name).unlink()
    if kind == "pipe":
        os.mkfifo(run / name)
    elif kind == "device":
        (run / name).symlink_to("/dev/zero")
    else:
        (run / name).mkdir()
    with within(60):
        main(["report", str(run), "--out", str(tmp_path / "page.html")])
        if name in READ:
            fails(capsys, *words_of(name, run, tmp_path, whole))


@pytest.mark.parametrize("name", ["image.png", "table.csv", "data.npz", "weights.pth", "weights.safetensors"])
def test_a_pipe_among_a_persons_files_is_refused(whole, tmp_path, capsys, name):
    os.mkfifo(tmp_path / name)
    (tmp_path / "good.png").write_bytes((whole.parent / "image.png").read_bytes())
    if name.startswith("weights"):
        words = ["embed", tmp_path / "good.png", "--init", tmp_path / name, "--backbone", "small",
                 "--out", tmp_path / "out.npz"]  # fmt: skip
    else:
        words = ["predict", whole, tmp_path / name, "--out", tmp_path / "out.csv"]
    with within(60):
        assert name in fails(capsys, *words)


def test_a_pipe_in_a_folder_of_images_is_listed_as_unreadable(whole, tmp_path):
    (tmp_path / "pool").mkdir()
    shutil.copy(whole.parent / "image.png", tmp_path / "pool")
    os.mkfifo(tmp_path / "pool" / "pipe.png")
    (tmp_path / "pool" / "zero.png").symlink_to("/dev/zero")
    with within(60):
        main(["predict", str(whole), str(tmp_path / "pool"), "--out", str(tmp_path / "out.csv")])
    unreadable = dict(json.loads((tmp_path / "out.csv.json").read_text())["unreadable"])
    reasons = {Path(path).name: reason for path, reason in unreadable.items()}
    assert "a pipe" in reasons["pipe.png"]
    assert "a device" in reasons["zero.png"]


# Places that a config names


def changed_config(run, **parts):
    config = read_config(run / "config.json")
    changed = {name: replace(getattr(config, name), **values) for name, values in parts.items()}
    (run / "config.json").write_text(json.dumps(recorded(replace(config, **changed), run)))


def test_places_that_a_config_names_are_neither_created_nor_filled(run, tmp_path, monkeypatch):
    places = {"cache": tmp_path / "cache", "feature_cache": tmp_path / "features", "root": tmp_path / "root"}
    for name in ("cache", "feature_cache"):
        changed_config(run, data={name: places[name]})
    changed_config(run, data={"root": places["root"]}, train={"log": ("wandb",)})
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: pytest.fail("a download"))
    (run / "embeddings.safetensors").unlink()
    main(["evaluate", str(run)])
    main(["evaluate", str(run), "--only", "supervised"])
    main(["finetune", str(run), "--rates", "0.1", "--epochs", "1"])
    assert not any(place.exists() for place in places.values())
    assert read_config(run / "supervised" / "config.json").train.log == ()


def test_a_strangers_unfinished_baseline_is_not_resumed_with_its_own_places(run, tmp_path, capsys):
    main(["evaluate", str(run), "--only", "supervised"])
    (run / "supervised" / "model.safetensors").unlink()
    changed_config(run / "supervised", train={"log": ("wandb",)})
    assert "other settings" in fails(capsys, "evaluate", run, "--only", "supervised")
    changed_config(run / "supervised", train={"log": ()})
    main(["evaluate", str(run), "--only", "supervised"])


def test_a_linked_cache_of_features_is_not_cleared(tmp_path):
    """Files there that are damaged are removed: they must be the cache's own."""
    precious = tmp_path / "models"
    precious.mkdir()
    (precious / "mine.safetensors").write_bytes(b"precious")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ("0" * 32)).symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"):
        FeatureStore(tmp_path / "cache", "0" * 32, (1, 8), 1e9, print).find(np.zeros((1, 16), np.uint8))
    assert (precious / "mine.safetensors").read_bytes() == b"precious"


@pytest.fixture(scope="module")
def with_tests(tmp_path_factory):
    return train_on_photos(tmp_path_factory.mktemp("tests"))


def test_test_images_of_others_need_the_persons_word(with_tests, tmp_path, capsys):
    """A run that names another folder for its test images must not show them."""
    run, photos = with_tests
    run = shutil.copytree(run, tmp_path / "run")
    private = shutil.copytree(photos / "test", tmp_path / "private")
    Image.new("RGB", (36, 36), "red").save(private / "rows" / "0.png")
    changed_config(run, data={"test": private})
    for name in ("embeddings.safetensors", "evaluation.json", "gallery.json", "report.html"):
        (run / name).unlink()
    assert "--test" in fails(capsys, "evaluate", run)
    main(["report", str(run)])
    assert not (run / "gallery.json").exists()
    main(["evaluate", str(run), "--test", str(private)])
    assert (run / "gallery.json").exists()


def test_test_images_that_were_trained_with_need_no_word(with_tests, tmp_path):
    run = shutil.copytree(with_tests[0], tmp_path / "run")
    (run / "embeddings.safetensors").unlink()
    main(["evaluate", str(run), "--only", "soft-nn"])
    assert (run / "embeddings.safetensors").exists()  # embedded again


@pytest.mark.parametrize("device", ["meta", "hpu", "privateuseone", "mkldnn", "cuda:99", "", "\0"])
def test_a_device_must_be_one_that_computes(run, whole, tmp_path, capsys, device):
    changed_config(run, train={"device": device})
    said = fails(capsys, "predict", run, whole.parent / "image.png", "--out", tmp_path / "out.csv")
    assert "cannot be used here" in said


# Weights


def test_a_network_that_the_weights_cannot_fill_is_not_built(run, capsys, whole, tmp_path):
    changed_config(run, model={"backbone": "wrn-28-30"})
    with within(60):
        said = fails(capsys, "predict", run, whole.parent / "image.png", "--out", tmp_path / "out.csv")
    assert "names a network of" in said


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("ending", ["running_var", "running_mean", "weight"])
def test_weights_and_statistics_must_be_finite(run, whole, tmp_path, capsys, value, ending):
    state = load_file(run / "model.safetensors")
    name = next(name for name in state if name.endswith(ending))
    state[name].view(-1)[0] = value
    save_file(state, run / "model.safetensors")
    said = fails(capsys, "predict", run, whole.parent / "image.png", "--out", tmp_path / "out.csv")
    assert "not finite" in said
    assert not (tmp_path / "out.csv").exists()


def test_large_images_are_looked_at_a_few_at_a_time(run):
    assert Run(run).batch_of() == BATCH
    changed_config(run, data={"image_size": 4096})
    assert Run(run).batch_of() == 2
    assert Run(run).batch_of(torch.zeros(1, 3, 256, 256)) == BATCH
