"""The figure of time_to_accuracy.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

TITLES = {
    "garments": "Garments, small network from scratch",
    "features": "CIFAR-10 + CIFAR-100, head on frozen features",
}
LINES = {"ours": ("our defaults", "#0072B2"), "paper": ("the paper's settings", "#D55E00")}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """A panel for each setting: every seed thin, their mean thick, seconds on a logarithmic axis."""
    figure = Figure(figsize=(5.2 * len(results), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, found) in zip(
        np.atleast_1d(figure.subplots(1, len(results))), results.items(), strict=True
    ):
        for way, (label, color) in LINES.items():
            _curves(axes, found["runs"][way], label, color)
        target = 100 * np.mean([seed["target"] for seed in found["seeds"]])
        axes.axhline(target, color="#D55E00", linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.set_title(TITLES[name], fontsize=11)
        axes.set_xlabel("seconds of training, one thread")
        axes.set_ylabel("accuracy on test images, %")
        axes.grid(alpha=0.25)
        axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120, format="png")


def _curves(axes: Axes, runs: list[list[dict[str, float]]], label: str, color: str) -> None:
    seconds = np.array([[point["seconds"] for point in curve] for curve in runs])
    accuracy = 100 * np.array([[point["accuracy"] for point in curve] for curve in runs])
    for one_seconds, one in zip(seconds, accuracy, strict=True):
        axes.plot(one_seconds, one, color=color, linewidth=0.7, alpha=0.4)
    axes.plot(seconds.mean(axis=0), accuracy.mean(axis=0), color=color, linewidth=2, label=label)
