"""Whole runs: what is written, what is repeated exactly, what never reaches training."""

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ropaws
from ropaws.methods import METHODS, PAWS, RoPAWS
from ropaws.pool import array_files as rows
from ropaws.run import train as training
from ropaws.run import train_state as training_parts
from ropaws.run.config import read_config, with_absolute_paths, with_method
from ropaws.run.manifest import read_facts
from ropaws.run.run import Run
from ropaws.training.loop import TrainingDivergedError
from tests import tiny


@pytest.fixture
def data(tmp_path):
    return tiny.write_data(tmp_path / "data.npz")


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run):
    return load_file(run / "model.safetensors")


def assert_same_run(one, other):
    assert losses(one) == losses(other)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if not kind.needs_init])
def test_a_run_leaves_its_folder_and_can_be_tested(data, tmp_path, method):
    config = with_method(tiny.config(data), METHODS[method]())
    run = ropaws.train(config, tmp_path / "run")
    names = {path.name for path in run.iterdir()}
    assert names == {
        "config.json", "data.json", "environment.json", "metrics.jsonl", "checkpoint.pt", "model.safetensors",
        "support.safetensors", "split.txt", "checkpoint.previous.pt",
    }  # fmt: skip
    assert read_config(run / "config.json") == with_absolute_paths(config)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == list(range(6))
    assert all(np.isfinite(list(row.values())).all() for row in steps)
    results = ropaws.evaluate(run)
    figures = {"accuracy", "confidence_in", "confidence_out", "auroc", "fpr95", "aupr_in", "aupr_out", "ece"}
    assert figures <= set(results)
    assert json.loads((run / "evaluation.json").read_text()) == results
    assert all(0 <= results[key] <= 1 for key in figures)


def test_training_learns(data, tmp_path):
    """Both methods end sure and right of the classes; RoPAWS is less sure of noise than PAWS is."""
    config = tiny.config(data, steps=100, batch=32)
    config = replace(
        config,
        augment=replace(config.augment, solarize=0.0, equalize=0.0, jitter_strength=0.25),
        support=replace(config.support, views=4),
        optim=replace(config.optim, start=0.2, peak=0.8, end=0.008, warmup=10),
    )
    results = {}
    for name, method in (("paws", PAWS()), ("ropaws", RoPAWS(prior_temperature="auto"))):
        run = ropaws.train(replace(config, method=method), tmp_path / name)
        assert np.mean(losses(run)[:5]) > -0.3
        assert np.mean(losses(run)[-5:]) < -0.6
        results[name] = ropaws.evaluate(run, only=("soft-nn",))
        assert results[name]["accuracy"] > 0.9
        assert results[name]["confidence_in"] > 0.8
    assert results["ropaws"]["confidence_out"] < results["paws"]["confidence_out"]


def test_a_network_that_tells_nothing_apart_is_said_to(data, tmp_path, capsys, monkeypatch):
    """Embeddings in one point give the warning; spread ones do not."""
    point = torch.nn.functional.normalize(torch.ones(1, 16), dim=1)
    spread = torch.nn.functional.normalize(
        torch.randn(64, 16, generator=torch.Generator().manual_seed(0)), dim=1
    )
    for points, warned in ((point.expand(64, 16), True), (spread, False)):
        monkeypatch.setattr(Run, "embed", lambda self, images, indices, rows=points: rows[: len(indices)])
        ropaws.train(tiny.config(data, steps=1), tmp_path / str(warned))
        assert ("hardly separates the labeled images" in capsys.readouterr().err.replace("\n", " ")) == warned


def test_a_seed_repeats_a_run_and_another_one_does_not(data, tmp_path, tiny_run):
    again = ropaws.train(tiny.config(data), tmp_path / "again")
    assert_same_run(tiny_run, again)
    other = ropaws.train(tiny.config(data, seed=1), tmp_path / "other")
    assert losses(other) != losses(tiny_run)


def fail_at(monkeypatch, step, action):
    """RoPAWS as it is, but for what happens at one step."""
    real, calls = RoPAWS.step, itertools.count()
    monkeypatch.setattr(
        RoPAWS, "step", lambda *args: action(real(*args)) if next(calls) == step else real(*args)
    )


def power_cut(_):
    raise OSError("power cut")


@pytest.mark.parametrize("prior_temperature", [0.1, "auto"])
def test_resume_equals_an_uninterrupted_run(data, tmp_path, monkeypatch, prior_temperature):
    config = replace(tiny.config(data), method=RoPAWS(prior_temperature=prior_temperature))
    whole = ropaws.train(config, tmp_path / "whole")
    part = tmp_path / "part"
    with monkeypatch.context() as patch:
        fail_at(patch, 5, power_cut)  # after step 4 was logged; the last checkpoint is that of step 3
        with pytest.raises(OSError, match="power cut"):
            ropaws.train(config, part)
    assert len(losses(part)) == 5
    ropaws.resume(part)
    assert_same_run(whole, part)


def test_a_nan_keeps_the_last_good_checkpoint(data, tmp_path, monkeypatch):
    fail_at(monkeypatch, 5, lambda losses: losses._replace(total=losses.total * float("nan")))
    with pytest.raises(TrainingDivergedError, match="at step 5"):
        ropaws.train(tiny.config(data), tmp_path / "run")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["next_step"] == 4
    assert all(value.isfinite().all() for value in state["model"].values())
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_weights_that_are_no_numbers_are_not_saved(data, tmp_path, monkeypatch):
    """A finite loss whose gradient is not: found before the checkpoint and after the last step."""
    fail_at(monkeypatch, 5, lambda losses: losses._replace(total=InfiniteSlope.apply(losses.total)))
    with pytest.raises(TrainingDivergedError, match="a weight is no longer finite at step 5"):
        ropaws.train(tiny.config(data), tmp_path / "run")
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["next_step"] == 4
    assert not (tmp_path / "run" / "model.safetensors").exists()


class InfiniteSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def test_a_run_can_be_resumed_before_its_first_step(data, tmp_path, monkeypatch, tiny_run):
    with monkeypatch.context() as patch:
        fail_at(patch, 0, power_cut)
        with pytest.raises(OSError, match="power cut"):
            ropaws.train(tiny.config(data), tmp_path / "part")
    ropaws.resume(tmp_path / "part")
    assert_same_run(tiny_run, tmp_path / "part")


def test_resume_keeps_the_number_of_threads(tmp_path, monkeypatch, tiny_run):
    """Another number would round differently."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run, seen = tiny.copy(tiny_run, tmp_path / "run"), []
    monkeypatch.setattr("ropaws.run.train._fit", lambda *_, **__: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        ropaws.resume(run)
    finally:
        torch.set_num_threads(before)
    recorded = json.loads((run / "environment.json").read_text())["threads"]
    assert seen == [recorded] == [before]


def test_resume_keeps_the_precision_of_the_run(data, tmp_path, monkeypatch, tiny_run):
    with monkeypatch.context() as patch:
        fail_at(patch, 3, power_cut)
        with pytest.raises(OSError, match="power cut"):
            ropaws.train(tiny.config(data, precision="bf16"), tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["train"]["precision"] = "auto"  # on another machine this might have been decided otherwise
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    whole = ropaws.train(tiny.config(data, precision="bf16"), tmp_path / "whole")
    ropaws.resume(tmp_path / "run")
    assert losses(whole) == losses(tmp_path / "run")
    assert losses(whole) != losses(tiny_run)  # of fp32


def test_data_that_changed_since_training_is_refused(data, tmp_path):
    run = ropaws.train(tiny.config(data), tmp_path / "run")
    arrays = dict(np.load(data))
    np.savez(
        data,
        **{
            **arrays,
            "train_images": arrays["train_images"][:-1],
            "train_labels": arrays["train_labels"][:-1],
        },
    )
    for use in (ropaws.evaluate, ropaws.resume):
        with pytest.raises(ValueError, match="have changed since it was trained"):
            use(run)


def test_damaged_run_folders_are_named(tiny_run, tmp_path):
    run = tiny.copy(tiny_run, tmp_path / "run")
    for nonsense in ("", "{}", "[]", '{"seconds": null}'):
        (run / "metrics.jsonl").write_text(nonsense)
        assert "seconds" not in ropaws.evaluate(run, only=["soft-nn"])  # all else needs no metrics
    (run / "data.json").write_text("{}")
    with pytest.raises(ValueError, match=r"data\.json is damaged"):
        ropaws.evaluate(run)


def test_a_signal_in_the_last_step_stops_what_comes_after(data, tmp_path, monkeypatch):
    fail_at(monkeypatch, 5, lambda losses: signal.raise_signal(signal.SIGTERM) or losses)
    with pytest.raises(training.TrainingStopped):
        ropaws.train(tiny.config(data), tmp_path / "run")
    ropaws.resume(tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_no_label_but_the_granted_ones_reaches_training(data, tmp_path, monkeypatch):
    """Every other label is changed: the run must not change by a bit."""
    one = ropaws.train(tiny.config(data), tmp_path / "one")
    granted = json.loads((one / "data.json").read_text())["labeled"]["indices"]
    arrays = dict(np.load(data))
    hidden = np.setdiff1d(np.arange(40), granted)
    # The draw itself looks at which images have a label, so the same split is handed over.
    arrays["train_labels"][hidden] = (arrays["train_labels"][hidden] + 2) % 4 - 1
    np.savez(data, **arrays)
    monkeypatch.setattr(training_parts, "choose_split", lambda *args, **kwargs: read_facts(one).split)
    two = ropaws.train(tiny.config(data), tmp_path / "two")
    assert_same_run(one, two)


def test_training_reads_no_file_of_true_labels(tmp_path, monkeypatch):
    def forbidden():
        raise AssertionError("training looked at the true labels")

    monkeypatch.setattr("ropaws.pool.datasets.catalog.embedded_truth", forbidden)
    monkeypatch.setattr("ropaws.run.outputs.embedded_truth", forbidden)
    rows._load_arrays.cache_clear()  # what another test has read
    config = ropaws.recipes.demo()
    config = replace(config, train=replace(config.train, steps=1, batch=8))
    opened = []
    recording = True
    # A hook cannot be taken away again, so it must know when to be silent.
    sys.addaudithook(
        lambda event, args: opened.append(str(args[0])) if recording and event == "open" else None
    )
    ropaws.train(config, tmp_path / "run")
    recording = False
    assert [name for name in opened if name.endswith("fashion.npz")]
    assert not [name for name in opened if "truth" in Path(name).name]


def test_a_folder_that_holds_a_run_is_not_overwritten(data, tiny_run, tmp_path):
    run = tiny.copy(tiny_run, tmp_path / "run")
    before = losses(run)
    with pytest.raises(FileExistsError, match="holds a run already"):
        ropaws.train(tiny.config(data, seed=3), run)
    assert losses(run) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": {"batch": 41}}, "larger than the unlabeled set of 40"),
        ({"data": {"labels_per_class": 11}}, "fewer than data.labels_per_class=11"),
        ({"support": {"classes": 4}}, "only 3 classes have labels"),
        ({"data": {"source": "missing.npz"}}, "no data file"),
        ({"train": {"device": "nonsense"}}, "cannot be used here"),
    ],
)
def test_bad_settings_are_found_before_anything_is_written(data, tmp_path, change, words):
    config = tiny.config(data)
    for section, values in change.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    with pytest.raises((ValueError, OSError), match=words):
        ropaws.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_test_images_the_pool_and_the_labels_are_analyzed(data, tmp_path):
    arrays = dict(np.load(data))
    np.savez(data, train_images=arrays["train_images"], train_labels=arrays["train_labels"])
    run = ropaws.train(tiny.config(data), tmp_path / "run")
    with pytest.raises(ValueError, match="has no test images with a class"):
        ropaws.evaluate(run, only=["soft-nn"])
    found = ropaws.evaluate(run)
    assert {"pool", "leave_one_out", "label_errors", "suggestions"} <= set(found)
    assert "accuracy" not in found


def test_curated_data_has_no_out_of_class_figures(data, tmp_path):
    arrays = dict(np.load(data))
    known = arrays["test_labels"] >= 0
    arrays.update(test_images=arrays["test_images"][known], test_labels=arrays["test_labels"][known])
    np.savez(data, **arrays)
    run = ropaws.train(tiny.config(data), tmp_path / "run")
    found = ropaws.evaluate(run)
    assert {"accuracy", "confidence_in", "ece", "seconds"} <= set(found)
    assert not {"confidence_out", "auroc", "fpr95", "aupr_in", "aupr_out"} & set(found)
    assert set(found["histograms"]) == {"in"}


def test_training_works_outside_the_main_thread(data, tmp_path):
    thread = threading.Thread(target=ropaws.train, args=(tiny.config(data), tmp_path / "run"))
    thread.start()
    thread.join()
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Long enough to be stopped on the way."""
    folder = tmp_path_factory.mktemp("long")
    config = tiny.config(tiny.write_data(folder / "data.npz"), steps=60)
    return ropaws.train(replace(config, method=PAWS()), folder / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_resume_gives_the_same_weights(long_run, tmp_path, number):
    script = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from ropaws.cli.main import main\n"
        "main(['train', sys.argv[1], '--out', sys.argv[2], '--train.checkpoint-every', '1000'])"
    )
    part = tmp_path / "part"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(long_run / "config.json"), str(part)],
        stderr=subprocess.PIPE,
        text=True,
    )
    while not ((part / "metrics.jsonl").exists() and len(losses(part)) >= 3):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"resume with `ropaws train --resume {part}`" in said
    assert "Traceback" not in said
    assert 3 <= len(losses(part)) < 60
    ropaws.resume(part)
    assert_same_run(long_run, part)


def test_all_files_of_a_run_can_be_read_by_those_whom_the_umask_allows(tiny_run, tmp_path):
    run = tiny.copy(tiny_run, tmp_path / "run")
    ropaws.evaluate(run)
    probe = tmp_path / "probe"
    probe.touch()
    modes = {path.name: path.stat().st_mode for path in run.iterdir() if path.is_file()}
    assert set(modes.values()) == {probe.stat().st_mode}, modes
