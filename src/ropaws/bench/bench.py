"""`ropaws bench`: methods x data x labels x seeds, on equal terms, into one folder; the demo is a preset."""

import functools
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
from ropaws.bench.cells import Budget, Cell, frozen_rows, method_settings, run_cell
from ropaws.bench.entries import (
    JUDGES,
    Data,
    Network,
    Task,
    base_config,
    check_entries,
    phases_of,
    plain_name,
)
from ropaws.bench.results import REFERENCE, RESULTS, BenchResults, open_folder, summarize, task_facts
from ropaws.bench.workers import run_all, stopped_like_ctrl_c
from ropaws.classify import head
from ropaws.core.cores import available_cores
from ropaws.core.files import locked
from ropaws.core.run_layout import REPORT
from ropaws.core.terminal import duration, tell
from ropaws.embedding.backbones import PRETRAINED
from ropaws.embedding.pretrained import NETWORKS
from ropaws.methods import import_method
from ropaws.recipes.protocols import FROM_SCRATCH, Protocol, get_protocol
from ropaws.report.bench_page import ordered_rows, shown
from ropaws.run.config import differences
from ropaws.run.run import Run

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
SECONDS = 60.0  # of a cell, where time is equal
PAGE_SECONDS = 20.0  # at most so often the page is written while cells run
FAIRNESS = (
    "All methods of a row have the same images, the same labeled ones (files in labels/), network, batch and"
    " labeled batch. They see the same number of images (labels alone: at most twice RoPAWS's steps), or"
    " train for about the same time. The last step counts, with the moving average of the weights where a"
    " method has one; no checkpoint is chosen, least of all on test images. Settings are those of each"
    " method's paper, or were chosen on other data; those of ropaws from scratch were chosen on the garments."
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
    network: str = "small"
    """small: from scratch. A head on frozen features: pretrained (EfficientNet-Lite0), or a name of `ropaws
    backbones`."""
    init: Path = PRETRAINED
    """Weight file of that network."""
    steps: int | None = None
    """Steps of RoPAWS, by default 400 (300 on features, or the protocol's); all others see as many images."""
    equal: Literal["images", "time"] = "images"
    """Equal for all methods: images seen, or seconds."""
    seconds: float | None = None
    """With --equal time: of each cell, by default 60."""
    curve: int = 4
    """Points at which accuracy is measured over training; 1 for the last step alone."""
    views: int = 4
    """Random views per image, on features."""
    unseen: tuple[Path, ...] = ()
    """.npz files with `images` of no class and of kinds that no pool has, for testing. An .npz file of --data
    may bring its own as `unseen_images`."""
    root: Path = Path("data")
    """Folder with the official files of named datasets."""
    workers: int | None = None
    """Processes; by default one for each core, or one with a GPU."""
    out: Path = Path("bench")
    """Folder for everything."""

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("--methods is empty; name at least one")
        names = {
            "methods": [plain_name(name) for name in self.methods],
            "data": self.data,
            "labels": self.labels,
        }
        for option, values in names.items():
            if len(set(values)) < len(values):
                raise ValueError(f"--{option} has an entry twice: {' '.join(map(str, values))}")
        for name in ("seeds", "curve"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        for name in ("steps", "workers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.labels and min(self.labels) < 1:
            raise ValueError(f"--labels must be at least 1, got {min(self.labels)}")
        if self.start.frozen and self.start.backbone not in NETWORKS:
            raise ValueError(
                f"--network must be small, pretrained, or one of {', '.join(NETWORKS)}, got {self.network}"
            )
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise ValueError(f"--seconds must be positive, got {self.seconds}")
        if self.seconds is not None and self.equal != "time":
            raise ValueError("--seconds goes with --equal time")

    @property
    def start(self) -> Network:
        return Network(self.network, self.init)

    @property
    def budget(self) -> Budget:
        default = 300 if self.start.frozen else 400
        seconds = (self.seconds or SECONDS) if self.equal == "time" else None
        return Budget(self.steps or default, seconds, self.curve, self.views)


def run_bench(bench: Bench, console: Console) -> dict[str, Any]:
    """Train and test all cells; the content of results.json."""
    protocol = None if bench.protocol is None else get_protocol(bench.protocol)
    bench = _with_defaults(bench, protocol)
    for name in bench.methods:
        import_own(name)
    check_entries(bench.methods, frozen=bench.start.frozen)
    sources = [Data(source, bench.unseen, bench.root) for source in bench.data]
    _check_names(sources)
    found = {}
    for data in sources:  # its errors, before anything is written
        task = data.load()
        _check_labels(task, bench.labels)
        found[data.name] = task_facts(task)
    if bench.out.exists() and not bench.out.is_dir():
        raise ValueError(f"--out: {bench.out} is not a folder; name another")
    with locked(bench.out):
        return _run_cells(bench, protocol, sources, found, console)


def _run_cells(
    bench: Bench,
    protocol: Protocol | None,
    sources: Sequence[Data],
    found: dict[str, Any],
    console: Console,
) -> dict[str, Any]:
    facts = open_folder(bench.out, _settings(bench), found)
    cells = [
        Cell(data, labels, seed, plain_name(method))
        for data in sources
        for labels in bench.labels
        for seed in range(bench.seeds)
        for method in bench.methods
    ]
    kept = BenchResults(
        bench.out, _head(bench, protocol, facts), list(map(plain_name, bench.methods)), console
    )
    waiting = [cell for cell in cells if not kept.has(cell)]
    _check_methods(bench, protocol, kept)
    if len(waiting) < len(cells):
        console.print(f"{len(cells) - len(waiting)} of {len(cells)} cells are done already", highlight=False)
    try:
        with stopped_like_ctrl_c():
            _embed(bench, waiting, console)
            _run(bench, protocol, waiting, kept)
    except KeyboardInterrupt:
        kept.write()
        raise KeyboardInterrupt(f"stopped; the same command continues what is in {bench.out}") from None
    content = kept.write()
    for table in _tables(content["tables"]):
        console.print(table)
    for failure in content["failures"]:
        cell = "{method}, {data}, {labels} labels, seed {seed}: {reason}".format_map(failure)
        tell(console, f"failed: {cell}")
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


def _settings(bench: Bench) -> dict[str, Any]:
    """What all cells of a folder share; methods, data, labels and seeds may be added."""
    return {
        "network": bench.network,
        "steps": bench.budget.steps,
        "equal": bench.equal,
        "seconds": bench.budget.seconds,
        "curve": bench.curve,
        "views": bench.views,
        "unseen": [str(path) for path in bench.unseen],
        "protocol": bench.protocol,
    }


def _head(bench: Bench, protocol: Protocol | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What results.json says of the whole bench."""
    published = None if protocol is None else {"name": protocol.name, "published": protocol.published}
    return {
        "ropaws": __version__,
        "torch": torch.__version__,
        "network": bench.network,
        "equal": bench.equal,
        "budget": {"steps": bench.budget.steps, "seconds": bench.budget.seconds},
        "fairness": FAIRNESS,
        "protocol": published,
        "reference": REFERENCE,
        "data": {
            name: {key: value for key, value in found.items() if key != "digest"}
            for name, found in facts.items()
        },
    }


def _check_methods(bench: Bench, protocol: Protocol | None, kept: BenchResults) -> None:
    """Cells of earlier calls must have had the settings that these methods have now."""
    frozen = bench.start.frozen
    for name in map(plain_name, bench.methods):
        if name in JUDGES:
            continue
        phases = phases_of(name, frozen=frozen, given=None if protocol is None else protocol.methods)
        now = {phase.name: method_settings(phase.method) for phase in phases}
        for result in kept.results.values():
            before = {phase["phase"]: phase["method"] for phase in result["given"]}
            if result["method"] == name and (changed := differences(before, now)):
                raise ValueError(
                    f"{bench.out} has cells of {name} with other settings: {'; '.join(changed)}."
                    " Choose another --out, or delete its cells"
                )


def _check_names(sources: Sequence[Data]) -> None:
    """Results are kept by the name of the data."""
    names = [data.name for data in sources]
    for data in sources:
        if names.count(data.name) > 1:
            raise ValueError(f"--data: several files are called {data.name!r}; rename one of them")


def _check_labels(task: Task, labels: Sequence[int]) -> None:
    most = int(task.corpus.train_labels[task.corpus.train_labels >= 0].bincount().min())
    if most < max(labels):
        raise ValueError(
            f"--labels {max(labels)}: a class of {task.name} has {most} images; ask for at most {most}"
        )


def import_own(name: str) -> None:
    """Import the module of a method of a user's own, in phases too."""
    for part in name.split(">"):
        import_method(part)


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
        import_own(cell.method)
        protocol, arguments = self.protocol, (cell, _load(cell.data), self.network, self.budget, self.out)
        if protocol is None:
            return run_cell(*arguments)
        base = protocol.base(cell.labels, cell.data.source)
        return run_cell(*arguments, base=base, methods=protocol.methods, weight_decay=protocol.weight_decay)


def _embed(bench: Bench, waiting: Sequence[Cell], console: Console) -> None:
    """Compute features once, before workers start that would each compute all of them."""
    if not bench.start.frozen:
        return
    for data in dict.fromkeys(cell.data for cell in waiting):
        task, (labels, *_) = data.load(), bench.labels
        budget = bench.budget
        sizes = {"labels": labels, "steps": budget.steps, "views": budget.views}
        base = base_config(task, data.config(), bench.start, **sizes)
        frozen_rows(task, base, console)


def _run(bench: Bench, protocol: Protocol | None, waiting: Sequence[Cell], kept: BenchResults) -> None:
    """Run the cells that are missing."""
    if not waiting:
        return
    cores = 1 if torch.cuda.is_available() else available_cores()
    workers = min(bench.workers or cores, len(waiting))
    work = _Work(bench.start, bench.budget, bench.out, protocol)
    began = written = time.monotonic()
    console, total, finished = kept.console, len(waiting), 0
    running: list[Cell] = []
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(status: str, cell: Cell) -> None:
            if console.is_terminal:
                mine = [
                    r for r in kept.ordered() if (r["data"], r["labels"]) == (cell.data.name, cell.labels)
                ]
                failed = f", {len(kept.failures)} failed" if kept.failures else ""
                now = ", ".join(f"{c.method} (seed {c.seed})" for c in running)
                live.update(Group(f"{status}{failed}; now: {now}", *_tables(summarize(mine))), refresh=True)

        def started(number: int) -> None:
            running.append(waiting[number])
            show(f"{finished} of {total} cells", waiting[number])

        for done in run_all(work, waiting, workers=workers, started=started):
            cell, finished = waiting[done.number], finished + 1
            running.remove(cell)
            line = kept.note(cell, done)
            left = (time.monotonic() - began) / finished * (total - finished)
            status = f"{finished} of {total} cells, about {duration(left)} left"
            show(status, cell)
            if not console.is_terminal:
                tell(console, f"{line}; {status}")
            if time.monotonic() - written > PAGE_SECONDS:
                kept.write()
                written = time.monotonic()


COLUMNS = {
    "accuracy": "acc.",
    "balanced_accuracy": "C+1",
    "auroc": "AUROC",
    "auroc_unseen": "unseen",
    "ece": "ECE",
}


def _tables(tables: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Print the main figures. Names may take several lines, figures are never cut off."""
    found = []
    for setting in tables:
        keys = [key for key in COLUMNS if any(key in row["figures"] for row in setting["rows"])]
        table = Table(title=f"{setting['data']}, {setting['labels']} labels per class (percent)")
        table.add_column("method", overflow="fold", min_width=8)
        for name in (*(COLUMNS[key] for key in keys), "sec.", "draws"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in ordered_rows(setting):
            figures = [shown(row["figures"].get(key)) for key in keys]
            table.add_row(row["method"], *figures, f"{row['seconds']:.0f}", str(len(row["seeds"])))
        found.append(table)
    return found


POOL = "fashion-demo"
ON_FEATURES = ("logistic", "label-spreading", "paws", "ropaws-paper", "ropaws")
TRAINED_FROM_SCRATCH = ("supervised", "paws", "ropaws")
RUN_REPORT = "ropaws.html"  # beside the table's report.html


@dataclass(frozen=True)
class Demo:
    """Learn five kinds of garment from 4 labels each and an uncurated pool of 5,000 images.

    On features of a small pretrained network: RoPAWS beside logistic regression, scikit-learn's
    LabelSpreading, PAWS, and RoPAWS exactly as in the paper. Writes results.json, report.html (the
    table) and ropaws.html (what a run's report shows). It may be interrupted: the same command resumes it.
    """

    seeds: int = 1
    """Draws of the labels."""
    labels_per_class: int = 4
    """Labels that training may see."""
    from_scratch: bool = False
    """Train small networks from scratch instead: the supervised baseline, PAWS and RoPAWS. Minutes."""
    out: Path = Path("demo")
    """Folder for the results."""
    steps: int | None = None
    """Training steps of RoPAWS; the others see as many images."""
    workers: int | None = None
    """Methods that are trained side by side; by default one for each core, or one with a GPU."""

    def __post_init__(self) -> None:
        if self.labels_per_class < 1:
            raise ValueError(f"--labels-per-class must be at least 1, got {self.labels_per_class}")

    def bench(self) -> Bench:
        """Return the demo as settings of `ropaws bench`."""
        return Bench(
            methods=TRAINED_FROM_SCRATCH if self.from_scratch else ON_FEATURES,
            protocol=FROM_SCRATCH if self.from_scratch else None,
            data=() if self.from_scratch else (POOL,),
            network="small" if self.from_scratch else "pretrained",
            labels=(self.labels_per_class,),
            seeds=self.seeds,
            steps=self.steps,
            curve=1,
            views=head.RANDOM_VIEWS,
            workers=self.workers,
            out=self.out,
        )


def run_demo(settings: Demo, console: Console) -> dict[str, Any]:
    """Train, test, show, write; the content of results.json."""
    content = run_bench(settings.bench(), console)
    folder = Cell(Data(POOL), settings.labels_per_class, 0, "ropaws").folder(settings.out) / "1-ropaws"
    page = Run(folder, console=console).report(settings.out / RUN_REPORT)
    console.print(f"Written: {page}, the report of the RoPAWS run", highlight=False, soft_wrap=True)
    return content
