"""Pools that do not fit into memory: seconds and memory up to ten million rows of 128, memory-mapped.

python benchmarks/large_pools.py [--largest 10000000] [--work FOLDER] [--only TASK ...] [--sizes ROWS ...]

The rows are those of the embedded garments (128 principal components of the pixels) over and over, each with
noise of its own: real in kind, but for time and memory only; accuracy is in propagation.py. One file of
float32 rows serves all sizes and is deleted when all tasks are done. Every measurement has its own process:
seconds on the wall, seconds of CPU, and the peak of anonymous memory (RssAnon, every 5 ms) above what it was
before, which leaves out the pages of the mapped file that the system can drop at any time. Answers, such as
`transduction_` with 8 bytes per row, are counted. It can be interrupted: sizes that are in
results/propagation.json already are left out, unless --again. Needs 512 bytes of disk per row, and half as
many for a table.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from propagation import DIMS, closed_form, embedded
from timing import read_results, write_results

import ropaws
from ropaws import RoPAWSClassifier
from ropaws.cli.main import main as command_line

NOISE = 0.02  # standard deviation per dimension, of rows of unit length
WRITTEN = 100_000  # rows at a time
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
DATA, SMALL, RUN = "rows.npy", "small.npz", "run"


def labels(count: int) -> np.ndarray:
    """Of the first rows: those of the garments."""
    known = embedded().labels
    found = np.full(count, -1)
    found[: len(known)] = known[:count]
    return found


def propagation_alone(work: Path, count: int) -> object:
    return closed_form().fit(rows(work, count), labels(count))


def whole_classifier(work: Path, count: int) -> object:
    return RoPAWSClassifier().fit(rows(work, count), labels(count))


def in_domain(work: Path, count: int) -> object:
    """Asked of a classifier that is fitted already, once for all sizes."""
    return fitted(work).in_domain(rows(work, count))


def predict(work: Path, count: int) -> object:
    """ropaws predict --propagate, from an .npy file to a table."""
    source, table = work / f"{count}.npy", work / f"{count}.csv"
    command_line(["predict", str(work / RUN), str(source), "--propagate", "--top", "1", "--out", str(table)])
    return None


TASKS: dict[str, Callable[[Path, int], object]] = {
    "propagation alone": propagation_alone,
    "RoPAWSClassifier()": whole_classifier,
    "in_domain": in_domain,
    "predict --propagate": predict,
}


def rows(work: Path, count: int) -> np.ndarray:
    found: np.ndarray = np.load(work / DATA, mmap_mode="r")[:count]
    return found


def fitted(work: Path) -> RoPAWSClassifier:
    with np.load(work / SMALL) as small:
        return RoPAWSClassifier(head=None).fit(small["features"], small["labels"])


def prepare(work: Path, largest: int) -> None:
    """The rows, a small file of them and a run that was trained on it."""
    work.mkdir(parents=True, exist_ok=True)
    base = embedded().points
    if not (work / DATA).exists():
        temporary = work / "rows.tmp.npy"
        array = np.lib.format.open_memmap(temporary, "w+", np.float32, (largest, DIMS))
        for start in range(0, largest, WRITTEN):
            random = np.random.default_rng(start)
            count = min(WRITTEN, largest - start)
            noise = random.standard_normal((count, DIMS), np.float32)
            array[start : start + count] = base[np.arange(start, start + count) % len(base)] + NOISE * noise
        array.flush()
        temporary.rename(work / DATA)
    if not (work / RUN).exists():
        np.savez(work / SMALL, features=base, labels=embedded().labels)
        options = ["--features", str(work / SMALL), "--out", str(work / RUN)]
        command_line(["train", *options])


@contextlib.contextmanager
def file_of(work: Path, task: str, count: int) -> Iterator[None]:
    """An .npy file of so many rows, where a task reads one."""
    path = work / f"{count}.npy"
    if task != "predict --propagate":
        yield
        return
    try:
        if count == len(rows(work, max(SIZES))):
            os.link(work / DATA, path)
        else:
            np.save(path, rows(work, count))
        yield
    finally:
        for made in work.glob(f"{count}.*"):
            made.unlink()


def anonymous() -> int:
    """Bytes of this process that are no pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


class Peak(threading.Thread):
    """The most anonymous memory while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.done = anonymous(), threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.005):
            self.bytes = max(self.bytes, anonymous())


def alone(work: Path, task: str, count: int) -> None:
    """One measurement in this process: prints it as JSON."""
    TASKS[task](work, 2000) if task != "predict --propagate" else ropaws.Run(work / RUN).model
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory goes back, or it would hide what comes
    before, peak = anonymous(), Peak()
    peak.start()
    wall, cpu = time.perf_counter(), time.process_time()
    answer = TASKS[task](work, count)  # held while the memory is measured
    found = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    peak.done.set()
    peak.join()
    print(json.dumps({**found, "megabytes": round((peak.bytes - before) / 2**20)}))
    del answer


def slope(measured: dict[str, dict[str, float]]) -> float:
    """Of log CPU seconds against log rows, between the two largest sizes: 1 is linear."""
    (few, first), (many, second) = sorted((int(size), found) for size, found in measured.items())[-2:]
    return math.log(second["cpu_seconds"] / first["cpu_seconds"]) / math.log(many / few)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--largest", type=int, default=max(SIZES))
    parser.add_argument("--work", type=Path, default=Path("runs/large_pools"))
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES), metavar="ROWS")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone(options.work, options.alone[0], int(options.alone[1]))
        return
    prepare(options.work, options.largest)
    for task in options.only:
        for count in options.sizes:
            found = read_results("propagation").get("scale", {})
            measured = found.setdefault(task, {}).setdefault("rows", {})
            if count > options.largest or (str(count) in measured and not options.again):
                continue
            with file_of(options.work, task, count):
                command = [sys.executable, __file__, "--work", str(options.work)]
                told = subprocess.run(
                    [*command, "--alone", task, str(count)], stdout=subprocess.PIPE, text=True, check=True
                ).stdout
            measured[str(count)] = json.loads(told.splitlines()[-1])
            found[task]["slope"] = slope(measured) if len(measured) > 1 else None
            write_results("propagation", {"scale": found})
    if set(options.only) == set(TASKS) and set(options.sizes) == set(SIZES):
        shutil.rmtree(options.work)


if __name__ == "__main__":
    main()
