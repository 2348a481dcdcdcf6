"""The demo: supervised, PAWS and RoPAWS on the embedded pool, with the same split and budget."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ropaws import recipes
from ropaws.bench.side_by_side import Job, default_workers, train_all
from ropaws.bench.workers import threads_of
from ropaws.config import RunConfig, to_json
from ropaws.data.sources import load_corpus
from ropaws.data.splits import choose_split
from ropaws.methods import PAWS, RoPAWS, Supervised, method_name
from ropaws.report.demo_page import write_demo_page
from ropaws.report.figures import draw_embeddings
from ropaws.report.run_page import write_report
from ropaws.report.tables import COLUMNS, comparison_rows
from ropaws.runs.atomic import read_json, write_atomically, write_json
from ropaws.runs.facts import read_facts
from ropaws.runs.layout import GALLERY, REPORT


@dataclass(frozen=True)
class Demo:
    """Compare supervised learning, PAWS and RoPAWS on the embedded uncurated images.

    Writes results.json, embeddings.png, report.html, and a run folder for each method and seed with a report
    of its own. What an earlier call with the same settings has trained is used again: it can be interrupted.
    """

    seeds: int = 1
    """Repetitions, each with labels, weights and batches of its own."""
    labels_per_class: int = 4
    """Labels that training may see, 1 to 100."""
    out: Path = Path("demo")
    """Folder for the results."""
    steps: int | None = None
    """Training steps of each run; fewer for a quick look."""
    workers: int | None = None
    """Runs that are trained side by side, each on its share of the cores; by default one per core, or all
    where they are few more, and one after the other on a GPU."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {self.seeds}")
        if self.labels_per_class < 1:
            raise ValueError(f"--labels-per-class must be at least 1, got {self.labels_per_class}")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {self.workers}")


def run_demo(settings: Demo, console: Console) -> dict[str, Any]:
    """Train, test, show, write; the content of results.json."""
    configs = [
        recipes.with_seed(config, seed) for seed in range(settings.seeds) for config in demo_configs(settings)
    ]
    folders = [settings.out / f"{method_name(config.method)}-seed{config.train.seed}" for config in configs]
    first = configs[0]
    choose_split(load_corpus(first.data), first.data, seed=first.train.seed)  # before any worker starts
    jobs = [Job(config, folder) for config, folder in zip(configs, folders, strict=True)]
    workers = settings.workers or default_workers(len(jobs))
    evaluations = train_all(jobs, workers=workers, console=console)
    methods: dict[str, dict[str, list[float]]] = {}
    for config, figures in zip(configs, evaluations, strict=True):
        columns = methods.setdefault(method_name(config.method), {key: [] for key in COLUMNS})
        for key, values in columns.items():
            values.append(figures[key])  # type: ignore[literal-required]
    results = {"methods": methods, "settings": _describe(settings, first, workers)}
    write_json(settings.out / "results.json", results)
    console.print(_table(methods))
    figure = _draw(settings.out)
    pages = _write_reports(folders, settings.out)
    write_atomically(
        settings.out / REPORT,
        lambda path: write_demo_page(path, methods, results["settings"], figure, pages),
    )
    console.print(
        f"Written: {settings.out}/results.json, {figure}, {settings.out}/report.html, a report of each run",
        highlight=False,
        soft_wrap=True,
    )
    return results


def _write_reports(folders: list[Path], out: Path) -> list[str]:
    """A page for every run, measured against the supervised one of its seed; their places in the folder."""
    pages = []
    for folder in folders:
        baseline = out / f"supervised-{folder.name.split('-')[1]}"
        page = write_report(folder, baseline=None if folder == baseline else baseline)
        pages.append(page.relative_to(out).as_posix())
    return pages


def demo_configs(settings: Demo) -> list[RunConfig]:
    """One config per method; all else is equal, and the others have what is not RoPAWS's own."""
    base = recipes.demo()
    ours = base.method
    assert isinstance(ours, RoPAWS)
    steps = base.train.steps if settings.steps is None else settings.steps
    base = replace(
        base,
        data=replace(base.data, labels_per_class=settings.labels_per_class),
        train=replace(base.train, steps=steps),
    )
    contrast = {"contrast_weight": ours.contrast_weight, "contrast_temperature": ours.contrast_temperature}
    methods = (Supervised(judge=ours.judge), PAWS(judge=ours.judge, **contrast), ours)
    return [replace(base, method=method) for method in methods]


def _describe(settings: Demo, config: RunConfig, workers: int) -> dict[str, Any]:
    plain = to_json(config)
    return {
        "seeds": settings.seeds,
        "labels_per_class": settings.labels_per_class,
        **{key: plain["train"][key] for key in ("steps", "batch")},
        **{key: plain[key] for key in ("model", "data", "augment", "support", "optim")},
        "torch": torch.__version__,
        "workers": workers,
        "threads": torch.get_num_threads() if workers == 1 else threads_of(workers),
    }


def _table(methods: dict[str, dict[str, list[float]]]) -> Table:
    table = Table(title="In percent, on unseen test images; seconds of training")
    for number, name in enumerate(("method", *COLUMNS.values())):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    for row in comparison_rows(methods):
        table.add_row(*row)
    return table


def _draw(out: Path) -> Path:
    """t-SNE of the test images under PAWS and RoPAWS, of the first seed, as their reports have it."""
    panels = {}
    for title, name in (("PAWS", "paws"), ("RoPAWS", "ropaws")):
        folder = out / f"{name}-seed0"
        shown = read_json(folder / GALLERY, inside=folder)["projection"]
        panels[title] = np.asarray(shown["points"], dtype=np.float32)
    truth = np.asarray(shown["labels"])  # of the same test images in both
    names = read_facts(folder).class_names
    path = out / "embeddings.png"
    write_atomically(path, lambda temporary: draw_embeddings(panels, truth, names, temporary))
    return path
