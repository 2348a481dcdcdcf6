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
Key = tuple[str, int, int]  # data, labels per class, epochs
COLUMNS: tuple[Key, ...] = (
    ("garments-14", 25, 50),
    ("garments-14", 25, 200),
    ("garments-14", 25, 600),
    ("garments-14", 4, 200),
    ("curated-14", 25, 200),
    ("animals-16", 25, 200),
    ("garments", 25, 200),
    ("animals", 25, 100),
)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A column for each of COLUMNS that has both PAWS and RoPAWS, a row for each figure over training.

    Every seed is a thin line; the thick one is their mean.
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
            for entry in LINES:
                _curves(axes, [cell for cell in cells if cell["entry"] == entry], name)
            axes.grid(alpha=0.25)
            if column == 0:
                axes.set_ylabel(title)
        grid[0, column].set_title(f"{data}, {labels} labels, {epochs} epochs", fontsize=10)
        grid[-1, column].set_xlabel("epoch")
    _legend(figure, {cell["entry"] for cells in columns.values() for cell in cells})
    figure.savefig(path, dpi=100, format="png")


def _columns(rows: Sequence[dict[str, Any]]) -> dict[Key, list[dict[str, Any]]]:
    groups = {
        key: [row for row in rows if (row["data"], row["labels"], row["epochs"]) == key] for key in COLUMNS
    }
    return {
        key: [cell for cell in cells if cell["entry"] in LINES]
        for key, cells in groups.items()
        if {"paws", "ropaws-paper"} <= {cell["entry"] for cell in cells}
    }


def _legend(figure: Figure, entries: set[str]) -> None:
    shown = [LINES[entry] for entry in LINES if entry in entries]
    handles = [Line2D([], [], color=color, label=label) for label, color in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _curves(axes: Axes, cells: Sequence[dict[str, Any]], name: str) -> None:
    """Of one method. The weight outside of the classes is dotted, beside that inside."""
    styles = {name: "-", "weight_out": ":"} if name == "weight_in" else {name: "-"}
    for part, style in styles.items():
        shown = [cell for cell in cells if _is_known(cell, part)]
        if not shown:
            continue
        color = LINES[shown[0]["entry"]][1]
        steps = [point["step"] / shown[0]["steps"] * shown[0]["epochs"] for point in shown[0]["curve"]]
        values = np.array([[100 * point[part] for point in cell["curve"]] for cell in shown])
        if len(shown) > 1:
            axes.plot(steps, values.T, style, color=color, linewidth=0.7, alpha=0.45)
        axes.plot(steps, values.mean(axis=0), style, color=color, linewidth=2.2)


def _is_known(cell: dict[str, Any], part: str) -> bool:
    """Weights mean something only where the loss has them."""
    end = cell["curve"][-1]
    return part in end and not (part.startswith("weight") and end["selected"] == 1)
