"""`ropaws compare`: several runs on one page."""

import statistics
from pathlib import Path

from ropaws.report.charts import line_chart
from ropaws.report.comparison import Comparison, Group
from ropaws.report.page import esc, page, percent, table, write_page
from ropaws.report.run_files import MissingError, RunFiles, figure
from ropaws.runs.layout import ENVIRONMENT


def write_comparison(comparison: Comparison, path: Path) -> None:
    """One self-contained page."""
    body = [
        "<h1>Runs side by side</h1>",
        f'<p class="verdict">{esc(_verdict(comparison))}</p>',
        '<p class="dim">In percent on unseen test images (seconds of training as they are), mean and standard'
        " deviation over seeds; gain of accuracy over the first row, in points.</p>",
        table(*comparison.rows(), own=0),
    ]
    if comparison.varied and len(comparison.groups) > 1:
        body.append(f"<h2>What differs</h2>{table(*comparison.settings_rows())}")
    for title, content in (
        ("Accuracy per class", _per_class(comparison)),
        ("Over training", _over_training(comparison)),
    ):
        if content:
            body.append(f"<h2>{title}</h2>{content}")
    body.append(f"<h2>Runs</h2>{_runs(comparison)}")
    if comparison.left_out:
        lines = "".join(f"<li>{esc(line)}</li>" for line in comparison.left_out)
        body.append(f'<div class="missing"><h2>Left out</h2><ul>{lines}</ul></div>')
    write_page(path, page("Runs side by side - ropaws", "\n".join(body)))


def _verdict(comparison: Comparison) -> str:
    scored = [
        (statistics.mean(group.figures["accuracy"]), group)
        for group in comparison.groups
        if "accuracy" in group.figures
    ]
    if len(scored) < 2:
        return f"{sum(len(group.runs) for group in comparison.groups)} runs."
    best, group = max(scored, key=lambda item: item[0])
    return f"{group.name} is ahead with an accuracy of {best:.1%}."


def _per_class(comparison: Comparison) -> str:
    """Mean accuracy per class, one column for each group."""
    columns = [_class_means(group) for group in comparison.groups]
    names = list(dict.fromkeys(name for column in columns for name in column))
    if not names:
        return ""
    rows = [[name, *(percent(column.get(name)) for column in columns)] for name in names]
    return table(["class", *(group.name for group in comparison.groups)], rows)


def _class_means(group: Group) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for files in group.runs:
        found = files.evaluation.get("per_class")
        for name, item in found.items() if isinstance(found, dict) else ():
            if (value := figure(item)) is not None:
                values.setdefault(str(name), []).append(value)
    return {name: statistics.mean(items) for name, items in values.items()}


def _over_training(comparison: Comparison) -> str:
    """Accuracy and AUROC at the snapshots that the runs have kept, mean over seeds."""
    charts = []
    for title in ("accuracy", "AUROC"):
        series = {}
        for group in comparison.groups:
            points: dict[float, list[float]] = {}
            for files in group.runs:
                for steps, value in _kept(files, title):
                    points.setdefault(steps, []).append(value)
            series[group.name] = [(step, statistics.mean(v)) for step, v in sorted(points.items())]
        if any(series.values()):
            charts.append(f"<figure>{line_chart(series, x_label='step', y_label=title)}</figure>")
    return f'<div class="columns">{"".join(charts)}</div>' if charts else ""


def _kept(files: RunFiles, title: str) -> list[tuple[float, float]]:
    """Steps and figure of each snapshot; none where that part of the run is damaged."""
    try:
        found = [
            (item["steps"], item.get("auroc") if title == "AUROC" else item["propagation"][0]["accuracy"])
            for item in files.evaluation.get("over_training", [])
        ]
    except (KeyError, IndexError, TypeError, AttributeError):
        return []
    numbers = [(figure(steps), figure(value)) for steps, value in found]
    return [(steps, value) for steps, value in numbers if steps is not None and value is not None]


def _runs(comparison: Comparison) -> str:
    rows = []
    for group in comparison.groups:
        for files, seed in zip(group.runs, group.seeds, strict=True):
            try:
                made_with = files.read(ENVIRONMENT)
            except MissingError:
                made_with = {}
            where = " ".join(str(made_with.get(key, "?")) for key in ("device", "precision"))
            rows.append(
                [files.run, group.name, seed, percent(figure(files.evaluation.get("accuracy"))), where]
            )
    return table(["folder", "row", "seed", "accuracy", "trained on"], rows)
