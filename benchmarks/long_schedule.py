"""The paper in its own regime, small: whole schedules from scratch with out-of-class images in the pool.

python benchmarks/long_schedule.py [--data FOLDER] [--work FOLDER] [--share 1/2] [--report]

garments: 200 images of each of five garments and 1,000 of the five others, 28 px, from the embedded pool;
curated: without the others. animals: 200 images of each of CIFAR-10's six animals and 800 of its vehicles,
32 px (FOLDER of --data has cifar10.npz). -14, -16: half the pixels per side and half the channels, a tenth of
the time. The small network, batches of 128.

paws, ropaws-paper and supervised have the settings of the paper's CIFAR recipe: LARS with its learning rates,
10 epochs of 600 as warm-up, cosine, 2 large views and 6 small crops, supports with views, tau_prior 0.1, k 1,
r 5, an MLP head, no contrast, no judge. Because the batch is half of the paper's, supports have half of its
views, so that the ratio of supports to unlabeled images stays. ropaws has the settings of `ropaws demo
--from-scratch`. FIRST>SECOND has phases, as in `ropaws bench`.

Every cell is a folder of runs below --work. It can be stopped at any time: the same command continues where
the last checkpoint is. Cells of results/long_schedule.json are not run again, even without their folders.
--share lets processes work side by side; --report only summarizes what is finished.
Writes results/long_schedule.json after each cell, and docs/long_schedule.png.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_data import ANIMALS, VEHICLES, chosen, write
from feature_collections import Images, _arrays, _file
from schedule_figure import draw
from time_to_accuracy import shortened
from timing import write_results
from torch import Tensor

from ropaws import Run, RunConfig, recipes, resume, train
from ropaws.bench.entries import SUPPORT_ROWS, Data, Task, phases_of
from ropaws.core.files import write_json
from ropaws.core.hardware import keep_freed_memory
from ropaws.core.records import Outputs
from ropaws.core.run_layout import CONFIG, METRICS, MODEL
from ropaws.core.terminal import Terminal
from ropaws.embedding.backbones import ModelConfig
from ropaws.insight.metrics import evaluation_figures
from ropaws.methods import Method, RoPAWS
from ropaws.pool.corpus import in_memory
from ropaws.pool.datasets.catalog import embedded_truth
from ropaws.pool.sources import load_corpus
from ropaws.recipes.paper import cifar
from ropaws.run.config import with_method, with_steps
from ropaws.run.train import TrainInputs
from ropaws.training.checkpoint import snapshots

PER_CLASS = 200
BATCH = 128
RESULT = "result.json"
CHECKPOINT_EVERY = 50  # steps: half a minute
FIRST = 10  # steps, in which a network that has learned nothing takes all images for out-of-class
POINTS = 8  # tests of a phase
MAIN = ("paws", "ropaws-paper", "supervised", "ropaws")
PAIR = MAIN[:2]
PAPER = RoPAWS(prior_temperature=0.1)
# What an entry trains, where it is not what `ropaws bench` gives it. The changes are one each.
METHODS: dict[str, Method] = {
    "ropaws": recipes.demo().method,
    "weighted me-max": replace(PAPER, reweight_entropy=True),
    "no reweighting": replace(PAPER, reweighting=False),
    "no prior": replace(PAPER, in_domain_prior=False),
    "no density": replace(PAPER, semi_supervised_density=False),
    "tau_prior 0.5": replace(PAPER, prior_temperature=0.5),
    "tau_prior auto": replace(PAPER, prior_temperature="auto"),
}
OURS = ("ropaws",)
SINGLE_CHANGES = tuple(name for name in METHODS if name not in OURS)
PARTS = tuple(name for name in SINGLE_CHANGES if name.startswith("no "))


@dataclass(frozen=True)
class Cell:
    """A schedule of its own."""

    data: str
    labels: int  # per class
    epochs: int  # in all phases
    entry: str
    seed: int = 0

    @property
    def name(self) -> str:
        entry = self.entry.replace(">", "+").replace(" ", "_")
        return f"{self.data}-{self.labels}-{self.epochs}-{entry}-seed{self.seed}"


def cells() -> list[Cell]:
    """In the order of what they can tell for their cost, each once."""
    found = []
    for side in ("-14", ""):  # at 14 px first: a tenth of the time
        pool, curated, other = f"garments{side}", f"curated{side}", "animals-16" if side else "animals"
        found += [Cell(pool, 25, 200, entry) for entry in MAIN]
        found += [Cell(pool, 25, epochs, entry) for epochs in (50, 100, 600) for entry in MAIN]
        found += [Cell(pool, 25, epochs, entry, seed=1) for epochs in (200, 50) for entry in MAIN]
        found += [Cell(pool, 25, 200, entry, seed) for seed in (2, 3, 4) for entry in MAIN if side]
        found += [Cell(curated, 25, 200, entry) for entry in MAIN]
        found += [Cell(other, 25, 200 if side else 100, entry) for entry in MAIN]
        found += [Cell(pool, 25, 200, entry) for entry in SINGLE_CHANGES]
        found += [Cell(pool, 25, 200, f"simclr>{entry}") for entry in PAIR]
        found += [Cell(pool, 25, 200, entry, seed) for seed in (1, 2) for entry in PARTS if side]
        found += [Cell(pool, 4, epochs, entry) for epochs in (200, 600) for entry in MAIN]
        found += [Cell(curated, 4, 200, entry) for entry in MAIN]
    return list(dict.fromkeys(found))


def halved(images: np.ndarray) -> np.ndarray:
    """Means of 2 x 2 pixels. (n, h, w) or (n, h, w, channels) -> (n, h / 2, w / 2, ...)"""
    n, height, width, *channels = images.shape
    blocks = images.reshape(n, height // 2, 2, width // 2, 2, *channels)
    return blocks.mean(axis=(2, 4)).round().astype(np.uint8)


def garments(
    data: Path | None, path: Path, *, outside: int, small: bool = False, per_class: int = PER_CLASS
) -> None:
    """A part of the embedded pool, with all of its tests."""
    corpus, truth = load_corpus(recipes.demo().data), embedded_truth().labels.numpy()
    images, tests = (in_memory(part).squeeze(1).numpy() for part in (corpus.train_images, corpus.test_images))
    if small:
        images, tests = halved(images), halved(tests)
    classes, labels = len(corpus.class_names), corpus.test_labels.numpy()
    rows = np.concatenate([np.flatnonzero(truth == c)[:per_class] for c in range(classes)])
    known, others = labels >= 0, np.flatnonzero(truth >= classes)[:outside]
    inside, known_tests = (images[rows], truth[rows]), (tests[known], labels[known])
    write(path, inside, images[others], known_tests, tests[~known], list(corpus.class_names))


def animals(data: Path | None, path: Path, *, small: bool = False) -> None:
    ten = _arrays(data, "cifar10")
    if small:
        halves = halved(ten.images), halved(ten.test_images)
        ten = ten._replace(images=halves[0], test_images=halves[1])
    tests = Images(ten.test_images, ten.test_labels, None, None)
    with np.load(_file(data, "cifar10")) as arrays:
        names = [str(name) for name in arrays["class_names"][list(ANIMALS)]]
    outside, out_tests = (chosen(part, VEHICLES, PER_CLASS)[0] for part in (ten, tests))
    write(path, chosen(ten, ANIMALS, PER_CLASS), outside, chosen(tests, ANIMALS, PER_CLASS), out_tests, names)


MAKERS: dict[str, Callable[[Path | None, Path], None]] = {
    "garments": partial(garments, outside=PER_CLASS * 5),
    "curated": partial(garments, outside=0),
    "garments-14": partial(garments, outside=PER_CLASS * 5, small=True),
    "curated-14": partial(garments, outside=0, small=True),
    "animals": animals,
    "animals-16": partial(animals, small=True),
}

BACKBONES = dict.fromkeys(("garments-14", "curated-14", "animals-16"), "small-16")  # of the others: small


def settings(cell: Cell, data: Data, task: Task) -> RunConfig:
    """What all phases of a cell share."""
    pool, size = len(task.corpus.train_images), task.corpus.train_images.shape[2]
    if cell.entry in OURS:
        base, steps = recipes.demo(), cell.epochs * (pool // BATCH)
        per_class = min(cell.labels, 8)
        views = max(1, round(SUPPORT_ROWS / (len(task.corpus.class_names) * per_class)))
        base = with_steps(replace(base, augment=replace(base.augment, size=size)), steps)
        base = replace(base, support=replace(base.support, images_per_class=per_class, views=views))
    else:
        base = cifar(task.name, pool, labels_per_class=cell.labels, batch=BATCH)
        small = round(base.augment.small_size / base.augment.size * size)
        base = replace(
            shortened(base, pool, cell.epochs),
            augment=replace(base.augment, size=size, small_size=small),
            support=replace(base.support, views=base.support.views // 2),
        )
    source = replace(data.config(), labels_per_class=cell.labels)
    model = ModelConfig(backbone=BACKBONES.get(cell.data, "small"))
    return replace(base, model=model, data=source, train=replace(base.train, seed=cell.seed, threads=1))


def phases(cell: Cell, data: Data, task: Task) -> list[tuple[str, RunConfig]]:
    """The runs of a cell; each starts from the last one's weights."""
    base, found = settings(cell, data, task), []
    for phase in phases_of(cell.entry, frozen=False, given=METHODS):
        steps = round(phase.share * base.train.steps)
        config = with_method(base, phase.method)
        warmup = round(config.optim.warmup * phase.share)
        train = replace(
            config.train, steps=steps, keep_every=-(-steps // POINTS), checkpoint_every=CHECKPOINT_EVERY
        )
        config = replace(config, optim=replace(config.optim, warmup=warmup), train=train)
        found.append((f"{len(found) + 1}-{phase.name.replace(' ', '_')}", config))
    return found


def run_cell(cell: Cell, data: Data, folder: Path) -> dict[str, Any]:
    """Train or continue, test the kept weights of every phase."""
    task = data.load()
    init, points, seconds, earlier = None, [], 0.0, 0
    for name, config in phases(cell, data, task):
        config = replace(config, model=replace(config.model, init=init))
        run = trained(config, folder / name, task)
        before = {"step": earlier, "seconds": round(seconds)}
        points += [
            point | {name: point[name] + begun for name, begun in before.items()}
            for point in curve(run, task)
        ]
        seconds += metrics(folder / name)[-1]["seconds"]
        earlier += config.train.steps
        init = folder / name / MODEL
    return {**asdict(cell), "steps": earlier, "seconds": round(seconds), "curve": points}


def trained(config: RunConfig, folder: Path, task: Task) -> Run:
    quiet, inputs = Terminal(quiet=True), TrainInputs(corpus=task.corpus, in_class=task.in_class)
    if not (folder / MODEL).exists():
        if (folder / CONFIG).exists():
            resume(folder, console=quiet, inputs=inputs)
        else:
            train(config, folder, console=quiet, inputs=inputs)
    return Run(folder, corpus=task.corpus, console=quiet)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def curve(run: Run, task: Task) -> list[dict[str, float]]:
    """Figures at the kept weights and at the end, with what was logged in the steps before each."""
    kept = {step: run.at_snapshot(weights) for step, weights in snapshots(run.path).items()}
    rows, points, before = metrics(run.path), [], 0
    for step, at in sorted({**kept, run.config.train.steps: run}.items()):
        tests = at.outputs(task.corpus.test_images)
        found = evaluation_figures(tests, task.corpus.test_labels)
        found |= pool_figures(at.outputs(task.corpus.train_images), task, run.facts.split.indices)
        found |= logged(rows[before:step], float(task.in_class.double().mean()))
        seconds = round(rows[step - 1]["seconds"])
        points.append(
            {"step": step, "seconds": seconds, **{name: round(value, 4) for name, value in found.items()}}
        )
        before = step
    return points


def pool_figures(outputs: Outputs, task: Task, labeled: Tensor) -> dict[str, float]:
    """Of pseudo-labels: how many are right, and the largest class among those of out-of-class images."""
    hidden = torch.ones(len(task.in_class), dtype=torch.bool)
    hidden[labeled] = False
    predicted, inside = outputs.probs.argmax(dim=1), task.in_class & hidden
    right = predicted[inside] == task.corpus.train_labels[inside]
    found = {"pseudo_accuracy": float(right.double().mean())}
    if not task.in_class.all():
        counts = torch.bincount(predicted[~task.in_class], minlength=outputs.probs.shape[1])
        found["largest_class_out"] = float(counts.max() / counts.sum())
    return found


def logged(rows: list[dict[str, float]], share: float) -> dict[str, float]:
    """Means over some steps: parts of the loss, and the in-domain weight in and out of the classes."""
    found = {
        name: statistics.mean(row[name] for row in rows)
        for name in ("loss", "consistency", "mean_entropy", "contrast", "selected", "selected_in_class")
        if name in rows[0]
    }
    if "selected_in_class" in found:
        inside = found.pop("selected_in_class")
        found["weight_in"] = inside / share
        if share < 1:
            found["weight_out"] = (found["selected"] - inside) / (1 - share)
    return found


def published() -> dict[Cell, dict[str, Any]]:
    """What earlier runs of this benchmark left, on this machine or another."""
    path = Path(__file__).parent / "results/long_schedule.json"
    rows = json.loads(path.read_text())["cells"] if path.exists() else []
    return {cell_of(row): row for row in rows}


def cell_of(row: dict[str, Any]) -> Cell:
    return Cell(*(row[field.name] for field in fields(Cell)))


def finished(work: Path) -> list[dict[str, Any]]:
    """In the order of the cells, with the mean in-domain weight of the first steps."""
    rows, before = [], published()
    for cell in cells():
        path = work / cell.name / RESULT
        if not path.exists() and cell in before:
            rows.append(before[cell])
        if path.exists():
            start = metrics(min(path.parent.glob("*/")))[:FIRST]
            weights = [step["selected"] for step in start if "selected" in step]
            first = {"first_weight": round(statistics.mean(weights), 4)} if weights else {}
            rows.append(json.loads(path.read_text()) | first)
    return rows


def report(work: Path) -> None:
    """What is finished, and how far the others are."""
    rows = finished(work)
    left = [cell for cell in cells() if cell not in {cell_of(row) for row in rows}]
    begun = {
        cell.name: sum(len(metrics(path.parent)) for path in sorted((work / cell.name).glob(f"*/{METRICS}")))
        for cell in left
        if (work / cell.name).exists()
    }
    results = {
        "settings": {"backbone": "small", "batch": BATCH, "per_class": PER_CLASS},
        "cells": rows,
        "begun": begun,
        "waiting": [cell.name for cell in left if cell.name not in begun],
    }
    write_results("long_schedule", results)
    if rows:
        draw(rows, Path(__file__).parent.parent / "docs/long_schedule.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/long-schedule"))
    parser.add_argument("--share", default="1/1", help="this process does the i-th of n shares")
    parser.add_argument("--only", nargs="+", help="cells whose names contain one of these words")
    parser.add_argument("--report", action="store_true", help="only summarize what is finished")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if options.report:
        report(options.work)
        return
    part, of = map(int, options.share.split("/"))
    before = published()
    for cell in [cell for cell in cells() if cell not in before][part - 1 :: of]:
        path = options.work / cell.name / RESULT
        if path.exists() or (options.only and not any(word in cell.name for word in options.only)):
            continue
        if not (source := options.work / f"{cell.data}.npz").exists():
            source.parent.mkdir(parents=True, exist_ok=True)
            MAKERS[cell.data](options.data, source)
        result = run_cell(cell, Data(source=str(source)), path.parent)
        write_json(path, result)
        print(cell.name, result["seconds"], result["curve"][-1], flush=True)
        report(options.work)


if __name__ == "__main__":
    main()
