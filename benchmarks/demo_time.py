"""Seconds of the whole demo, with its runs side by side and one after the other.

python benchmarks/demo_time.py [--workers 3 1]

On a quiet machine: what the clock shows from the command to the last file, with starting Python, training
three methods, evaluating them and writing the pages. Each number of workers is measured once, in a folder of
its own, and kept beside those of earlier calls. Writes results/demo_time.json.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import read_results, write_results


def seconds(workers: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ropaws", "demo", "--workers", str(workers)]
        began = time.monotonic()
        subprocess.run([*command, "--out", str(Path(folder) / "demo")], check=True)
        return round(time.monotonic() - began, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[3, 1])
    options = parser.parse_args()
    for workers in options.workers:
        before = os.getloadavg()[0]
        measured = {"seconds": seconds(workers), "load_average_before": round(before, 2)}
        found = read_results("demo_time").get("workers", {}) | {str(workers): measured}
        write_results("demo_time", {"cores": os.cpu_count(), "workers": found})


if __name__ == "__main__":
    main()
