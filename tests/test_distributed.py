"""Two processes equal one: through torchrun, on gloo."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ropaws
from ropaws import distributed
from ropaws.config import to_json
from ropaws.data.samplers import SupportConfig, support_share
from ropaws.distributed import Place, planned, share
from ropaws.runs.atomic import write_json
from tests import tiny
from tests.methods.rivals import RIVALS

ROOT = Path(__file__).parent.parent
WORKER = ROOT / "tests/torchrun_worker.py"


def environment():
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    return {**plain, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(processes, *command, **options):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes),
                "--master-addr", "127.0.0.1", "--master-port", str(free_port())]  # fmt: skip
    return subprocess.run(
        [*launcher, *map(str, command)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        **options,
    )


def run_worker(task, folder, processes):
    if processes == 1:
        command = [sys.executable, str(WORKER), task, str(folder)]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=240, check=False
        )
    else:
        done = torchrun(processes, WORKER, task, folder, check=False)
    result = folder / f"{task}-{processes}.pt"
    assert result.exists(), done.stderr  # judged by its result: see the worker's last line
    return torch.load(result, weights_only=True)


def test_loss_gradients_and_statistics_of_two_processes_are_those_of_one(tmp_path):
    """All methods, with and without classes of their own for each process, views, small crops."""
    one, two = (run_worker("steps", tmp_path, processes) for processes in (1, 2))
    assert len(one) == 24 + len(RIVALS)
    for name, expected in one.items():
        found = two[name]
        # In float64, so that a fault cannot hide in rounding. In float32 the loss keeps its digits, but an
        # activation that rounding carries over the kink of a ReLU moves a gradient by a thousandth.
        limit, slope = (1e-5, 1e-2) if "float32" in name else (1e-10, 1e-9)
        assert float(found["loss"]) == pytest.approx(float(expected["loss"]), abs=limit), name
        assert found["gradients"].keys() == expected["gradients"].keys()
        error, size = (
            torch.cat([x.flatten() for x in values]).norm()
            for values in (
                [found["gradients"][k] - g for k, g in expected["gradients"].items()],
                expected["gradients"].values(),
            )
        )
        assert float(error / size) < slope, name
        for key, value in expected["buffers"].items():
            torch.testing.assert_close(found["buffers"][key], value, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_collectives_with_rows_that_differ_in_number(tmp_path):
    found = run_worker("functions", tmp_path, 2)
    assert found["sockets"]
    assert found["memory"]
    for name, value in found["by_gloo"].items():
        torch.testing.assert_close(value, found[name], rtol=0, atol=0)
    whole = torch.arange(10.0).view(5, 2)
    weights = torch.linspace(1, 2, 10).view(5, 2)
    assert torch.equal(found["gathered"], whole)
    torch.testing.assert_close(found["gradient"], 2 * whole * weights**2)
    assert found["mean"].tolist() == [1.5]
    torch.testing.assert_close(found["mean_gradient"], torch.tensor([3 * 1.5**2]))
    assert float(found["sum"]) == 4
    assert (found["any"], found["none"], found["size"]) == (True, False, 2)
    everywhere, once, *without = found["mean_gradients"]
    assert everywhere.tolist() == [1.5, 1.5]
    assert once.tolist() == [0.5, 0.5]
    assert without == [None, None]  # zeros would let weight decay change a weight that no process uses

    together, numbers, flags = found["together"]
    assert torch.equal(together, whole)
    assert torch.equal(found["known"], whole)
    assert numbers.tolist() == [0, 1, 2, 10, 11]
    assert flags.tolist() == [False, True, True, True, True]


def test_gradients_exchanged_during_the_backward_pass_are_the_same_to_the_bit(tmp_path):
    for name, ways in run_worker("exchange", tmp_path, 2).items():
        assert len(ways["after"]) == 3
        for after, during in zip(ways["after"], ways["during"], strict=True):
            assert after.keys() == during.keys(), name
            assert all(torch.equal(value, during[key]) for key, value in after.items()), name


def test_buckets_are_sent_while_the_backward_pass_runs(tmp_path):
    found = run_worker("overlap", tmp_path, 2)
    assert found["buckets"] == [6, 6, 6]  # the first has the layer that goes unused
    _, *steps = "; ".join(found["events"]).split("step ")
    # At first the unused layer's bucket is awaited; from then on it is the last.
    first = "pass over; bucket 0; bucket 1; bucket 2"
    assert first in steps[0]
    for step in steps[1:]:
        order = step.split("; ")
        assert order.index("bucket 1") < order.index("layer 2")
        assert order.index("bucket 1") < order.index("bucket 2") < order.index("pass over")
        assert order.index("bucket 0") == order.index("pass over") + 1
    layers = {f"0.{number}.{kind}" for number in range(8) for kind in ("weight", "bias")}
    assert all(gradients.keys() == layers for gradients in found["gradients"])


@pytest.mark.parametrize("said", [None, "3"])
def test_processes_share_the_cores_unless_the_user_says_otherwise(tmp_path, monkeypatch, said):
    chosen = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    if said is not None:
        chosen["OMP_NUM_THREADS"] = said
    monkeypatch.setattr("tests.test_distributed.environment", lambda: chosen)
    found = run_worker("threads", tmp_path, 2)["threads"]
    assert found == [1, 4 if said is None else 1, 3, 1]


def test_batch_norm_sees_the_global_batch(tmp_path):
    one, two = (run_worker("synced_norm", tmp_path, processes) for processes in (1, 2))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value)


@pytest.fixture
def settings(tmp_path):
    data = tiny.write_data(tmp_path / "data.npz")
    config = tiny.config(data, steps=6, checkpoint_every=2)
    # Without equalize and solarize: they jump, and would make much of the last digit of a pixel. In fp32 and
    # with small steps on every machine: large ones make much of rounding, which differs between CPUs.
    config = replace(
        config,
        augment=replace(config.augment, solarize=0.0, equalize=0.0),
        support=replace(config.support, views=4),
        train=replace(config.train, batch=32, precision="fp32"),
        optim=replace(config.optim, start=config.optim.start / 8, peak=config.optim.peak / 8),
    )
    write_json(tmp_path / "config.json", to_json(config))
    return config


def train_with(processes, folder, out, *options):
    done = torchrun(
        processes, "-m", "ropaws", "train", folder / "config.json", "--out", out, *options, check=False
    )
    assert (out / "model.safetensors").exists(), done.stderr
    return done


def weights(run):
    return load_file(run / "model.safetensors")


def assert_close_weights(one, other):
    for name, value in weights(one).items():
        if value.is_floating_point():
            torch.testing.assert_close(weights(other)[name], value, atol=0.01, rtol=0, equal_nan=True)


def assert_close_runs(one, two):
    """A run of one process and one of two, six steps each: the same losses and weights but for rounding."""
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            for run in (one, two)]  # fmt: skip
    assert [row["step"] for row in rows[1]] == list(range(6))
    # The first loss is of the same weights; after that, rounding grows with every step of so small a run.
    assert rows[0][0]["loss"] == pytest.approx(rows[1][0]["loss"], abs=1e-4)
    for mine, theirs in zip(*rows, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=0.02)
    assert json.loads((two / "environment.json").read_text())["processes"] == 2
    assert_close_weights(one, two)


def test_a_run_of_two_processes_is_that_of_one(settings, tmp_path):
    one = ropaws.train(settings, tmp_path / "one")
    done = train_with(2, tmp_path, tmp_path / "two")
    assert done.stdout.count("Trained:") == 1  # only one process speaks
    assert_close_runs(one, tmp_path / "two")


def test_a_run_may_be_resumed_with_another_number_of_processes(settings, tmp_path):
    whole = ropaws.train(settings, tmp_path / "whole")
    train_with(2, tmp_path, tmp_path / "part", "--no-report")
    # Back to the checkpoint before the last, as if it had been killed there.
    (tmp_path / "part" / "checkpoint.previous.pt").replace(tmp_path / "part" / "checkpoint.pt")
    ropaws.resume(tmp_path / "part")
    assert_close_weights(whole, tmp_path / "part")


def test_sigterm_to_one_process_ends_all_with_a_checkpoint(settings, tmp_path):
    long = replace(settings, train=replace(settings.train, steps=100_000, checkpoint_every=50_000))
    write_json(tmp_path / "config.json", to_json(long))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--master-addr", "127.0.0.1", "--master-port", str(free_port()),
        "-m", "ropaws", "train", str(tmp_path / "config.json"), "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    metrics = tmp_path / "run" / "metrics.jsonl"
    tiny.wait_for_steps(process, tmp_path / "run", 2)
    process.send_signal(signal.SIGTERM)  # torchrun passes it on
    process.communicate(timeout=90)
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert checkpoint["next_step"] == metrics.read_text().count("\n")


def test_batches_that_cannot_be_shared_are_refused(settings, tmp_path):
    odd = replace(settings, train=replace(settings.train, batch=9))  # the pool has 40 images
    write_json(tmp_path / "config.json", to_json(odd))
    done = torchrun(
        2, "-m", "ropaws", "train", tmp_path / "config.json", "--out", tmp_path / "run", check=False
    )
    assert done.returncode != 0
    assert "train.batch=9 cannot be shared out evenly to 2 processes; use a multiple of 2" in done.stderr
    assert not (tmp_path / "run/config.json").exists()  # torchrun may kill the first before it has tidied up


def test_a_process_that_cannot_join_is_an_error(settings, tmp_path):
    """Never a silent training of its own."""
    said = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    command = [
        sys.executable,
        "-m",
        "ropaws",
        "train",
        str(tmp_path / "config.json"),
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, env={**environment(), **said}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "process 1 of 2 does not know where to meet the others" in done.stderr
    code = (
        "import torch, ropaws.distributed as d\n"
        "from datetime import timedelta\n"
        "d.MINUTES = 1 / 30\n"
        "with d.joined(torch.device('cpu')): pass\n"
    )
    nowhere = {**said, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    alone = [sys.executable, "-c", code]
    done = subprocess.run(
        alone, env={**environment(), **nowhere}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode != 0
    assert "process 1 of 2 could not join the others at 127.0.0.1" in done.stderr


def test_launchers_are_understood():
    assert planned({}) == Place(0, 1, 0)
    assert planned({"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}) == Place(5, 16, 1)
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2"}
    assert planned(slurm) == Place(3, 4, 2)
    assert planned({**slurm, "SLURM_NTASKS": "1"}) == Place(0, 1, 0)  # a shell inside an allocation


def test_shares_cover_everything_once():
    for rows in (0, 1, 7, 12):
        for size in (1, 2, 3, 5):
            shares = [share(rows, Place(rank, size)) for rank in range(size)]
            assert [i for part in shares for i in range(rows)[part]] == list(range(rows))
    for unique in (False, True):
        config = SupportConfig(images_per_class=3, unique_classes_per_process=unique)
        parts = [support_share(15, config, Place(rank, 2)) for rank in range(2)]
        assert torch.cat(parts).sort().values.tolist() == list(range(15))
        if unique:
            assert not {i // 3 for i in parts[0].tolist()} & {i // 3 for i in parts[1].tolist()}
    with pytest.raises(ValueError, match="too few classes for 6 processes"):
        support_share(15, SupportConfig(images_per_class=3, unique_classes_per_process=True), Place(5, 6))


def test_in_a_single_process_everything_is_itself():
    value = torch.rand(3, 2, requires_grad=True)
    assert distributed.all_gather(value) is value
    assert distributed.all_mean(value) is value
    assert not distributed.gather_constants(value).requires_grad
    distributed.wait_for_all()
    assert distributed.place() == Place(0, 1, 0)
