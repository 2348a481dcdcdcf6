"""A long training is never lost: kills, foreign checkpoints, precision, trackers, large-scale recipes."""

import json
import random
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.amp.grad_scaler import GradScaler

import ropaws
import ropaws.run.train as training
from ropaws.core.files import LOCK, read_json, write_json
from ropaws.core.optimizers import LARS
from ropaws.core.records import Batch, Losses
from ropaws.core.run_layout import FORMAT
from ropaws.embedding.backbones import build_encoder
from ropaws.methods import Method
from ropaws.run.config import to_json
from ropaws.training import loop
from ropaws.training.loop import fit
from tests import tiny
from tests.test_distributed import environment


@pytest.fixture
def data(tmp_path):
    return tiny.write_data(tmp_path / "data.npz")


def command(*arguments):
    return [sys.executable, "-m", "ropaws", "train", *map(str, arguments), "--no-report"]


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def kill_after(run, steps, arguments):
    """Start a training and kill it, without warning, once so many steps are logged."""
    process = subprocess.Popen(command(*arguments), env=environment(), stderr=subprocess.DEVNULL)
    tiny.wait_for_steps(process, run, steps)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_at_three_random_points_a_run_ends_with_the_same_losses_and_weights(data, tmp_path):
    config = tiny.config(data, steps=60, checkpoint_every=4)
    write_json(tmp_path / "config.json", to_json(config))
    quiet, hard = ropaws.train(config, tmp_path / "quiet"), tmp_path / "hard"
    points = sorted(random.Random().sample(range(3, 55), 3))
    start = [tmp_path / "config.json", "--out", hard]
    for point in points:
        kill_after(hard, point, start)
        assert (hard / LOCK).exists()
        start = ["--resume", hard]
    ropaws.resume(hard)
    assert not (hard / LOCK).exists()
    assert losses(hard) == losses(quiet), points
    one, other = (load_file(run / "model.safetensors") for run in (quiet, hard))
    assert all(torch.equal(one[name], other[name]) for name in one), points


def test_a_checkpoint_of_other_settings_or_data_says_what_differs(tiny_run, tmp_path):
    run, fresh, split = (tiny.copy(tiny_run, tmp_path / name) for name in ("run", "fresh", "split"))
    values = read_json(run / "config.json")
    values["train"]["batch"] = 16
    values["method"]["label_ratio"] = 2.0
    write_json(run / "config.json", values)
    with pytest.raises(
        ValueError, match=r"method\.label_ratio was 5\.0 and is 2\.0; train\.batch was 8 and is 16\."
    ):
        ropaws.resume(run)
    other = ropaws.train(tiny.config(tiny.write_data(tmp_path / "b.npz", seed=5)), tmp_path / "other")
    (other / "checkpoint.pt").replace(fresh / "checkpoint.pt")
    with pytest.raises(ValueError, match="the training images are others"):
        ropaws.resume(fresh)
    facts = read_json(split / "data.json")
    facts["labeled"]["indices"][0] += 4
    write_json(split / "data.json", facts)
    with pytest.raises(ValueError, match="the labeled images are others"):
        ropaws.resume(split)


def test_what_only_changes_where_and_how_fast_may_differ(tiny_run, tmp_path):
    run = tiny.copy(tiny_run, tmp_path / "run")
    values = read_json(run / "config.json")
    values["train"] |= {"checkpoint_every": 3, "device": "cpu"}
    write_json(run / "config.json", values)
    before = losses(run)
    (run / "checkpoint.previous.pt").replace(run / "checkpoint.pt")
    ropaws.resume(run)
    assert losses(run) == before


def test_a_checkpoint_says_what_made_it(tiny_run):
    run = tiny_run
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    assert checkpoint["made_by"]["ropaws"] == ropaws.__version__
    assert checkpoint["made_by"]["config"] == read_json(run / "config.json")
    assert checkpoint["made_by"]["digest"] == read_json(run / "data.json")["digest"]
    assert checkpoint["made_by"]["split"] == read_json(run / "data.json")["labeled"]["indices"]
    assert checkpoint["next_step"] == 6


def test_a_full_disk_ends_the_run_with_the_last_checkpoint_whole(data, tmp_path, monkeypatch, tiny_run):
    real = torch.save

    def full_at_four(state, path):
        if state["next_step"] == 4:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(state, path)

    monkeypatch.setattr(torch, "save", full_at_four)
    with pytest.raises(OSError, match=r"step 4 could not be saved.*No space left"):
        ropaws.train(tiny.config(data), tmp_path / "run")
    monkeypatch.undo()
    ropaws.resume(tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tiny_run)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_and_resumes(data, tmp_path, precision):
    config = tiny.config(data, precision=precision)
    run = ropaws.train(config, tmp_path / "run")
    assert read_json(run / "environment.json")["precision"] == precision
    assert np.isfinite(losses(run)).all()
    state = torch.load(run / "checkpoint.pt", weights_only=True)["scaler"]
    assert bool(state) == (precision == "fp16")  # loss scaling, and its state, belong to fp16
    (run / "checkpoint.previous.pt").replace(run / "checkpoint.pt")
    before = losses(run)
    ropaws.resume(run)
    assert losses(run) == before
    ropaws.evaluate(run)


def test_an_overflow_in_fp16_skips_the_step_and_lowers_the_scale():
    torch.manual_seed(0)
    model = build_encoder(tiny.config("x.npz").model, channels=1)

    class Overflowing(Method):
        def step(self, model, batch):
            weight = next(model.parameters())
            return Losses(weight.sum() * 1e36, {})

    scaler = GradScaler("cpu", init_scale=2.0**16)
    before = next(model.parameters()).clone()
    batch = Batch(0, steps=1, views={}, pool_index=torch.empty(0), labeled=None)
    list(fit(model, Overflowing(), [batch], LARS(model.parameters(), lr=1.0), lambda s: 1.0, scaler))
    assert torch.equal(next(model.parameters()), before)
    assert scaler.get_scale() < 2.0**16


def test_compiling_keeps_the_names_of_the_weights(data, tmp_path, monkeypatch, tiny_run):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(type(self).__name__))
    run = ropaws.train(tiny.config(data, compile=True), tmp_path / "run")
    assert compiled == ["SmallConvNet"]
    assert load_file(run / "model.safetensors").keys() == load_file(tiny_run / "model.safetensors").keys()


def test_metrics_have_times_and_memory(tiny_run):
    rows = [json.loads(line) for line in (tiny_run / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= row["data_seconds"] <= row["seconds"] + 0.01 for row in rows)
    assert all(0.01 < row["memory_gb"] < 100 for row in rows)


class Recorder:
    """Stands for SummaryWriter and for a W&B run."""

    def __init__(self, *args, **kwargs):
        self.made_with, self.rows, self.closed = (args, kwargs), [], False

    def add_scalar(self, name, value, step):
        self.rows.append((step, name, value))

    def log(self, row, step):
        self.rows += [(step, name, value) for name, value in row.items()]

    def close(self):
        self.closed = True

    finish = close


def test_trackers_get_every_step(data, tmp_path, monkeypatch):
    board, online = [], []
    fake = type(sys)("torch.utils.tensorboard")
    fake.SummaryWriter = lambda *args, **kwargs: board.append(Recorder(*args, **kwargs)) or board[-1]
    wandb = type(sys)("wandb")
    wandb.init = lambda **kwargs: online.append(Recorder(**kwargs)) or online[-1]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = ropaws.train(tiny.config(data, log=("tensorboard", "wandb")), tmp_path / "run")
    for (recorder,) in (board, online):
        assert {step for step, _, _ in recorder.rows} == set(range(6))
        assert {"loss", "learning_rate", "data_seconds"} <= {name for _, name, _ in recorder.rows}
        assert recorder.closed
    assert {"format": FORMAT, **online[0].made_with[1]["config"]} == read_json(run / "config.json")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_tracker_is_named_before_anything_else(data, tmp_path, monkeypatch, name):
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"needs pip install 'ropaws\[{name}\]'"):
        ropaws.train(tiny.config(data, log=(name,)), tmp_path / "run")
    with pytest.raises(ValueError, match=rf"needs pip install 'ropaws\[{name}\]'"):
        loop.open_trackers(tmp_path, "m.jsonl", (name,), start=0, config={})
    assert not (tmp_path / "run").exists()


def save_image(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (80, 100, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, "JPEG")


def shrink(config, root, classes):
    """The recipe as it is, but for size, batch, length and number of classes."""
    return replace(
        config,
        data=replace(config.data, root=root, image_size=40, label_fraction=None, labels_per_class=None),
        augment=replace(config.augment, size=32, small_size=24),
        support=replace(config.support, classes=classes, images_per_class=2),
        train=replace(config.train, steps=2, batch=8, precision="fp32", checkpoint_every=2),
    )


@pytest.mark.parametrize(
    "recipe", [pytest.param("imagenet-1", marks=pytest.mark.slow), "semi-inat-pretrained"]
)
def test_large_scale_recipes_in_miniature(tmp_path, recipe):
    """ResNet-50 at 32 px on generated images, two steps."""
    root = tmp_path / "data"
    names = [f"n{i:02d}" for i in range(5)] if recipe == "imagenet-1" else ["0", "1", "2", "3", "4"]
    train, test = ("imagenet/train", "imagenet/val") if recipe == "imagenet-1" else (
        "semi-inat-2021/l_train", "semi-inat-2021/val")  # fmt: skip
    for number, name in enumerate(names):
        for i in range(3):
            save_image(root / train / name / f"{name}_{i}.JPEG", 10 * number + i)
        save_image(root / test / name / "v.JPEG", 100 + number)
    if recipe != "imagenet-1":
        for i in range(6):
            save_image(root / "semi-inat-2021/u_train" / f"u{i}.jpg", 200 + i)
    config = shrink(ropaws.recipes.get(recipe), root, classes=4)
    if config.model.init is not None:
        from ropaws.embedding.convnets import resnet50

        weights = {f"module.{k}": v for k, v in resnet50().state_dict().items()}
        torch.save(weights, tmp_path / "swav.pth.tar")
        config = replace(config, model=replace(config.model, init=tmp_path / "swav.pth.tar"))
    run = ropaws.train(config, tmp_path / "run")
    assert np.isfinite(losses(run)).all()
    assert len(losses(run)) == 2
    assert "accuracy" in ropaws.evaluate(run, only=("soft-nn",))


def test_the_first_process_alone_writes(data, tmp_path, monkeypatch):
    """A process of a higher rank goes through all of it and leaves nothing behind."""
    from contextlib import contextmanager

    from ropaws.core.distributed import Rank

    @contextmanager
    def second(_device):
        yield Rank(1, 1, 0)

    monkeypatch.setattr(training, "joined", second)
    monkeypatch.setattr(training, "place", lambda: Rank(1, 1, 0))
    ropaws.train(tiny.config(data), tmp_path / "run")
    assert not (tmp_path / "run").exists()
