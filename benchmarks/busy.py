"""How threads should wait: training steps per second on a quiet machine, and with other programs beside.

python benchmarks/busy.py               some ten minutes on two cores; writes results/busy.json
python benchmarks/busy.py --turns 5     quicker and rougher

The threads of OpenMP meet after every operation. How long a thread spins before it sleeps until the others
have come is fixed when torch is loaded, so each way of waiting is a process of its own. All are started once
and take turns: for a quarter of a second one of them takes training steps while the others sleep. The load is
stated: 0, 1 or 2 programs that compute without a pause, on one thread each, or another training with torch's
default threads. "ours" is what the command line sets.

python benchmarks/busy.py --command     `ropaws train` itself, alone and with another training beside

The command sees who else computes and chooses its number of threads. Its fair share beside a training is half
of its speed alone; runs with all threads, as without that choice, take turns with those that choose.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from step_time import training_steps
from timing import (
    WAITING_VARIABLES,
    TurnTaker,
    answer_requests,
    killed_at_the_end,
    median_ratio,
    programs_beside,
    turn_takers,
    write_results,
)
from torch import nn

from ropaws import equations as eq
from ropaws.__main__ import WAITING
from ropaws.core.hardware import keep_freed_memory

TURN_SECONDS = 0.25
TRAINING = "training"  # as a load
LOADS = ("0", "1", "2", TRAINING)
TASKS = ("demo", "head")
# The environment of each way, before torch is loaded.
WAYS: dict[str, dict[str, str]] = {
    "default": {},
    "ours": WAITING,
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    **{f"spin {count}": {**WAITING, "GOMP_SPINCOUNT": str(count)} for count in (1_000, 10_000, 30_000)},
    "spin 3000 alone": {"GOMP_SPINCOUNT": "3000"},  # without the policy
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def head_step() -> Callable[[], None]:
    """A step of a linear head on features: small operations, where waiting weighs most."""
    features, labels = torch.randn(1024 + 160, 1280), torch.eye(10).repeat(16, 1)
    head = nn.Linear(1280, 256)
    optimizer = torch.optim.Adam(head.parameters())

    def step() -> None:
        queries, support = head(features).split([1024, 160])
        eq.mean_entropy(eq.soft_nn(queries, support, labels)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def child() -> None:
    """The mean seconds of a step of the task that is asked for."""
    keep_freed_memory()
    torch.manual_seed(0)
    demo = training_steps("demo", channels=1, size=28, classes=5)["ropaws"]
    tasks = {"demo": demo, "head": head_step()}

    def take_steps(task: str) -> float:
        began, steps = time.perf_counter(), 0
        while steps == 0 or time.perf_counter() < began + TURN_SECONDS:
            tasks[task]()
            steps += 1
        return (time.perf_counter() - began) / steps

    answer_requests(take_steps)


def train_forever() -> None:
    step = training_steps("demo", channels=1, size=28, classes=5)["ropaws"]
    while True:
        step()


def beside(load: str) -> contextlib.AbstractContextManager[object]:
    if load == TRAINING:
        plain = {name: value for name, value in os.environ.items() if name not in WAITING_VARIABLES}
        return killed_at_the_end([subprocess.Popen([sys.executable, __file__, "--train"], env=plain)])
    return programs_beside(int(load))


def measured(takers: dict[str, TurnTaker], task: str, load: str, turns: int) -> dict[str, object]:
    """Steps per second of each way, and its speed against the default: medians over turns."""
    seconds: dict[str, list[float]] = {way: [] for way in takers}
    with beside(load):
        for _ in range(turns):
            for way, taker in takers.items():
                seconds[way].append(taker.ask(task))
    return {
        "steps_per_second": {way: round(1 / statistics.median(times), 2) for way, times in seconds.items()},
        "times_default": {
            way: round(median_ratio(seconds["default"], times), 3) for way, times in seconds.items()
        },
        "turns": turns,
    }


COMMAND_STEPS, FIRST_STEPS = 14, 2  # the first ones warm up


def command_speed(load: str, settings: dict[str, str]) -> tuple[float, int]:
    """Steps per second of `ropaws train`, and the number of threads that it has recorded."""
    plain = {name: value for name, value in os.environ.items() if name not in WAITING_VARIABLES}
    with beside(load), tempfile.TemporaryDirectory() as folder:
        time.sleep(5.0 if load != "0" else 0.0)  # until it has loaded torch
        run = Path(folder) / "run"
        options = ["--recipe", "demo", "--train.steps", str(COMMAND_STEPS), "--no-report", "--out", str(run)]
        command = [sys.executable, "-m", "ropaws", "train", *options]
        subprocess.run(command, env={**plain, **settings}, check=True, capture_output=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        seconds = rows[-1]["seconds"] - rows[FIRST_STEPS - 1]["seconds"]
        threads = json.loads((run / "environment.json").read_text())["threads"]
    return (len(rows) - FIRST_STEPS) / seconds, threads


def measured_command(turns: int) -> dict[str, object]:
    ways = {"chooses": {}, "all threads": {"OMP_NUM_THREADS": str(os.cpu_count()), **WAITING}}
    speed: dict[str, list[float]] = {}
    threads: dict[str, list[int]] = {}
    for _ in range(turns):
        for way, settings in ways.items():
            for load in ("0", TRAINING):
                found, used = command_speed(load, settings)
                speed.setdefault(f"{way}, {load} beside", []).append(round(found, 3))
                threads.setdefault(f"{way}, {load} beside", []).append(used)
    alone = max(statistics.median(speed[f"{way}, 0 beside"]) for way in ways)
    share = {
        way: round(statistics.median(speed[f"{way}, {TRAINING} beside"]) / (alone / 2), 3) for way in ways
    }
    return {"of_fair_share": share, "steps_per_second": speed, "threads": threads, "turns": turns}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=25, help="turns of every way (default: 25)")
    parser.add_argument("--loads", nargs="+", default=LOADS, choices=LOADS, help="beside (default: all)")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS, help="default: all")
    parser.add_argument("--command", action="store_true", help="`ropaws train` beside a training, alone")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train_forever()
    if options.child:
        child()
        return
    if options.command:
        write_results("busy", {"the command, training beside": measured_command(options.turns)})
        return
    with turn_takers({way: ([__file__, "--child"], settings) for way, settings in WAYS.items()}) as takers:
        for task in options.tasks:
            for taker in takers.values():
                taker.ask(task)  # warm up
            for load in options.loads:
                found = measured(takers, task, load, options.turns)
                write_results("busy", {f"{task}, {load} beside": found})


if __name__ == "__main__":
    main()
