"""Loop, atomic files, checkpoints, progress, signals."""

import io
import json
import math
import os
import re
import signal
import time

import pytest
import torch
from rich.console import Console
from torch.amp.grad_scaler import GradScaler

from ropaws.core.files import read_json, write_atomically, write_json
from ropaws.core.hardware import choose_device, choose_precision, keep_freed_memory
from ropaws.core.optimizers import LARS
from ropaws.core.records import Batch, Losses
from ropaws.core.terminal import watch_files
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.methods import Method, RoPAWS
from ropaws.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_model,
    restore,
    save_checkpoint,
    save_model,
)
from ropaws.training.loop import (
    StepResult,
    TrainingDivergedError,
    drop_metrics_from,
    fit,
    show_progress,
    stop_between_steps,
)


class Scripted(Method):
    """A method that gives a set loss at each step."""

    def __init__(self, values):
        self.values = iter(values)

    def step(self, model, batch):
        weight = next(model.parameters())
        loss = weight.sum() * 0 + next(self.values)
        return Losses(loss, {"consistency": loss.detach()})


def empty_batch(step):
    return Batch(step, steps=10, views={}, pool_index=torch.empty(0), labeled=None)


def small_model():
    """As RoPAWS builds it: with a running statistic."""
    torch.manual_seed(0)
    encoder = build_encoder(ModelConfig(backbone="small", projection_hidden=4, projection_dims=4), channels=1)
    return RoPAWS().build(encoder, classes=3, pool=10)


def test_loop_yields_each_step_and_sets_the_rate():
    model = small_model()
    optimizer = LARS(model.parameters(), lr=0.0)
    batches = [empty_batch(step) for step in range(3, 6)]
    rates = []
    for taken in fit(model, Scripted([1.0, 2.0, 3.0]), batches, optimizer, lambda step: step / 10):
        assert taken.rate == optimizer.param_groups[0]["lr"]
        assert taken.data_seconds >= 0
        rates.append((taken.step, float(taken.losses.total), taken.rate))
    assert rates == [(3, 1.0, 0.3), (4, 2.0, 0.4), (5, 3.0, 0.5)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_with_step_parts_and_remedy(bad):
    model = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps = fit(
        model,
        Scripted([bad]),
        [empty_batch(7)],
        LARS(model.parameters(), lr=1.0),
        lambda step: 1.0,
    )
    with pytest.raises(
        TrainingDivergedError, match=rf"became {bad} at step 7 .*consistency {bad}.*Try a lower"
    ):
        next(steps)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], equal_nan=True)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert read_json(path) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_json_keeps_names_that_are_not_utf8(tmp_path):
    value = {"name": os.fsdecode(b"caf\xe9-\xff.png"), "other": "spaß"}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value


def save(folder, model, optimizer, *, next_step=1, seconds=0.0):
    made_by = {"config": {}, "digest": "", "split": []}
    state = Checkpoint(model.state_dict(), optimizer.state_dict(), {}, next_step, seconds, made_by)
    save_checkpoint(folder, state)


def load(folder, said=None):
    return load_checkpoint(folder, (said if said is not None else []).append)


def test_checkpoint_and_model_come_back(tmp_path):
    model = small_model()
    optimizer = LARS(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model.support_gap.fill_(0.25)
    save(tmp_path, model, optimizer, next_step=12, seconds=3.5)
    save_model(tmp_path, model)
    other = small_model()
    torch.nn.init.zeros_(other.projection[0].weight)
    other_optimizer = LARS(other.parameters(), lr=1.0)
    checkpoint = load(tmp_path)
    restore(checkpoint, other, other_optimizer, GradScaler(enabled=False))
    assert (checkpoint.next_step, checkpoint.seconds) == (12, 3.5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["momentum"], other_optimizer.state[theirs]["momentum"])
    third = small_model()
    load_model(tmp_path, third)
    assert float(third.support_gap) == 0.25


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    model = small_model()
    optimizer = LARS(model.parameters(), lr=1.0)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load(tmp_path)
    for content in (b"", b"garbage" * 100):
        (tmp_path / "checkpoint.pt").write_bytes(content)
        with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged"):
            load(tmp_path)
    wide = build_encoder(ModelConfig(backbone="small", projection_dims=8), channels=1)
    save(tmp_path, wide, LARS(wide.parameters(), lr=1.0))
    with pytest.raises(ValueError, match="does not fit the settings of the run"):
        restore(load(tmp_path), model, optimizer, GradScaler(enabled=False))
    with pytest.raises(FileNotFoundError, match="no trained model"):
        load_model(tmp_path, model)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_model(tmp_path, model)


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "pwned"),))

    torch.save({"model": Evil()}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="is damaged"):
        load(tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_the_last_two_checkpoints_are_kept_and_a_damaged_one_gives_way(tmp_path):
    model = small_model()
    optimizer = LARS(model.parameters(), lr=1.0)
    for step in (5, 10, 15):
        save(tmp_path, model, optimizer, next_step=step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.previous.pt", "checkpoint.pt"]
    said = []
    assert load(tmp_path, said).next_step == 15
    assert said == []
    content = (tmp_path / "checkpoint.pt").read_bytes()
    for damaged in (content[: len(content) // 2], content[:100], b""):
        (tmp_path / "checkpoint.pt").write_bytes(damaged)
        said = []
        assert load(tmp_path, said).next_step == 10
        assert "checkpoint.pt is damaged" in said[0]
        assert "resuming from" in said[0]
    (tmp_path / "checkpoint.pt").unlink()  # a power cut between the two renames
    assert load(tmp_path).next_step == 10
    (tmp_path / "checkpoint.previous.pt").write_bytes(b"")
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged.*checkpoint\.previous\.pt is damaged"):
        load(tmp_path)


def test_a_full_disk_loses_nothing_and_says_so(tmp_path, monkeypatch):
    model = small_model()
    optimizer = LARS(model.parameters(), lr=1.0)
    save(tmp_path, model, optimizer, next_step=5)
    save(tmp_path, model, optimizer, next_step=10)

    def no_space(state, path):
        path.write_bytes(b"half of it")
        raise RuntimeError("PytorchStreamWriter failed writing file: No space left on device")

    monkeypatch.setattr(torch, "save", no_space)
    with pytest.raises(OSError, match=r"step 15 could not be saved .*No space left.*is kept.*--resume"):
        save(tmp_path, model, optimizer, next_step=15)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.previous.pt", "checkpoint.pt"]
    assert load(tmp_path).next_step == 10


def test_metrics_of_steps_to_be_taken_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(5)) + '{"step": 5, "lo')
    drop_metrics_from(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_loss_rate_and_time_left(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    steps = [StepResult(step, Losses(torch.tensor(0.5), {}), 1.25, 0.0) for step in range(3)]
    shown = show_progress(iter(steps), title="paws", start=0, total=3, batch=8, console=console)
    assert list(shown) == steps
    text = out.getvalue()
    for word in ("paws", "3/3", "loss 0.500", "rate 1.25", "images/s"):
        assert word in text
    assert ("left" in text) is terminal  # of a log it is said once the speed is known
    quiet = Console(file=io.StringIO(), quiet=True)
    shown = show_progress(iter(steps), title="paws", start=0, total=3, batch=8, console=quiet)
    assert list(shown) == steps
    assert quiet.file.getvalue() == ""


def slow_start(now, first, others, count):
    """Items of which the first takes long, on a clock of their own."""
    for number in range(count):
        now[0] += others if number else first
        yield number


@pytest.mark.parametrize("what", ["steps", "files"])
def test_the_time_left_in_a_log_is_that_of_the_work_and_not_of_the_start(monkeypatch, what):
    """A minute until the first of 1,000 items, then one per second."""
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console = Console(file=out, width=120)
    items = slow_start(now, 60.0, 1.0, 1000)
    if what == "files":
        shown = watch_files(console)(items, "Reading", 1000)
    else:
        taken = (StepResult(step, Losses(torch.tensor(0.5), {}), 1.25, 0.0) for step in items)
        shown = show_progress(taken, title="paws", start=0, total=1000, batch=8, console=console)
    assert sum(1 for _ in shown) == 1000
    lines = [line for line in out.getvalue().splitlines() if re.search(r"\d (of|/)|\d/\d", line)]
    assert "left" not in lines[0]  # after the first item nobody knows
    assert lines[1].endswith(("left 16 min", "left 17 min"))
    assert lines[-2].endswith(" s")


def test_a_signal_waits_for_the_end_of_the_step_and_a_second_one_does_not():
    before = signal.getsignal(signal.SIGINT)
    with stop_between_steps() as request:
        assert request.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_hardware_choices():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    assert choose_precision("bf16", torch.device("cpu")) == "bf16"
    assert choose_precision("fp32", torch.device("cpu")) == "fp32"
    keep_freed_memory()
    with pytest.raises(ValueError, match=r"train\.device='nonsense' cannot be used here"):
        choose_device("nonsense")


def test_the_log_says_how_much_is_selected_and_how_pure_that_is():
    class Selecting(Scripted):
        def step(self, model, batch):
            losses = super().step(model, batch)
            return losses._replace(selected=torch.tensor([1.0, 0.5, 0.0, 0.5]))

    batch = Batch(0, 1, {}, torch.tensor([5, 2, 1, 0]), None)
    in_class = torch.tensor([True, False, False, False, False, True])
    for known in (None, in_class):
        model = small_model()
        steps = fit(
            model, Selecting([1.0]), [batch], LARS(model.parameters(), lr=0.0), lambda _: 0.0, in_class=known
        )
        (taken,) = steps
        parts = {name: float(value) for name, value in taken.losses.parts.items()}
        assert parts["selected"] == 0.5
        assert parts.get("selected_in_class") == (None if known is None else 0.375)  # of 1 + 0.5 of 4 rows
