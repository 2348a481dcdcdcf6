"""Timing that other programs on the machine cannot tilt: interleaved, in one process, medians."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


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
