"""How threads should wait: training steps per second on a quiet machine, and with other programs beside.

python benchmarks/busy.py               some ten minutes on two cores; writes results/busy.json
python benchmarks/busy.py --turns 5     quicker and rougher

The threads of OpenMP meet after every operation. How long a thread spins before it sleeps until the others
have come is fixed when torch is loaded, so each way of waiting is a process of its own. All are started once
and take turns: for a quarter of a second one of them takes training steps while the others sleep. The load is
stated: 0, 1 or 2 programs that compute without a pause, on one thread each. "ours" is what the command line sets.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from step_time import training_steps
from timing import write_results
from torch import nn

from ropaws import equations as eq
from ropaws.__main__ import WAITING
from ropaws.training.hardware import keep_freed_memory

TURN_SECONDS = 0.25
LOADS = (0, 1, 2)
BUSY_PROGRAM = "while True: pass"
TOUCHED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
# The environment of each way, before torch is loaded.
WAYS: dict[str, dict[str, str]] = {
    "default": {},
    "ours": WAITING,
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    **{f"spin {count}": {"GOMP_SPINCOUNT": str(count)} for count in (1_000, 3_000, 10_000, 30_000)},
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
    """For each line "task seconds": take steps for so long, and answer with their mean seconds."""
    keep_freed_memory()
    torch.manual_seed(0)
    demo = training_steps("demo", channels=1, size=28, classes=5)["ropaws"]
    tasks = {"demo": demo, "head": head_step()}
    for task in (*tasks.values(), *tasks.values()):
        task()
    print("ready", flush=True)
    for line in sys.stdin:
        name, seconds = line.split()
        began, steps = time.perf_counter(), 0
        while time.perf_counter() < began + float(seconds):
            tasks[name]()
            steps += 1
        print(json.dumps((time.perf_counter() - began) / steps), flush=True)


@contextlib.contextmanager
def children() -> Iterator[dict[str, Callable[[str], float]]]:
    """A function for each way of waiting: the mean seconds of a step of a task, taken now."""
    plain = {name: value for name, value in os.environ.items() if name not in TOUCHED}
    started = {
        way: subprocess.Popen(
            [sys.executable, __file__, "--child"],
            env={**plain, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for way, settings in WAYS.items()
    }

    def ask(way: str, task: str) -> float:
        process = started[way]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{task} {TURN_SECONDS}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    try:
        for process in started.values():
            assert process.stdout is not None
            process.stdout.readline()
        yield {way: (lambda task, way=way: ask(way, task)) for way in started}
    finally:
        for process in started.values():
            process.kill()


@contextlib.contextmanager
def programs_beside(count: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", BUSY_PROGRAM]) for _ in range(count)]
    try:
        yield
    finally:
        for program in running:
            program.kill()


def measured(ask: dict[str, Callable[[str], float]], task: str, load: int, turns: int) -> dict[str, object]:
    """Steps per second of each way, and its speed against the default: medians over turns."""
    seconds: dict[str, list[float]] = {way: [] for way in ask}
    with programs_beside(load):
        for _ in range(turns):
            for way, step in ask.items():
                seconds[way].append(step(task))
    default = seconds["default"]
    return {
        "steps_per_second": {way: round(1 / statistics.median(values), 2) for way, values in seconds.items()},
        "times_default": {
            way: round(statistics.median(a / b for a, b in zip(default, values, strict=True)), 3)
            for way, values in seconds.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=25, help="turns of every way (default: 25)")
    parser.add_argument("--loads", type=int, nargs="+", default=LOADS, help="programs beside (default: 0 1 2)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    with children() as ask:
        for task in ("demo", "head"):
            for load in options.loads:
                found = measured(ask, task, load, options.turns)
                write_results("busy", {f"{task}, {load} programs beside": found})


if __name__ == "__main__":
    main()
