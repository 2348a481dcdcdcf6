"""Timing that other programs on the machine cannot tilt: interleaved, in one process, medians."""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")  # read when torch is loaded
BUSY_PROGRAM = "while True: pass"


def interleaved(
    tasks: dict[str, Callable[[], object]], repeats: int, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each task, taken turn by turn, so that a busy moment hits all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(warm_up + repeats):
        for name, task in tasks.items():
            began = time.perf_counter()
            task()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def median_ratio(slow: list[float], fast: list[float]) -> float:
    """Median over turns of slow / fast."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


class TurnTaker:
    """A process that works only when it is asked: for what is fixed when a process starts."""

    def __init__(self, command: Sequence[str], settings: Mapping[str, str]) -> None:
        plain = {name: value for name, value in os.environ.items() if name not in WAITING_VARIABLES}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env={**plain, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: str) -> Any:
        """What the process answers to one line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{request}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.process.args} has ended")
        return json.loads(answer)


@contextlib.contextmanager
def turn_takers(
    ways: Mapping[str, tuple[Sequence[str], Mapping[str, str]]],
) -> Iterator[dict[str, TurnTaker]]:
    """Processes that take turns: name: (command, environment before torch is loaded)."""
    started = {name: TurnTaker(*way) for name, way in ways.items()}
    try:
        yield started
    finally:
        for taker in started.values():
            taker.process.kill()
            taker.process.wait()


def answer_requests(answer: Callable[[str], object]) -> None:
    """The life of a turn taker: a JSON answer to every line."""
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), flush=True)


def programs_beside(count: int) -> contextlib.AbstractContextManager[None]:
    """A stated load: programs that compute without a pause, on one thread each."""
    return killed_at_the_end([subprocess.Popen([sys.executable, "-c", BUSY_PROGRAM]) for _ in range(count)])


@contextlib.contextmanager
def killed_at_the_end(running: Sequence[subprocess.Popen[Any]]) -> Iterator[None]:
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def read_results(name: str) -> dict[str, Any]:
    """What benchmarks/results/<name>.json has already."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_results(name: str, results: dict[str, object]) -> None:
    """Show and put into benchmarks/results/<name>.json, with what it was measured on."""
    for key, value in results.items():
        print(f"{key}: {value}")
    RESULTS.mkdir(exist_ok=True)
    machine = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**read_results(name), **results, "machine": machine}, indent=2) + "\n")
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
