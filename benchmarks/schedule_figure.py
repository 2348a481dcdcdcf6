"""The figure of long_schedule.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

ROWS = {
    "accuracy": "accuracy, %",
    "auroc": "AUROC, %",
    "confidence_out": "confidence on\nout-of-class tests, %",
    "weight_in": "in-domain weight, %\n(in solid, out dotted)",
}
LINES = {
    "supervised": ("supervised", "#000000"),
    "paws": ("PAWS", "#D55E00"),
    "ropaws-paper": ("RoPAWS, as in the paper", "#0072B2"),
    "ropaws": ("RoPAWS, our settings from scratch", "#009E73"),
}
MOST_COLUMNS = 6
Key = tuple[str, int, int]  # data, labels per class, epochs
MARKERS = ("o", "^", "s", "D")  # by seed


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A column for each setting that has both PAWS and RoPAWS, a row for each figure over training.

    Every seed is a line, and has a marker.
    """
    columns = _columns(rows)
    if not columns:
        return
    figure = Figure(figsize=(1.2 + 3.2 * len(columns), 10.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = np.reshape(figure.subplots(len(ROWS), len(columns), sharex="col"), (len(ROWS), -1))
    first = {data.startswith("animals"): column for column, (data, _, _) in reversed([*enumerate(columns)])}
    for column, ((data, labels, epochs), cells) in enumerate(columns.items()):
        for line, (name, title) in enumerate(ROWS.items()):
            axes = grid[line, column]
            if (like := first[data.startswith("animals")]) != column:  # the same classes, the same scale
                axes.sharey(grid[line, like])
            for cell in cells:
                _curve(axes, cell, name)
            axes.grid(alpha=0.25)
            if column == 0:
                axes.set_ylabel(title)
        grid[0, column].set_title(f"{data}, {labels} labels, {epochs} epochs", fontsize=10)
        grid[-1, column].set_xlabel("epoch")
    _legend(figure, {cell["entry"] for cells in columns.values() for cell in cells})
    figure.savefig(path, dpi=100, format="png")


def _columns(rows: Sequence[dict[str, Any]]) -> dict[Key, list[dict[str, Any]]]:
    """The first pools first, then many labels, then short schedules."""
    groups: dict[Key, list[dict[str, Any]]] = {}
    for row in rows:
        if row["entry"] in LINES:
            groups.setdefault((row["data"], row["labels"], row["epochs"]), []).append(row)
    shown = {
        key: cells
        for key, cells in groups.items()
        if {"paws", "ropaws-paper"} <= {cell["entry"] for cell in cells}
    }
    pools = list(dict.fromkeys(data for data, _, _ in shown))
    order = sorted(shown, key=lambda key: (pools.index(key[0]), -key[1], key[2]))
    return {key: shown[key] for key in order[:MOST_COLUMNS]}


def _legend(figure: Figure, entries: set[str]) -> None:
    shown = [LINES[entry] for entry in LINES if entry in entries]
    handles = [Line2D([], [], color=color, marker=MARKERS[0], label=label) for label, color in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _curve(axes: Axes, cell: dict[str, Any], name: str) -> None:
    """The weight outside of the classes is dotted, beside that inside; a seed has its own marker."""
    color, marker = LINES[cell["entry"]][1], MARKERS[cell["seed"] % len(MARKERS)]
    styles = {name: "-", "weight_out": ":"} if name == "weight_in" else {name: "-"}
    for part, style in styles.items():
        points = [point for point in cell["curve"] if part in point]
        epochs = [point["step"] / cell["steps"] * cell["epochs"] for point in points]
        values = [100 * point[part] for point in points]
        axes.plot(epochs, values, style, color=color, linewidth=1.6, marker=marker, markersize=4)
