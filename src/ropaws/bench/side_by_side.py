"""Train and test runs, several at once: on a CPU, runs of one thread each use the cores best."""

import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress, TaskID

from ropaws.analysis.evaluate import evaluate
from ropaws.analysis.report import is_evaluated
from ropaws.analysis.results import Evaluation, read_evaluation
from ropaws.bench.workers import Done, run_all, stopped_like_ctrl_c
from ropaws.config import RunConfig, read_config
from ropaws.limits import JSON_FILE
from ropaws.processes.cores import available_cores
from ropaws.runs.layout import CONFIG, METRICS
from ropaws.runs.opening import read_regular
from ropaws.terminal import Terminal
from ropaws.training.hardware import choose_device
from ropaws.training.progress import PLAIN_LINE_SECONDS, training_bars
from ropaws.training.train import resume, train

WARNING = "Warning:"  # what the lines of a run begin with that a person must see
MOST_PER_CORE = 1.5  # runs that share a core


class Job(NamedTuple):
    """A run to train and test, and its folder."""

    config: RunConfig
    folder: Path


def default_workers(runs: int) -> int:
    """One per core, or all runs where they are few more: then no core is idle while the last one is trained.

    One for a GPU: its memory is not shared out.
    """
    if choose_device("auto").type != "cpu":
        return 1
    cores = available_cores()
    return runs if runs <= MOST_PER_CORE * cores else cores


def train_all(jobs: Sequence[Job], *, workers: int, console: Console) -> list[Evaluation]:
    """Train and test all, `workers` at a time; what an earlier call has finished is used again.

    Ctrl-C saves what is being trained, and the same call resumes it.
    """
    for job in jobs:
        _check_reusable(job)
    waiting = [job for job in jobs if not is_done(job.folder)]
    if min(workers, len(waiting)) <= 1:  # in this process, with all its threads
        return [train_once(job.config, job.folder, console) for job in jobs]
    for job in jobs:
        if job not in waiting:
            _say_used_again(job.folder, console)
    _train_side_by_side(waiting, min(workers, len(waiting)), console)
    return [read_evaluation(job.folder) for job in jobs]


def train_once(config: RunConfig, folder: Path, console: Console) -> Evaluation:
    """Train and test, or take what an earlier call left; refuses a folder of other settings."""
    _check_reusable(Job(config, folder))
    if is_done(folder):
        _say_used_again(folder, console)
        return read_evaluation(folder)
    if (folder / CONFIG).exists():
        resume(folder, console=console)
    else:
        train(config, folder, console=console)
    return evaluate(folder, console=console)


def is_done(folder: Path) -> bool:
    """Was the run tested to the end, not stopped on the way?"""
    return "accuracy" in read_evaluation(folder) and is_evaluated(folder)


def _check_reusable(job: Job) -> None:
    config = job.folder / CONFIG
    if config.exists() and read_config(config) != job.config:
        raise FileExistsError(
            f"{job.folder} was trained with other settings; choose another --out, or remove it"
        )


def _say_used_again(folder: Path, console: Console) -> None:
    console.print(f"{folder}: trained before, used again", highlight=False)


def _train_side_by_side(jobs: Sequence[Job], workers: int, console: Console) -> None:
    # Those of many views take longest and come first, so that no core waits for one of them at the end.
    jobs = sorted(jobs, key=lambda job: -len(job.config.method.views(job.config.augment)))
    try:
        with stopped_like_ctrl_c(), training_bars(console) as bars:
            shown = _Shown(jobs, bars, console)
            for done in run_all(_work, jobs, workers=workers, started=shown.start, tick=shown.update):
                shown.end(done)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command resumes it") from None


def _work(job: Job) -> list[str]:
    """In a worker. Returns its warnings: the first process shows progress, from what the run logs."""
    lines = io.StringIO()
    train_once(job.config, job.folder, Terminal(file=lines, width=10_000))
    return [line for line in lines.getvalue().splitlines() if line.startswith(WARNING)]


class _Shown:
    """The progress of runs that other processes train: bars on a terminal, else lines now and then."""

    def __init__(self, jobs: Sequence[Job], bars: Progress, console: Console) -> None:
        self._jobs, self._bars, self._console = jobs, bars, console
        self._running: dict[int, TaskID] = {}
        self._last = time.monotonic()

    def start(self, number: int) -> None:
        job = self._jobs[number]
        steps = job.config.train.steps
        visible = self._console.is_terminal
        task = self._bars.add_task(
            job.folder.name, total=steps, visible=visible, loss="-", rate="-", speed="-"
        )
        self._running[number] = task

    def update(self) -> None:
        """What the runs have logged by now."""
        speaks = not self._console.is_terminal and time.monotonic() - self._last > PLAIN_LINE_SECONDS
        for number, task in self._running.items():
            job = self._jobs[number]
            if (row := last_row(job.folder)) is not None:
                self._show(job, task, row, speaks)
        if speaks:
            self._last = time.monotonic()

    def _show(self, job: Job, task: TaskID, row: dict[str, Any], speaks: bool) -> None:
        total, done, seconds = job.config.train.steps, row["step"] + 1, max(row["seconds"], 1e-3)
        speed = f"{job.config.train.batch * done / seconds:,.0f}"
        title = job.folder.name + (": evaluating" if done == total else "")
        loss, rate = f"{row['loss']:.3f}", f"{row['learning_rate']:.3g}"
        self._bars.update(task, completed=done, description=title, loss=loss, rate=rate, speed=speed)
        if speaks:
            left = seconds / done * (total - done)
            line = f"{title}  step {done}/{total}  loss {loss}  {speed} images/s  left {left:.0f} s"
            self._console.print(line, soft_wrap=True, highlight=False)

    def end(self, done: Done) -> None:
        """Raises an error for a run that failed; the others are stopped, and resumed by the next call."""
        job = self._jobs[done.number]
        self._bars.remove_task(self._running.pop(done.number))
        if done.reason:
            text = f"{job.folder}: {done.reason}"
            raise RuntimeError(f"{text}\n{done.details}") if done.details else ValueError(text)
        for line in done.result:
            self._console.print(f"{job.folder}: {line}", soft_wrap=True, highlight=False)
        self._console.print(f"{job.folder}: trained and evaluated", soft_wrap=True, highlight=False)


def last_row(folder: Path) -> dict[str, Any] | None:
    """The last whole line of metrics.jsonl, which its run may be writing just now."""
    try:
        content = read_regular(folder / METRICS, JSON_FILE, inside=folder)
    except FileNotFoundError:
        return None
    whole = content.rpartition(b"\n")[0]
    try:
        row = json.loads(whole.rpartition(b"\n")[2])
    except ValueError:  # none yet
        return None
    needed = ("step", "loss", "learning_rate", "seconds")
    return row if isinstance(row, dict) and all(name in row for name in needed) else None
