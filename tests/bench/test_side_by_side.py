import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console

from ropaws.analysis.results import read_evaluation
from ropaws.bench import side_by_side
from ropaws.bench.side_by_side import Job, last_row, train_all
from ropaws.bench.workers import Done, run_all, threads_of
from ropaws.config import to_json
from ropaws.methods import PAWS, Supervised
from ropaws.recipes import with_seed
from ropaws.terminal import Terminal
from ropaws.training.train import train
from tests import tiny

SCRIPT = """
import json, sys
from pathlib import Path
from ropaws.bench.side_by_side import Job, train_all
from ropaws.config import from_json
from ropaws.terminal import Terminal

if __name__ == "__main__":
    jobs = [Job(from_json(config), Path(folder)) for config, folder in json.loads(sys.argv[1])]
    train_all(jobs, workers=2, console=Terminal(stderr=True))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("data") / "stripes.npz")


def _jobs(data, out, steps=4):
    base = tiny.config(data, steps=steps)
    configs = {"ropaws": base, "paws": with_seed(base, 1), "supervised": with_seed(base, 2)}
    methods = {"ropaws": base.method, "paws": PAWS(), "supervised": Supervised()}
    return [
        Job(type(config)(**{**vars(config), "method": methods[name]}), out / name)
        for name, config in configs.items()
    ]


def _steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _loss(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_side_by_side_is_as_one_after_the_other(data, tmp_path, monkeypatch):
    at_once, in_turn = _jobs(data, tmp_path / "at-once")[1:], _jobs(data, tmp_path / "in-turn")[1:]
    text = io.StringIO()
    found = train_all(at_once, workers=2, console=Terminal(file=text))
    for job, figures, other in zip(at_once, found, in_turn, strict=True):
        train(other.config, other.folder, console=Terminal(quiet=True))
        assert _steps(job.folder) == _steps(other.folder) == [0, 1, 2, 3]  # equal steps for all
        assert _loss(job.folder) == pytest.approx(_loss(other.folder), abs=1e-4)
        assert 0 <= figures["accuracy"] <= 1
        assert f"{job.folder}: trained and evaluated" in text.getvalue()
        assert json.loads((job.folder / "environment.json").read_text())["threads"] == threads_of(2)

    # What is finished is used again, and nothing is started for it.
    monkeypatch.setattr(side_by_side, "run_all", None)
    monkeypatch.setattr(side_by_side, "train", None)
    text = io.StringIO()
    assert train_all(at_once, workers=2, console=Terminal(file=text)) == found
    assert text.getvalue().count("used again") == 2


def test_ctrl_c_saves_all_runs_and_the_same_call_resumes(data, tmp_path, monkeypatch):
    jobs = _jobs(data, tmp_path, steps=60)[:2]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    told = json.dumps([(to_json(job.config), str(job.folder)) for job in jobs])
    process = subprocess.Popen(
        [sys.executable, str(script), told], stderr=subprocess.PIPE, start_new_session=True
    )
    for job in jobs:
        tiny.wait_for_steps(process, job.folder, 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    _, errors = process.communicate(timeout=60)
    assert b"the same command resumes it" in errors
    assert _is_gone(process.pid)
    seen = [len(_steps(job.folder)) for job in jobs]
    assert all(2 < count < 60 for count in seen)
    saved = [torch.load(job.folder / "checkpoint.pt", weights_only=True)["next_step"] for job in jobs]
    assert saved == seen  # up to the last step, though checkpoints come after every second one

    monkeypatch.setattr(side_by_side, "evaluate", lambda folder, console: read_evaluation(folder))
    train_all(jobs, workers=1, console=Terminal(quiet=True))
    assert all(_steps(job.folder) == list(range(60)) for job in jobs)


def _is_gone(group):
    """No process of it is left."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("failure", "error"),
    [(Done(0, None, "batch is too large"), ValueError), (Done(0, None, "oh", "Traceback"), RuntimeError)],
)
def test_a_run_that_fails_is_named(data, tmp_path, monkeypatch, failure, error):
    def failing(_work, items, *, workers, started, tick):
        started(0)
        tick()
        yield failure

    monkeypatch.setattr(side_by_side, "run_all", failing)
    jobs = _jobs(data, tmp_path)
    with pytest.raises(error, match=f"{jobs[0].folder}: {failure.reason}"):
        train_all(jobs, workers=2, console=Terminal(quiet=True))


@pytest.mark.parametrize(("cores", "runs", "expected"), [(2, 3, 3), (2, 15, 2), (1, 3, 1), (8, 3, 3)])
def test_no_core_is_idle_while_the_last_of_few_runs_is_trained(monkeypatch, cores, runs, expected):
    monkeypatch.setattr(side_by_side, "available_cores", lambda: cores)
    monkeypatch.setattr(side_by_side, "choose_device", lambda _: torch.device("cpu"))
    assert side_by_side.default_workers(runs) == expected
    monkeypatch.setattr(side_by_side, "choose_device", lambda _: torch.device("cuda"))
    assert side_by_side.default_workers(runs) == 1


def _threads(_item):
    from threadpoolctl import threadpool_info

    return max(pool["num_threads"] for pool in threadpool_info())


def test_no_library_of_a_worker_takes_more_than_its_share(monkeypatch):
    """scikit-learn and BLAS in every worker on every core would wait for one another."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ropaws.bench.workers.available_cores", lambda: 2)
    (done,) = run_all(_threads, [0], workers=2, started=lambda _: None)
    assert done.result == 1, done.reason
    assert "OMP_NUM_THREADS" not in os.environ  # of this process


def test_bars_show_what_runs_have_logged(data, tmp_path):
    job = Job(tiny.config(data, steps=4), tmp_path / "paws")
    job.folder.mkdir()
    assert last_row(job.folder) is None
    row = {"step": 1, "loss": 0.5, "learning_rate": 0.1, "seconds": 2.0}
    (job.folder / "metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 2, "lo')  # being written
    assert last_row(job.folder) == row
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=140)
    with side_by_side.training_bars(console) as bars:
        shown = side_by_side._Shown([job], bars, console)
        shown.start(0)
        shown.update()
        bars.refresh()
    assert "paws" in text.getvalue()
    assert "2/4" in text.getvalue()
    assert "loss 0.500" in text.getvalue()
