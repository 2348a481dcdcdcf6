"""How long `ropaws explore` takes for a round, and for what it computes once, by the number of images.

python benchmarks/explore_refit.py     writes results/explore_refit.json

Generated features stand in for images here: time does not depend on what they show. Ten classes with eight
labels each, and as many answers that say out-of-class.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import write_results

from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.explore import fitting
from ropaws.explore.fitting import Answered
from ropaws.insight import neighbors, pool_map

SIZES = (1_000, 10_000, 100_000)
CLASSES, LABELS, DIMS = 10, 8, 256


def main() -> None:
    found = {}
    for images in SIZES:
        found[str(images)] = measured(images)
        load = round(os.getloadavg()[0], 1)
        facts = {"load_average": load, "classes": CLASSES, "labels": LABELS, "seconds": found}
        write_results("explore_refit", facts)  # the last one takes minutes


def measured(images: int) -> dict[str, float]:
    points, answered = generated(images)
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        seconds[name] = round(time.perf_counter() - began, 1)
        return result

    nothing = answered._replace(labels=torch.full((images,), UNLABELED), classes=())
    timed("first suggestions", lambda: fitting.cold_start(points, nothing))
    fitted = timed("refit", lambda: fitting.fit_round(points, answered, lambda *_: None))
    timed("accuracy estimate", lambda: fitting.estimate(points, answered, fitted, lambda *_: None))
    timed("map", lambda: pool_map.full_map(points))
    timed("near duplicates", lambda: neighbors.near_duplicates(points))
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
