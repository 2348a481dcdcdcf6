"""Two processes equal one: through torchrun, on gloo."""

import json
import os
import re
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
from ropaws.core import cores, distributed
from ropaws.core.distributed import Rank, planned, share
from ropaws.core.files import write_json
from ropaws.core.hardware import choose_threads
from ropaws.core.randomness import SupportConfig, support_share
from ropaws.embedding.convnets import weight_file
from ropaws.pool.corpus import ImageStack
from ropaws.run.config import to_json
from ropaws.run.train import _contents
from tests import tiny
from tests.methods.rivals import RIVALS
from tests.photos import make_photos
from tests.torchrun_worker import steady_config

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
        timeout=600,
        **options,
    )


def run_worker(folder, processes, *tasks):
    """What each task returns in the first process."""
    if processes == 1:
        command = [sys.executable, str(WORKER), str(folder), *tasks]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=600, check=False
        )
    else:
        done = torchrun(processes, WORKER, folder, *tasks, check=False)
    results = {task: folder / f"{task}-{processes}.pt" for task in tasks}
    assert all(file.exists() for file in results.values()), done.stderr  # see the worker's last line
    return {task: torch.load(file, weights_only=True) for task, file in results.items()}


@pytest.fixture(scope="module")
def in_one(tmp_path_factory):
    """What the tasks find in a single process."""
    return run_worker(tmp_path_factory.mktemp("one"), 1, "steps", "synced_norm", "trained")


@pytest.fixture(scope="module")
def in_two(tmp_path_factory):
    """What the tasks find in two processes, which are started once for all of them."""
    folder = tmp_path_factory.mktemp("two")
    tasks = ("steps", "synced_norm", "functions", "left_out", "threads", "trained", "other_data")
    return run_worker(folder, 2, *tasks)


def test_loss_gradients_and_statistics_of_two_processes_are_those_of_one(in_one, in_two):
    """All methods, with and without classes of their own for each process, views, small crops."""
    one, two = in_one["steps"], in_two["steps"]
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


def test_collectives_with_rows_that_differ_in_number(in_two):
    found = in_two["functions"]
    whole = torch.arange(10.0).view(5, 2)
    weights = torch.linspace(1, 2, 10).view(5, 2)
    assert torch.equal(found["gathered"], whole)
    torch.testing.assert_close(found["gradient"], 2 * whole * weights**2)
    assert found["mean"].tolist() == [1.5]
    torch.testing.assert_close(found["mean_gradient"], torch.tensor([3 * 1.5**2]))
    assert float(found["sum"]) == 4
    assert (found["any"], found["none"], found["size"]) == (True, False, 2)
    together, numbers, flags = found["together"]
    assert torch.equal(together, whole)
    assert torch.equal(found["known"], whole)
    assert numbers.tolist() == [0, 1, 2, 10, 11]
    assert flags.tolist() == [False, True, True, True, True]


def test_a_process_may_leave_a_layer_out(in_two):
    """Gradients are means all the same; a weight that no process uses has none, or it would decay."""
    found = in_two["left_out"]
    for step in found["steps"]:
        for name, gradient, expected in zip(
            found["names"], *map(step.get, ("gradients", "expected")), strict=True
        ):
            if name.startswith("aside"):
                assert gradient is None
            else:
                torch.testing.assert_close(gradient, expected)


def test_processes_that_see_different_data_refuse_to_train(in_two):
    """One line, the same in every process: what differs, which item, and who has it."""
    found = in_two["other_data"]
    expected = {
        "missing": "training images: only process 0 has 'pool/39.jpg';",
        "renamed": "training images: only process 0 has 'pool/0.jpg', only process 1 has 'pool/new.jpg';",
        "pixel": "contents of training images: only process 0 has ",
        "replaced": f"contents of training images: only process 0 has 'pool/7.jpg (content {'07' * 8})'",
        "streamed": "contents of training images: only process 0 has '2.bmp (content ",
        "label": "labels: only process 0 has 'pool/3.jpg: no class', only process 1 has 'pool/3.jpg: col",
        "classes": "classes: only process 0 has 'block', only process 1 has 'blocks';",
        "seed": "settings: only process 0 has '--train.seed 0', only process 1 has '--train.seed 5';",
        "precision": "precisions: only process 0 has '--train.precision fp32', only process 1 has",
        "same": "",
    }
    assert found.keys() == expected.keys()
    for name, said in found.items():
        assert said[0] == said[1]
        assert expected[name] in said[0]
        assert (said[0] == "") == (name == "same")


def test_files_that_are_read_while_training_are_compared_one_by_one(tmp_path):
    """So that the line names the file that another process has with another size."""
    names = [str(tmp_path / name) for name in ("a.png", "b.png")]
    seen = []
    for size in (10, 11):
        Path(names[0]).write_bytes(b"x" * 10)
        Path(names[1]).write_bytes(b"x" * size)
        seen.append(_contents(ImageStack([Path(name) for name in names], 8), names, None))
    assert seen[0][0] == seen[1][0]
    assert [items[1] for items in seen] == [f"{names[1]} (10 bytes)", f"{names[1]} (11 bytes)"]


def test_processes_share_the_cores_unless_the_user_says_otherwise(in_two, monkeypatch):
    """torchrun has said 1 thread, which is taken for not chosen: half of eight cores, or as many as asked."""
    assert in_two["threads"]["threads"] == [1, 4, 3, 1]
    monkeypatch.setattr(cores, "available_cores", lambda: 8)
    torchrun_says = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert choose_threads({**torchrun_says, "OMP_NUM_THREADS": "1"}, 1) == 4
    assert choose_threads({**torchrun_says, "OMP_NUM_THREADS": "3"}, 3) == 3


def test_batch_norm_sees_the_global_batch(in_one, in_two):
    """One process has torch's own batch norm; the types are those of autocast too."""
    one, two = in_one["synced_norm"], in_two["synced_norm"]
    for kind, expected in one.items():
        for name, value in expected.items():
            torch.testing.assert_close(two[kind][name], value, msg=lambda m, at=(kind, name): f"{at}: {m}")


@pytest.fixture
def settings(tmp_path):
    config = steady_config(tmp_path, checkpoint_every=2)
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


def test_a_run_of_two_processes_is_that_of_one(settings, tmp_path, in_one):
    one = Path(in_one["trained"]["runs"]) / "fp32"
    done = train_with(2, tmp_path, tmp_path / "two")
    assert done.stdout.count("Trained:") == 1  # only one process speaks
    assert "find_unused_parameters" not in done.stderr  # nor does torch, of what a person cannot change
    assert (tmp_path / "two" / "report.html").exists()
    names = load_file(tmp_path / "two" / "model.safetensors").keys()
    assert names == load_file(one / "model.safetensors").keys()  # no prefix of what wraps the model
    assert_close_runs(one, tmp_path / "two")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])  # fp32: above
def test_two_processes_train_in_half_precision(in_one, in_two, precision):
    assert len(in_two["trained"][precision]) == 6
    assert in_two["trained"][precision] == pytest.approx(in_one["trained"][precision], abs=0.05)


FORCED = pytest.param(("--train.precision", "fp32"), marks=pytest.mark.slow)
DEMO = pytest.param(0, marks=pytest.mark.slow)  # its whole pool; what is of two processes: above


@pytest.mark.parametrize("options", [(), FORCED])
@pytest.mark.parametrize("line", [DEMO, 1])
def test_the_commands_of_the_page_on_scale_run(tmp_path, line, options):
    """The demo, and frozen features of a person's own images; with the precision that this CPU is fast at."""
    if line == 1 and weight_file() is None:
        pytest.skip("the pretrained network is not installed")
    make_photos(tmp_path)
    page = (ROOT / "docs/scale.md").read_text()
    command = re.findall(r"^torchrun --nproc-per-node 2 (.*)$", page, re.M)[line].split()
    done = torchrun(2, *command, *options, "--train.steps", 6, "--no-report", cwd=tmp_path, check=False)
    assert "Trained:" in done.stdout, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "environment.json").read_text())["processes"] == 2


def test_a_run_may_be_resumed_with_another_number_of_processes(in_one, in_two, tmp_path):
    whole, two = (Path(found["trained"]["runs"]) / "fp32" for found in (in_one, in_two))
    part = tiny.copy(two, tmp_path / "part")
    # Back to the checkpoint before the last, as if it had been killed there.
    (part / "checkpoint.previous.pt").replace(part / "checkpoint.pt")
    (part / "model.safetensors").unlink()
    ropaws.resume(part)
    assert_close_weights(whole, part)


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


def test_batches_that_cannot_be_shared_are_refused(in_two):
    assert (
        "train.batch=9 cannot be shared out evenly to 2 processes; use a multiple of 2"
        in (in_two["trained"]["odd"])
    )
    assert not (Path(in_two["trained"]["runs"]) / "odd/config.json").exists()


def start_alone(rank, folder, *options, **variables):
    """One of two processes, as a launcher without a watch over them would start it."""
    said = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), **variables}
    command = [sys.executable, "-m", "ropaws", "train", str(folder / "config.json"),
               "--out", str(folder / "run"), *options]  # fmt: skip
    return subprocess.Popen(
        command, env={**environment(), **said}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_process_that_does_not_know_the_others_is_an_error(settings, tmp_path):
    """Never a silent training of its own."""
    process = start_alone(1, tmp_path)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "process 1 of 2 does not know where to meet the others" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_waits_for_another_in_vain_gives_up(settings, tmp_path, rank):
    """The one that the others look for, and one that looks for it."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    process = start_alone(rank, tmp_path, "--timeout", "2s", **meeting)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    at = f"at 127.0.0.1:{meeting['MASTER_PORT']} within 2 s"
    assert f"process {rank} of 2 could not join the others {at}" in said
    assert "give them more time with --timeout" in said
    assert not (tmp_path / "run").exists()


def test_a_process_that_dies_is_named_by_the_others(settings, tmp_path):
    long = replace(settings, train=replace(settings.train, steps=100_000, checkpoint_every=1))
    write_json(tmp_path / "config.json", to_json(long))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first, second = (start_alone(rank, tmp_path, **meeting) for rank in (0, 1))
    try:
        tiny.wait_for_steps(first, tmp_path / "run", 2)
        second.kill()
        _, said = first.communicate(timeout=120)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert first.returncode == 2
    assert "process 0 of 2 lost another one, which has ended or does not answer" in said
    assert f"`ropaws train --resume {tmp_path / 'run'}`" in said
    assert "a fault of ropaws" not in said
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["next_step"] > 1


def test_launchers_are_understood():
    assert planned({}) == Rank(0, 1, 0)
    assert planned({"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}) == Rank(5, 16, 1)
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2"}
    assert planned(slurm) == Rank(3, 4, 2)
    assert planned({**slurm, "SLURM_NTASKS": "1"}) == Rank(0, 1, 0)  # a shell inside an allocation


def test_shares_cover_everything_once():
    for rows in (0, 1, 7, 12):
        for size in (1, 2, 3, 5):
            shares = [share(rows, Rank(rank, size)) for rank in range(size)]
            assert [i for part in shares for i in range(rows)[part]] == list(range(rows))
    for unique in (False, True):
        config = SupportConfig(images_per_class=3, unique_classes_per_process=unique)
        parts = [support_share(15, config, Rank(rank, 2)) for rank in range(2)]
        assert torch.cat(parts).sort().values.tolist() == list(range(15))
        if unique:
            assert not {i // 3 for i in parts[0].tolist()} & {i // 3 for i in parts[1].tolist()}
    with pytest.raises(ValueError, match="too few classes for 6 processes"):
        support_share(15, SupportConfig(images_per_class=3, unique_classes_per_process=True), Rank(5, 6))


def test_in_a_single_process_everything_is_itself():
    value = torch.rand(3, 2, requires_grad=True)
    assert distributed.all_gather(value) is value
    assert distributed.all_mean(value) is value
    assert not distributed.gather_constants(value).requires_grad
    distributed.wait_for_all()
    assert distributed.place() == Rank(0, 1, 0)
