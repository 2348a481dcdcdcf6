"""The posterior of a batch at scale: closed form, iteration, and the explicit inverse of the formula.

python benchmarks/posterior.py          about ten minutes; writes results/posterior.json
python benchmarks/posterior.py --quick  up to M = 4096 only

From given votes to the posterior, M unlabeled points, two settings of the paper: CIFAR's (1280 supports,
10 classes) and ImageNet's (6720 supports, 960 classes). The reference formula is
inv(I - C_u) C_l L, evaluated from the left as the released code does. Points lie around class centers on the
sphere. Memory is the peak of a process of its own that makes the votes and solves once.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import interleaved, median_ratio, write_results

from ropaws import equations as eq

DIMS, TOLERANCE = 128, 1e-4
SETTINGS = {"cifar": (1280, 10, 0.1), "imagenet": (6720, 960, 3.0)}  # supports, classes, prior temperature
SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)


def votes(setting: str, points: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    supports, classes, prior_temperature = SETTINGS[setting]
    random = torch.Generator().manual_seed(0)
    centers = F.normalize(torch.randn(classes, DIMS, generator=random), dim=1)

    def draw(labels: torch.Tensor) -> torch.Tensor:
        noise = 0.08 * torch.randn(len(labels), DIMS, generator=random)
        return F.normalize(centers[labels] + noise, dim=1)

    labels = torch.arange(supports) % classes
    support, queries = draw(labels), draw(torch.randint(classes, (points,), generator=random))
    to_support, to_unlabeled = eq.neighbor_weights(queries, support, temperature=0.1, label_ratio=5.0)
    prior = eq.in_domain_prior(queries, support, temperature=prior_temperature)[:, None]
    return prior * to_support, prior * to_unlabeled, F.one_hot(labels, classes).float()


def by_inverse(to_support: torch.Tensor, to_unlabeled: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(torch.eye(len(to_unlabeled)) - to_unlabeled) @ to_support @ labels


def iterate(*given: torch.Tensor) -> torch.Tensor:
    return eq.propagate_until(*given, tolerance=TOLERANCE)[0]


def peak_memory(setting: str, points: int, solver: str) -> float:
    """GB of a process that does it once, over one that only imports."""
    command = [sys.executable, __file__, "--alone", setting, str(points), solver]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout))


def alone(setting: str, points: int, solver: str) -> None:
    before = peak_kilobytes()
    given = votes(setting, points)
    {"exact": eq.propagate, "iterative": iterate}[solver](*given)
    print(json.dumps((peak_kilobytes() - before) / 2**20))


def peak_kilobytes() -> int:
    """From Linux's own book-keeping: getrusage would count what the parent had before."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def measure(setting: str, points: int) -> dict[str, object]:
    given = votes(setting, points)
    ways = {"exact": lambda: eq.propagate(*given), "iterative": lambda: iterate(*given)}
    if points <= 4096:
        ways["inverse"] = lambda: by_inverse(*given)
    repeats = 5 if points <= 1024 else 3 if points <= 4096 else 1
    seconds = interleaved(ways, repeats, warm_up=1 if points <= 4096 else 0)
    exact, (iterated, movement) = eq.propagate(*given), eq.propagate_until(*given, tolerance=TOLERANCE)
    row: dict[str, object] = {
        "seconds": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "memory_gb": {name: round(peak_memory(setting, points, name), 2) for name in ("exact", "iterative")},
        "largest_row_sum": round(float(given[1].sum(dim=1).max()), 3),
        "residual": float(movement),
        "largest_error_of_iteration": float((exact - iterated).abs().max()),
    }
    if points <= 4096:
        row["times_as_fast_as_inverse"] = {
            name: round(median_ratio(seconds["inverse"], seconds[name]), 2) for name in ("exact", "iterative")
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--alone", nargs=3)
    options = parser.parse_args()
    if options.alone:
        alone(options.alone[0], int(options.alone[1]), options.alone[2])
        return
    sizes = [size for size in SIZES if size <= (4096 if options.quick else SIZES[-1])]
    for setting, (supports, classes, _) in SETTINGS.items():
        rows: dict[str, object] = {"supports": supports, "classes": classes}
        for points in sizes:
            began = time.perf_counter()
            rows[str(points)] = measure(setting, points)
            print(setting, points, rows[str(points)], f"{time.perf_counter() - began:.0f} s", flush=True)
        write_results("posterior", {setting: rows, "tolerance": TOLERANCE})


if __name__ == "__main__":
    main()
