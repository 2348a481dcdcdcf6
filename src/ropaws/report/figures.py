"""Figures, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

# Okabe and Ito's colors, which color-blind readers can tell apart; black is for out-of-class.
COLORS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#F0E442")


def draw_embeddings(
    panels: Mapping[str, NDArray[np.float32]],
    truth: NDArray[np.int64],
    class_names: Sequence[str],
    path: Path,
) -> None:
    """One scatter plot per method, side by side: classes in color, out-of-class points in black.

    panels: title -> points (n, 2); truth (n,) class, or -1 for out-of-class
    """
    figure = Figure(figsize=(5 * len(panels), 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, points) in zip(
        np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True
    ):
        out = truth < 0
        axes.scatter(*points[out].T, s=5, c="black", label="out-of-class", linewidths=0)
        for label, name in enumerate(class_names):
            color = COLORS[label % len(COLORS)]
            axes.scatter(*points[truth == label].T, s=9, c=color, label=name, linewidths=0)
        axes.set_title(title)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_box_aspect(1)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, markerscale=2.5, frameon=False)
    figure.savefig(path, dpi=130, format="png")
