"""The demo: supervised, PAWS and RoPAWS on the embedded pool, with the same split and budget."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ropaws import recipes
from ropaws.analysis.evaluate import evaluate
from ropaws.analysis.results import Evaluation, read_evaluation
from ropaws.config import RunConfig, read_config, to_json
from ropaws.evaluation.projection import tsne
from ropaws.methods import PAWS, RoPAWS, Supervised, method_name
from ropaws.report.demo_page import write_demo_page
from ropaws.report.figures import draw_embeddings
from ropaws.report.run_page import write_report
from ropaws.report.tables import COLUMNS, comparison_rows
from ropaws.runs.atomic import write_atomically, write_json
from ropaws.runs.layout import CONFIG, REPORT
from ropaws.runs.run import Run
from ropaws.training.train import resume, train

FIGURE_POINTS = 1000


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

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {self.seeds}")
        if self.labels_per_class < 1:
            raise ValueError(f"--labels-per-class must be at least 1, got {self.labels_per_class}")


def run_demo(settings: Demo, console: Console) -> dict[str, Any]:
    """Train, test, show, write; the content of results.json."""
    configs = [
        recipes.with_seed(config, seed) for seed in range(settings.seeds) for config in demo_configs(settings)
    ]
    folders = [settings.out / f"{method_name(config.method)}-seed{config.train.seed}" for config in configs]
    for config, folder in zip(configs, folders, strict=True):
        _check_reusable(config, folder)
    methods: dict[str, dict[str, list[float]]] = {}
    for config, folder in zip(configs, folders, strict=True):
        figures = train_once(config, folder, console)
        columns = methods.setdefault(method_name(config.method), {key: [] for key in COLUMNS})
        for key, values in columns.items():
            values.append(figures[key])  # type: ignore[literal-required]
    results = {"methods": methods, "settings": _describe(settings, configs[0])}
    write_json(settings.out / "results.json", results)
    console.print(_table(methods))
    figure = _draw(settings.out, console)
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
    """One config per method; all else is equal."""
    base = recipes.demo()
    assert isinstance(base.method, RoPAWS)
    steps = base.train.steps if settings.steps is None else settings.steps
    base = replace(
        base,
        data=replace(base.data, labels_per_class=settings.labels_per_class),
        train=replace(base.train, steps=steps),
    )
    methods = (Supervised(), PAWS(), base.method)
    return [replace(base, method=method) for method in methods]


def _check_reusable(config: RunConfig, folder: Path) -> None:
    if (folder / CONFIG).exists() and read_config(folder / CONFIG) != config:
        raise FileExistsError(f"{folder} was trained with other settings; choose another --out, or remove it")


def train_once(config: RunConfig, folder: Path, console: Console) -> Evaluation:
    """Train and test, or take what an earlier call left; refuses a folder of other settings."""
    _check_reusable(config, folder)
    found = read_evaluation(folder)
    if "accuracy" in found:
        console.print(f"{folder}: trained before, used again", highlight=False)
        return found
    if (folder / CONFIG).exists():
        resume(folder, console=console)
    else:
        train(config, folder, console=console)
    return evaluate(folder)


def _describe(settings: Demo, config: RunConfig) -> dict[str, Any]:
    plain = to_json(config)
    return {
        "seeds": settings.seeds,
        "labels_per_class": settings.labels_per_class,
        **{key: plain["train"][key] for key in ("steps", "batch")},
        **{key: plain[key] for key in ("model", "data", "augment", "support", "optim")},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _table(methods: dict[str, dict[str, list[float]]]) -> Table:
    table = Table(title="In percent, on unseen test images; seconds of training")
    for number, name in enumerate(("method", *COLUMNS.values())):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    for row in comparison_rows(methods):
        table.add_row(*row)
    return table


def _draw(out: Path, console: Console) -> Path:
    """t-SNE of the test images under PAWS and RoPAWS, of the first seed."""
    with console.status("Drawing the embeddings"):
        panels = {}
        for title, name in (("PAWS", "paws"), ("RoPAWS", "ropaws")):
            run = Run(out / f"{name}-seed0", console=console)
            # Every k-th image: the test set is in order of class, so all classes are there.
            chosen = slice(None, None, max(1, len(run.test.labels) // FIGURE_POINTS))
            panels[title] = tsne(run.test.outputs.embedding[chosen])
        path = out / "embeddings.png"
        truth, names = run.test.labels[chosen].numpy(), run.class_names
        write_atomically(path, lambda temporary: draw_embeddings(panels, truth, names, temporary))
    return path
