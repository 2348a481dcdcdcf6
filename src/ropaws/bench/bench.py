"""`ropaws bench`: methods x data x labels x seeds, on equal terms, into one folder."""

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from ropaws import __version__
from ropaws.bench.cells import RESULT, Budget, Cell, run_cell
from ropaws.bench.entries import check_entries
from ropaws.bench.summary import REFERENCE, summarize
from ropaws.bench.tasks import Data, Network, Task
from ropaws.bench.workers import Done, run_all
from ropaws.config import differences
from ropaws.methods import import_method
from ropaws.recipes.protocols import Protocol, get_protocol
from ropaws.report.bench_page import ordered_rows, shown, write_bench_page
from ropaws.runs.atomic import read_json, write_json, write_text
from ropaws.runs.layout import REPORT

SETTINGS, RESULTS, ERROR = "bench.json", "results.json", "error.txt"
METHODS = (
    "supervised",
    "cross-entropy",
    "fixmatch",
    "openmatch",
    "iomatch",
    "paws",
    "ropaws-paper",
    "ropaws",
)
FAIRNESS = (
    "All methods of a row have the same images, the same labeled ones (files in labels/), network, batch and"
    " labeled batch. They see the same number of images, or train for the same time. The last step counts,"
    " with the moving average of the weights where a method has one; no checkpoint is chosen, least of all on"
    " test images. Settings are those of each method's paper, or were chosen on other data."
)


@dataclass(frozen=True)
class Bench:
    """Compare methods on equal terms: the same images, labels, network, augmentation and budget.

    ropaws bench --methods fixmatch iomatch paws ropaws --labels 4 25 --seeds 3 --out bench

    ropaws bench --protocol iomatch-cifar10-6-4 --methods fixmatch iomatch ropaws

    Writes results.json, report.html and a run folder of each cell. What is done is not done again: a bench
    that was killed continues, and more methods, labels or seeds may be added. A cell that fails is a row with
    its reason.
    """

    methods: tuple[str, ...] = METHODS
    """Methods by name; FIRST>SECOND trains the second from the weights of the first, as simclr>ropaws."""
    data: tuple[str, ...] = ()
    """Named datasets or mixes, or .npz files in which class -1 is out-of-class; by default the embedded
    garments."""
    labels: tuple[int, ...] = ()
    """Labels per class; by default 4, or the protocol's."""
    seeds: int = 3
    """Draws of labels, each with weights and batches of its own."""
    protocol: str | None = None
    """Instead of data, labels and steps: a protocol of the literature; --list shows them."""
    list: bool = False
    """List the protocols, with published figures, and the methods."""
    network: Network = "small"
    """small: trained from scratch. pretrained: a head on the frozen features of EfficientNet-Lite0."""
    steps: int | None = None
    """Steps of RoPAWS, by default 400 (300 on features, or the protocol's); all others see as many images."""
    equal: Literal["images", "time"] = "images"
    """What all methods have the same of: images seen, or seconds of training."""
    seconds: float = 60.0
    """With --equal time: of each cell."""
    curve: int = 4
    """Points at which accuracy is measured over training; 1 for the last step alone."""
    unseen: tuple[Path, ...] = ()
    """.npz files with `images` of no class and of kinds that are not in any pool, for testing; an .npz file
    of --data may bring its own as `unseen_images`."""
    root: Path = Path("data")
    """Folder with the official files of named datasets."""
    workers: int | None = None
    """Processes; by default one for each core, or one with a GPU."""
    out: Path = Path("bench")
    """Folder for everything."""

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("--methods is empty; name at least one")
        for name in ("methods", "data", "labels"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"--{name} has an entry twice: {' '.join(map(str, values))}")
        for name in ("seeds", "curve"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        for name in ("steps", "workers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.labels and min(self.labels) < 1:
            raise ValueError(f"--labels must be at least 1, got {min(self.labels)}")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"--seconds must be positive, got {self.seconds}")

    @property
    def budget(self) -> Budget:
        default = 300 if self.network == "pretrained" else 400
        seconds = self.seconds if self.equal == "time" else None
        return Budget(steps=self.steps or default, seconds=seconds, curve=self.curve)


def run_bench(bench: Bench, console: Console) -> dict[str, Any]:
    """Train and test all cells; the content of results.json."""
    protocol = None if bench.protocol is None else get_protocol(bench.protocol)
    bench = _with_defaults(bench, protocol)
    for name in bench.methods:
        import_method(name)
    check_entries(bench.methods, frozen=bench.network == "pretrained")
    sources = [Data(source, bench.unseen, bench.root) for source in bench.data]
    tasks = {data: data.load() for data in sources}  # its errors, before anything is written
    _check_labels(tasks, bench.labels)
    _check_settings(bench)
    cells = [
        Cell(data, labels, seed, method.replace("_", "-") if ":" not in method else method)
        for data in sources
        for labels in bench.labels
        for seed in range(bench.seeds)
        for method in bench.methods
    ]
    results = {cell: read_json(path) for cell in cells if (path := cell.folder(bench.out) / RESULT).exists()}
    waiting = [cell for cell in cells if cell not in results]
    if results:
        console.print(f"{len(results)} of {len(cells)} cells are done already", highlight=False)
    try:
        failures = _run(bench, protocol, waiting, results, console)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; the same command continues what is in {bench.out}") from None
    done = [results[cell] for cell in cells if cell in results]
    content = _content(bench, protocol, tasks, done, failures)
    write_json(bench.out / RESULTS, content)
    write_bench_page(bench.out / REPORT, content)
    for table in _tables(content):
        console.print(table)
    for line in content["failures"]:
        console.print(f"failed: {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Written: {bench.out / RESULTS}, {bench.out / REPORT}", highlight=False, soft_wrap=True)
    return content


def _with_defaults(bench: Bench, protocol: Protocol | None) -> Bench:
    if protocol is None:
        return replace(bench, data=bench.data or ("fashion-demo",), labels=bench.labels or (4,))
    if bench.data or bench.network != "small":
        raise ValueError("--protocol says which data and network; leave --data and --network out")
    labels = bench.labels or protocol.labels
    unknown = [str(count) for count in labels if count not in protocol.labels]
    if unknown:
        listed = ", ".join(map(str, protocol.labels))
        raise ValueError(f"--labels {unknown[0]}: protocol {protocol.name} has {listed} labels per class")
    steps = bench.steps or protocol.base(labels[0], protocol.sources[0]).train.steps
    return replace(bench, data=protocol.sources, labels=labels, steps=steps)


def _check_labels(tasks: Mapping[Data, Task], labels: Sequence[int]) -> None:
    for data, task in tasks.items():
        counts = task.corpus.train_labels[task.corpus.train_labels >= 0].bincount()
        if int(counts.min()) < max(labels):
            raise ValueError(
                f"--labels {max(labels)}: a class of {data.name} has {int(counts.min())} images;"
                " ask for fewer"
            )


def _check_settings(bench: Bench) -> None:
    """A folder holds cells of one kind of settings; methods, data, labels and seeds may be added."""
    settings = {
        "network": bench.network,
        "steps": bench.budget.steps,
        "equal": bench.equal,
        "seconds": bench.seconds if bench.equal == "time" else None,
        "curve": bench.curve,
        "unseen": [str(path) for path in bench.unseen],
        "protocol": bench.protocol,
    }
    path = bench.out / SETTINGS
    if path.exists():
        changed = differences(read_json(path), settings)
        if changed:
            raise ValueError(
                f"{bench.out} is a bench of other settings: {'; '.join(changed)}. Choose another --out"
            )
        return
    bench.out.mkdir(parents=True, exist_ok=True)
    write_json(path, settings)


@functools.lru_cache(maxsize=2)  # a worker keeps the images of the task that it works on
def _load(data: Data) -> Task:
    return data.load()


@dataclass(frozen=True)
class _Work:
    """What a worker does with a cell."""

    network: Network
    budget: Budget
    out: Path
    protocol: Protocol | None

    def __call__(self, cell: Cell) -> dict[str, Any]:
        import_method(cell.method)
        base = None
        if self.protocol is not None:
            base = self.protocol.base(cell.labels, cell.data.source)
        return run_cell(cell, _load(cell.data), self.network, self.budget, self.out, base)


def _run(
    bench: Bench,
    protocol: Protocol | None,
    waiting: Sequence[Cell],
    results: dict[Cell, dict[str, Any]],
    console: Console,
) -> dict[Cell, str]:
    """Run the cells that are missing; adds to results, and returns why others failed."""
    cores = 1 if torch.cuda.is_available() else os.cpu_count() or 1
    workers = min(bench.workers or cores, max(1, len(waiting)))
    work = _Work(bench.network, bench.budget, bench.out, protocol)
    failures: dict[Cell, str] = {}
    began, total = time.monotonic(), len(waiting)
    if not waiting:
        return failures
    with Live(console=console, refresh_per_second=2, transient=True, auto_refresh=False) as live:
        for number, done in enumerate(run_all(work, waiting, workers=workers, started=lambda _: None), 1):
            cell = waiting[done.number]
            line = _note(cell, done, results, failures, bench.out)
            left = (time.monotonic() - began) / number * (total - number)
            status = f"{number} of {total} cells, about {_duration(left)} left"
            if console.is_terminal:
                tables = _tables({"tables": summarize(_ordered(results))})
                live.update(Group(*tables, status), refresh=True)
            else:
                console.print(f"{line}; {status}", highlight=False, markup=False, soft_wrap=True)
    return failures


def _ordered(results: Mapping[Cell, dict[str, Any]]) -> list[dict[str, Any]]:
    return [results[cell] for cell in sorted(results, key=lambda cell: (cell.data.name, cell.labels))]


def _note(
    cell: Cell, done: Done, results: dict[Cell, dict[str, Any]], failures: dict[Cell, str], out: Path
) -> str:
    name = f"{cell.method}, {cell.setting}, seed {cell.seed}"
    if done.result is not None:
        results[cell] = done.result
        return f"{name}: accuracy {100 * done.result['figures']['accuracy']:.1f} %"
    failures[cell] = done.reason
    folder = cell.folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / ERROR, f"{done.reason}\n{done.details}")
    return f"{name}: failed ({done.reason})"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _content(
    bench: Bench,
    protocol: Protocol | None,
    tasks: Mapping[Data, Task],
    results: Sequence[dict[str, Any]],
    failures: Mapping[Cell, str],
) -> dict[str, Any]:
    budget = bench.budget
    return {
        "ropaws": __version__,
        "torch": torch.__version__,
        "network": bench.network,
        "equal": bench.equal,
        "budget": {"steps": budget.steps, "seconds": budget.seconds},
        "fairness": FAIRNESS,
        "protocol": None if protocol is None else {"name": protocol.name, "published": protocol.published},
        "reference": REFERENCE,
        "data": {
            data.name: {
                "classes": len(task.corpus.class_names),
                "in_class": int(task.in_class.sum()),
                "out_of_class": int((~task.in_class).sum()),
                "tests": int((task.corpus.test_labels >= 0).sum()),
                "out_tests": int((task.corpus.test_labels < 0).sum()) - task.unseen,
                "unseen_tests": task.unseen,
            }
            for data, task in tasks.items()
        },
        "tables": summarize(results),
        "cells": [
            {
                key: value
                for key, value in result.items()
                if key in ("data", "labels", "seed", "method", "figures")
            }
            for result in results
        ],
        "failures": [
            f"{cell.method}, {cell.setting}, seed {cell.seed}: {reason}" for cell, reason in failures.items()
        ],
    }


def _tables(content: Mapping[str, Any]) -> list[Table]:
    """On a terminal: accuracy, balanced accuracy, AUROC, confidence, images, seconds."""
    tables = []
    head = ("accuracy", "balanced_accuracy", "auroc", "auroc_unseen", "ece")
    for setting in content["tables"]:
        table = Table(
            title=f"{setting['data']}, {setting['labels']} labels per class (percent, mean ± deviation)"
        )
        for name in ("method", "accuracy", "C+1", "AUROC", "unseen", "ECE", "images", "seconds"):
            table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
        for row in ordered_rows(setting):
            figures = [shown(row["figures"].get(key)) for key in head]
            table.add_row(row["method"], *figures, f"{row['images']:,.0f}", f"{row['seconds']:.0f}")
        tables.append(table)
    return tables
