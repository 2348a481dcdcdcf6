"""Runs side by side: those that differ in the seed alone are one row, with mean and deviation."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropaws.report.run_files import MissingError, RunFiles, figure
from ropaws.report.tables import COLUMNS, mean_and_deviation
from ropaws.runs.layout import FORMER_SETTINGS, LATER_SETTINGS, WITHOUT_EFFECT

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
            settings, evaluation = _settings(files.config), files.evaluation
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


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by their current names; what 0.1.0 did not have is as it was then."""
    flat = {**LATER_SETTINGS, **_flat(config)}
    for section, former, current in FORMER_SETTINGS:
        if f"{section}.{former}" in flat:
            flat[f"{section}.{current}"] = flat.pop(f"{section}.{former}")
    return flat


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
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
