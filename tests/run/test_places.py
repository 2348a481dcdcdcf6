"""A run works from any working directory, and after it, or its images, were moved."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ropaws
from ropaws import Run
from ropaws.cli.main import main
from ropaws.core.files import write_json
from ropaws.embedding.backbones import PRETRAINED, ModelConfig, build_encoder
from ropaws.pool.sources import DataConfig
from ropaws.run.config import RunConfig, read_config, to_json, with_absolute_paths
from tests import tiny
from tests.photos import fails, make_photos

QUICK = ("--backbone", "small", "--train.steps", "12", "--train.precision", "fp32", "--no-report")
COMMANDS = {
    "evaluate": ("evaluate",),
    "report": ("report",),
    "suggest": ("suggest", "--n", "4"),
    "finetune": ("finetune", "--rates", "0.1", "--epochs", "1"),
    "supervised": ("evaluate", "--only", "supervised"),
}


@pytest.fixture(scope="module")
def at_home(tmp_path_factory):
    """Where a person has trained, with paths that are relative to it."""
    home = tmp_path_factory.mktemp("home")
    make_photos(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        main(["train", "--labeled", "photos/labeled", "--unlabeled", "photos/pool", "--test", "photos/test",
              "--data.cache", "decoded", "--out", "runs/mine", *QUICK])  # fmt: skip
    return home


@pytest.fixture
def elsewhere(at_home, tmp_path, monkeypatch):
    """A copy of the run, and a working directory that has nothing to do with either."""
    run = shutil.copytree(at_home / "runs/mine", tmp_path / "copy")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return run


def command(name, run):
    kind, *options = COMMANDS[name]
    main([kind, str(run), *options])


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_work_from_anywhere(elsewhere, name, capsys):
    command(name, elsewhere)
    assert "not available" not in capsys.readouterr().err


def test_predict_works_from_anywhere_also_without_the_kept_embeddings(at_home, elsewhere):
    pool = at_home / "photos/pool"
    before = ropaws.predict(elsewhere, pool)
    (elsewhere / "support.safetensors").unlink()
    main(["predict", str(elsewhere), str(pool), "--out", "labels.csv"])
    for one, other in zip(ropaws.predict(elsewhere, pool), before, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)


def test_suggestions_are_the_same_from_anywhere(at_home, elsewhere, monkeypatch):
    here = ropaws.suggest(elsewhere, n=6)
    monkeypatch.chdir(at_home)
    assert ropaws.suggest(elsewhere, n=6) == here


def test_explore_works_from_anywhere(at_home, elsewhere):
    pytest.importorskip("fastapi")
    from ropaws.explore.pool import pool_of_run

    pool = pool_of_run(Run(elsewhere, pool=0))
    assert len(pool) == 9 + 36
    assert pool.sources == (at_home / "photos/pool",)


def test_a_run_is_resumed_from_anywhere(at_home, elsewhere):
    done = load_file(elsewhere / "model.safetensors")
    (elsewhere / "model.safetensors").unlink()
    (elsewhere / "checkpoint.previous.pt").replace(elsewhere / "checkpoint.pt")
    main(["train", "--resume", str(elsewhere), "--no-report"])
    for name, value in load_file(elsewhere / "model.safetensors").items():
        torch.testing.assert_close(value, done[name], rtol=0, atol=0, equal_nan=True)


def test_a_config_is_repeated_from_anywhere(elsewhere, tmp_path):
    main(["train", str(elsewhere / "config.json"), "--out", str(tmp_path / "again"), "--no-report"])
    again, first = (load_file(run / "model.safetensors") for run in (tmp_path / "again", elsewhere))
    for name, value in again.items():
        torch.testing.assert_close(value, first[name], rtol=0, atol=0, equal_nan=True)


def test_every_path_of_the_settings_is_absolute(at_home, tmp_path, monkeypatch):
    data = json.loads((at_home / "runs/mine/config.json").read_text())["data"]
    assert data["labeled"] == str(at_home / "photos/labeled")
    assert data["unlabeled"] == [str(at_home / "photos/pool")]
    assert data["test"] == str(at_home / "photos/test")
    assert data["cache"] == str(at_home / "decoded")
    assert data["root"] == str(at_home / "data")
    monkeypatch.chdir(tmp_path)
    config = tiny.config(tiny.write_data(tmp_path / "data.npz"), steps=1)
    first = ropaws.train(config, "first")
    changed = replace(
        config,
        model=replace(config.model, init=first / "model.safetensors"),
        data=replace(config.data, source="data.npz", extra=("data.npz",), split=first / "split.txt"),
    )
    found = json.loads((ropaws.train(changed, "second") / "config.json").read_text())
    assert found["model"]["init"] == str(tmp_path / "first/model.safetensors")
    assert found["data"]["source"] == str(tmp_path / "data.npz")
    assert found["data"]["extra"] == [str(tmp_path / "data.npz")]
    assert found["data"]["split"] == str(tmp_path / "first/split.txt")


def test_names_are_no_paths():
    model = ModelConfig(backbone="efficientnet-lite0", init=PRETRAINED)
    config = with_absolute_paths(RunConfig(model=model, data=DataConfig(source="cifar10", extra=("svhn",))))
    assert (config.model.init, config.data.source, config.data.extra) == (PRETRAINED, "cifar10", ("svhn",))


# A run that was moved


@pytest.fixture
def arrays():
    """Images and labels in memory, which train_on keeps inside the run."""
    random = np.random.default_rng(0)
    labels = np.array([0, 1, 2] * 4)
    pool = np.stack([tiny.draw(label, random) for label in [0, 1, 2, -1] * 8])
    return (np.stack([tiny.draw(label, random) for label in labels]), labels), pool


def test_a_run_with_its_inputs_may_be_moved(arrays, tmp_path, monkeypatch):
    labeled, pool = arrays
    monkeypatch.chdir(tmp_path)
    ropaws.train_on(labeled, pool, out="run", test=labeled, budget=1.0, backbone="small")
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["data"]["labeled"] == "./inputs/labeled.npz"
    assert config["data"]["unlabeled"] == ["./inputs/unlabeled-0.npz"]
    command("supervised", "run")
    moved = tmp_path / "far/away"
    moved.parent.mkdir()
    shutil.move("run", moved)
    assert read_config(moved / "config.json").data.labeled == moved / "inputs/labeled.npz"
    for name in ("evaluate", "finetune", "supervised"):
        command(name, moved)
    (moved / "model.safetensors").unlink()
    main(["train", "--resume", str(moved), "--no-report"])
    moved.rename(tmp_path / "again")
    command("supervised", tmp_path / "again")  # a run inside the run
    main(["evaluate", str(tmp_path / "again/finetuned")])


def test_a_run_beside_a_config_of_a_person_is_no_part_of_it(tmp_path):
    config = tiny.config(tiny.write_data(tmp_path / "data.npz"), steps=1)
    write_json(tmp_path / "config.json", to_json(config))
    main(["train", str(tmp_path / "config.json"), "--out", str(tmp_path / "run"), "--no-report"])
    moved = shutil.move(tmp_path / "run", tmp_path.parent / f"{tmp_path.name}-moved")
    assert len(Run(moved).corpus.train_images) == 40


def test_the_stages_of_a_moved_run_go_on(arrays, tmp_path, monkeypatch):
    """The run on frozen features that the whole network starts from is a part of it."""
    torch.manual_seed(0)
    backbone = build_encoder(ModelConfig(backbone="small"), channels=3).backbone
    save_file({name: value.contiguous() for name, value in backbone.state_dict().items()},
              tmp_path / "small.safetensors")  # fmt: skip
    monkeypatch.chdir(tmp_path)

    def train(out):
        labeled, pool = arrays
        ropaws.train_on(labeled, pool, out=out, init="small.safetensors", train_backbone=True, budget=0.5)

    train("run")
    config, frozen = (
        json.loads((tmp_path / "run" / name / "config.json").read_text()) for name in (".", "frozen")
    )
    assert config["model"]["init"] == "./frozen/model.safetensors"
    assert frozen["model"]["init"] == str(tmp_path / "small.safetensors")
    assert frozen["data"]["labeled"] == "./../inputs/labeled.npz"
    moved = tmp_path / "moved"
    shutil.move("run", moved)
    for run in (moved, moved / "frozen"):
        assert len(Run(run).corpus.train_images) == 12 + 32
    trained = (moved / "frozen/model.safetensors").stat()
    for path in moved.iterdir():  # as if it had been stopped after the first stage
        if path.is_file():
            path.unlink()
    train("moved")
    assert (moved / "model.safetensors").exists()
    assert (moved / "frozen/metrics.jsonl").read_text().count("\n") == frozen["train"]["steps"]
    assert (moved / "frozen/model.safetensors").stat().st_size == trained.st_size


def test_images_that_are_gone_are_named_and_no_option_is(at_home, elsewhere, capsys, tmp_path):
    config = json.loads((elsewhere / "config.json").read_text())
    (elsewhere / "model.safetensors").rename(tmp_path / "kept")
    for name in ("labeled", "test"):
        gone = tmp_path / "gone" / name
        changed = {**config, "data": {**config["data"], name: str(gone)}}
        (elsewhere / "config.json").write_text(json.dumps(changed))
        line = fails(capsys, "train", "--resume", elsewhere)
        assert line == (
            f"ropaws: {elsewhere} was trained on {gone}, which is not there; put it back, or change"
            f" data.{name} in {elsewhere / 'config.json'} to where it is now"
        )
    (tmp_path / "kept").rename(elsewhere / "model.safetensors")
    for kind in ("suggest", "finetune"):
        line = fails(capsys, kind, elsewhere)
        assert f"was trained on {gone}, which is not there" in line
        assert "--" not in line


def test_other_errors_of_recorded_images_name_no_option_either(at_home, elsewhere, capsys, tmp_path):
    photos = shutil.copytree(at_home / "photos", tmp_path / "photos")
    for image in (photos / "labeled/rows").iterdir():
        image.unlink()
    config = json.loads((elsewhere / "config.json").read_text())
    config["data"]["labeled"] = str(photos / "labeled")
    (elsewhere / "config.json").write_text(json.dumps(config))
    line = fails(capsys, "finetune", elsewhere)
    assert line.startswith(f"ropaws: data.labeled: class folder {photos / 'labeled/rows'} has no image")


@pytest.mark.parametrize("memory", [4.0, 0.0])
def test_moved_images_are_found_where_the_config_says(at_home, elsewhere, tmp_path, memory):
    """In memory and on disk: whether they are the same is told by what they are, not by where."""
    photos = shutil.copytree(at_home / "photos", tmp_path / "other/photos")
    run = tmp_path / "run"
    main(["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(photos / "pool"),
          "--out", str(run), "--data.memory-gb", str(memory), *QUICK])  # fmt: skip
    moved = photos.rename(tmp_path / "photos")
    text = (run / "config.json").read_text().replace(str(photos), str(moved))
    (run / "config.json").write_text(text)
    (run / "embeddings.safetensors").unlink(missing_ok=True)
    main(["evaluate", str(run)])
    assert (run / "embeddings.safetensors").is_file()  # computed from the images, which were found
    (run / "checkpoint.previous.pt").replace(run / "checkpoint.pt")
    (run / "model.safetensors").unlink()
    main(["train", "--resume", str(run), "--no-report"])
    assert (run / "model.safetensors").is_file()


def test_relative_paths_that_a_person_has_written_are_those_of_the_working_directory(
    at_home, elsewhere, capsys, monkeypatch
):
    config = json.loads((elsewhere / "config.json").read_text())
    config["data"].update(
        labeled="photos/labeled", unlabeled=["photos/pool"], test="photos/test", root="data"
    )
    (elsewhere / "config.json").write_text(json.dumps(config))
    line = fails(capsys, "finetune", elsewhere)
    assert line.startswith(f"ropaws: {elsewhere} was trained on photos/labeled, which is not there")
    monkeypatch.chdir(at_home)
    assert len(Run(elsewhere).corpus.train_images) == 45
