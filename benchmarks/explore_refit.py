"""How long `ropaws explore` takes for a round, and for what it computes once, by the number of images.

python benchmarks/explore_refit.py [--sizes ROWS ...] [--only WHAT ...]     writes results/explore_refit.json

Generated features stand in for images here: time does not depend on what they show. Ten classes with eight
labels each, and as many answers that say out-of-class. Seconds are by the clock; on a machine that others
use as well, those that the process computed say more. "answers" are milliseconds until the server has a page
of images: the slowest of several filters and orders, without the way to the browser.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import read_results, write_results

from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.explore import fitting
from ropaws.explore.browsing import Query, browse
from ropaws.explore.fitting import Answered
from ropaws.explore.pool import ExploredPool, RunOutputs
from ropaws.explore.session import Session
from ropaws.insight import neighbors
from ropaws.pool.shards import TarMember

SIZES = (1_000, 10_000, 100_000)
CLASSES, LABELS, DIMS = 10, 8, 256
WHAT = ("first suggestions", "refit", "accuracy estimate", "map", "answers")
QUERIES = (
    Query(confidence=(0.5, 0.9)),
    Query(confidence=(0.5, 0.9), in_domain=(0.2, 0.7), sort="confidence", descending=True),
    Query(view="unlabeled", sort="confidence"),
    Query(view="out-of-class", sort="in_domain"),
    Query(predicted=3, sort="name"),
    Query(text="00123"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="ROWS")
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT, metavar="WHAT", help=", ".join(WHAT))
    options = parser.parse_args()
    for images in options.sizes:
        found = read_results("explore_refit")
        for kind, values in measured(images, options.only).items():
            kept = found.setdefault(kind, {})
            kept[str(images)] = kept.get(str(images), {}) | values
        load = round(os.getloadavg()[0], 1)
        facts = {"load_average": load, "classes": CLASSES, "labels": LABELS}
        write_results("explore_refit", {**found, **facts})  # the last one takes minutes


def measured(images: int, wanted: Sequence[str]) -> dict[str, dict[str, float]]:
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
    found: dict[str, dict[str, float]] = {"seconds": {}, "cpu_seconds": {}}
    for name in wanted:
        if name == "answers":
            found["milliseconds"] = {name: answer_milliseconds(images, points)}
            continue
        began, computed = time.perf_counter(), time.process_time()
        work[name]()
        found["seconds"][name] = round(time.perf_counter() - began, 1)
        found["cpu_seconds"][name] = round(time.process_time() - computed, 1)
    return found


def answer_milliseconds(images: int, points: torch.Tensor) -> float:
    """The slowest of the queries, each asked five times: what it takes where nothing else computes."""
    random = np.random.default_rng(0)
    outputs = RunOutputs(
        random.dirichlet(np.ones(CLASSES), images).astype(np.float32),
        random.random(images, dtype=np.float32),
        threshold=0.3,
        source="other.csv",
    )
    shards = (Path(f"/pool/{number // 10_000:04d}.tar") for number in range(images))
    shown = tuple(TarMember(shard, f"{n:09d}.jpg", 0, 1) for n, shard in enumerate(shards))
    names = tuple(f"class {number}" for number in range(CLASSES))
    pool = ExploredPool(
        shown, (None,) * images, title="pool", points=points, class_names=names, outputs=outputs
    )
    with tempfile.TemporaryDirectory() as folder:
        session = Session(pool, Path(folder) / "answers")
        seconds = []
        for query in QUERIES:
            browse(session, query)  # names are sorted and folded once
            began = [time.perf_counter()]
            for _ in range(5):
                browse(session, query)
                began.append(time.perf_counter())
            seconds.append(min(np.diff(began)))
        session.close()
    return round(1000 * float(max(seconds)), 1)


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
