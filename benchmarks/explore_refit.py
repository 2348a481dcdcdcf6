"""How long `ropaws explore` takes for a round, and for what it computes once, by the number of images.

python benchmarks/explore_refit.py [--sizes ROWS ...] [--only WHAT ...]     writes results/explore_refit.json

Generated features stand in for images here: time does not depend on what they show. Ten classes with eight
labels each, and as many answers that say out-of-class.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from timing import read_results, write_results

from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.explore import fitting
from ropaws.explore.fitting import Answered
from ropaws.insight import neighbors

SIZES = (1_000, 10_000, 100_000)
CLASSES, LABELS, DIMS = 10, 8, 256
WHAT = ("first suggestions", "refit", "accuracy estimate", "map")  # near_duplicates.py has the rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="ROWS")
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT, metavar="WHAT", help=", ".join(WHAT))
    options = parser.parse_args()
    for images in options.sizes:
        found = read_results("explore_refit").get("seconds", {})
        found[str(images)] = found.get(str(images), {}) | measured(images, options.only)
        load = round(os.getloadavg()[0], 1)
        facts = {"load_average": load, "classes": CLASSES, "labels": LABELS, "seconds": found}
        write_results("explore_refit", facts)  # the last one takes minutes


def measured(images: int, wanted: Sequence[str]) -> dict[str, float]:
    points, answered = generated(images)
    nothing = answered._replace(labels=torch.full((images,), UNLABELED), classes=())
    fitted = fitting.nothing_known(images)

    def refit() -> None:
        nonlocal fitted
        fitted = fitting.fit_round(points, answered, lambda *_: None)

    work: dict[str, Callable[[], Any]] = {
        "first suggestions": lambda: fitting.cold_start(points, nothing),
        "refit": refit,
        "accuracy estimate": lambda: fitting.estimate(points, answered, fitted, lambda *_: None),
        "map": lambda: neighbors.full_map(points),
    }
    seconds = {}
    for name in wanted:
        began = time.perf_counter()
        work[name]()
        seconds[name] = round(time.perf_counter() - began, 1)
    return seconds


def generated(images: int) -> tuple[torch.Tensor, Answered]:
    random = torch.Generator().manual_seed(0)
    kinds = torch.randint(0, 2 * CLASSES, (images,), generator=random)  # the second half is of no class
    centers = torch.randn(2 * CLASSES, DIMS, generator=random)
    points = centers[kinds] + 2 * torch.randn(images, DIMS, generator=random)
    labels = torch.full((images,), UNLABELED)
    for kind in range(CLASSES):
        labels[(kinds == kind).nonzero().squeeze(1)[:LABELS]] = kind
        labels[(kinds == kind + CLASSES).nonzero().squeeze(1)[:LABELS]] = OUT_OF_CLASS
    points = torch.nn.functional.normalize(points - points.mean(dim=0), dim=1)
    none = torch.zeros(images, dtype=torch.bool)
    return points, Answered(labels, tuple(range(CLASSES)), none, none)


if __name__ == "__main__":
    main()
