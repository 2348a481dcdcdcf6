"""`ropaws compare`: several runs on one page."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ropaws.core.run_layout import ENVIRONMENT, WITHOUT_EFFECT
from ropaws.report.charts import line_chart
from ropaws.report.page import COLUMNS, fill, mean_and_deviation, percent, write_page
from ropaws.report.run_files import MissingError, RunFiles, figure

SEED = "train.seed"
# Runs that differ in these alone are repetitions.
INDIFFERENT = {SEED, "data.split", *WITHOUT_EFFECT}
MEASURES = {**COLUMNS, "fpr95": "FPR95"}


@dataclass
class Group:
    """Runs with the same settings, but for the seed."""

    settings: dict[str, Any]  # flat: "method.temperature" -> 0.1
    runs: list[RunFiles] = field(default_factory=list)
    seeds: list[Any] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)
    name: str = ""

    @property
    def method(self) -> str:
        return str(self.settings.get("method.name", "?"))


@dataclass(frozen=True)
class Comparison:
    groups: list[Group]
    varied: list[str]  # settings in which the groups differ
    left_out: list[str]  # runs without figures, and why

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows: name, number of runs, measures in percent, gain of accuracy over the first."""
        measured = [name for name in MEASURES if any(name in group.figures for group in self.groups)]
        head = ["run", "runs", *(MEASURES[name] for name in measured), "gain"]
        first = self.groups[0].figures.get("accuracy")
        rows = []
        for number, group in enumerate(self.groups):
            cells = [_cell(group.figures.get(name), name) for name in measured]
            own = group.figures.get("accuracy")
            gain = ""
            if number > 0 and first and own:
                gain = f"{100 * (statistics.mean(own) - statistics.mean(first)):+.1f}"
            rows.append([group.name, str(len(group.runs)), *cells, gain])
        return head, rows

    def settings_rows(self) -> tuple[list[str], list[list[str]]]:
        """The ablation table: what differs, a column each, and the accuracy."""
        head = ["run", *self.varied, "accuracy"]
        rows = [
            [
                group.name,
                *(_word(group.settings.get(name, "-")) for name in self.varied),
                _cell(group.figures.get("accuracy"), "accuracy"),
            ]
            for group in self.groups
        ]
        return head, rows


def _cell(values: Sequence[float] | None, name: str) -> str:
    return mean_and_deviation(values, scale=1 if name == "seconds" else 100) if values else "-"


def _word(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def compare_runs(folders: Sequence[Path | str]) -> Comparison:
    """Read run folders and group them; the first folder's group is what the others are measured against."""
    groups: dict[str, Group] = {}
    left_out = []
    for folder in dict.fromkeys(Path(folder) for folder in folders):
        files = RunFiles(folder)
        try:
            settings, evaluation = _flat(files.config), files.evaluation
        except MissingError as reason:
            left_out.append(f"{folder}: {reason}")
            continue
        key = {name: value for name, value in settings.items() if name not in INDIFFERENT}
        group = groups.setdefault(json.dumps(key, sort_keys=True), Group(settings))
        group.runs.append(files)
        group.seeds.append(settings.get(SEED))
        for name in MEASURES:
            if (value := figure(evaluation.get(name))) is not None:
                group.figures.setdefault(name, []).append(value)
    if not groups:
        raise ValueError("no run to compare: " + "; ".join(left_out or ["name at least one run folder"]))
    listed = list(groups.values())
    varied = _varied(listed)
    for group in listed:
        group.name = _name(group, listed, varied)
    return Comparison(listed, varied, left_out)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All settings by their full names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _varied(groups: Sequence[Group]) -> list[str]:
    """Settings with different values; those of a method among groups of that method only."""
    names = dict.fromkeys(name for group in groups for name in group.settings if name not in INDIFFERENT)
    found = []
    for name in names:
        having = [group.settings[name] for group in groups if name in group.settings]
        if any(value != having[0] for value in having) or (
            len(having) < len(groups) and not name.startswith("method.")
        ):
            found.append(name)
    return found


def _name(group: Group, groups: Sequence[Group], varied: Sequence[str]) -> str:
    """The method, and what sets the group apart from the first one of its method."""
    first = next(other for other in groups if other.method == group.method)
    changed = [
        f"{name.removeprefix('method.')} {_word(group.settings.get(name, '-'))}"
        for name in varied
        if name != "method.name" and group.settings.get(name) != first.settings.get(name)
    ]
    return ", ".join([group.method, *changed])


def write_comparison(comparison: Comparison, path: Path) -> None:
    """One self-contained page."""
    text = fill(
        "compare.html",
        comparison=comparison,
        verdict=_verdict(comparison),
        per_class=_per_class(comparison),
        charts=_over_training(comparison),
        runs=[
            _run_row(group, files, seed)
            for group in comparison.groups
            for files, seed in zip(group.runs, group.seeds, strict=True)
        ],
    )
    write_page(path, text)


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


def _per_class(comparison: Comparison) -> list[list[str]]:
    """Mean accuracy per class, one column for each group."""
    columns = [_class_means(group) for group in comparison.groups]
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(percent(column.get(name)) for column in columns)] for name in names]


def _class_means(group: Group) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for files in group.runs:
        found = files.evaluation.get("per_class")
        for name, item in found.items() if isinstance(found, dict) else ():
            if (value := figure(item)) is not None:
                values.setdefault(str(name), []).append(value)
    return {name: statistics.mean(items) for name, items in values.items()}


def _over_training(comparison: Comparison) -> list[Markup]:
    """Accuracy and AUROC at the snapshots that the runs have kept, mean over seeds."""
    charts = []
    for title in ("accuracy", "AUROC"):
        series = {group.name: _mean_curve(group, title) for group in comparison.groups}
        if any(series.values()):
            charts.append(line_chart(series, x_label="step", y_label=title))
    return charts


def _mean_curve(group: Group, title: str) -> list[tuple[float, float]]:
    points: dict[float, list[float]] = {}
    for files in group.runs:
        for steps, value in _kept(files, title):
            points.setdefault(steps, []).append(value)
    return [(step, statistics.mean(values)) for step, values in sorted(points.items())]


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


def _run_row(group: Group, files: RunFiles, seed: object) -> list[object]:
    try:
        made_with = files.read(ENVIRONMENT)
    except MissingError:
        made_with = {}
    where = " ".join(str(made_with.get(key, "?")) for key in ("device", "precision"))
    return [files.run, group.name, seed, percent(figure(files.evaluation.get("accuracy"))), where]
