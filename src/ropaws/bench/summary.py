"""Cells of a benchmark as tables: means, deviations, paired differences."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

REFERENCE = "ropaws"
FEWEST_DRAWS = 3  # of an interval that says anything
LEVEL = 0.95  # of the interval of a paired difference
FIGURES = (
    "accuracy",
    "balanced_accuracy",
    "auroc",
    "auroc_unseen",
    "fpr95",
    "fpr95_unseen",
    "ece",
    "confidence_in",
    "confidence_out",
    "selected",
    "purity",
)


def summarize(results: Iterable[Mapping[str, Any]], *, reference: str = REFERENCE) -> list[dict[str, Any]]:
    """One table for each setting (data and labels), with a row for each method, in the order of results."""
    tables: dict[tuple[str, int], dict[str, list[Mapping[str, Any]]]] = {}
    for result in results:
        methods = tables.setdefault((result["data"], result["labels"]), {})
        methods.setdefault(result["method"], []).append(result)
    return [
        {
            "data": data,
            "labels": labels,
            "rows": [_row(name, cells, methods.get(reference, [])) for name, cells in methods.items()],
        }
        for (data, labels), methods in tables.items()
    ]


def _row(
    name: str, cells: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    figures = {}
    for key in FIGURES:
        values = [cell["figures"][key] for cell in cells if key in cell["figures"]]
        if values:
            figures[key] = {"mean": statistics.mean(values), "deviation": deviation(values)}
    row: dict[str, Any] = {
        "method": name,
        "seeds": sorted(cell["seed"] for cell in cells),
        "figures": figures,
        "images": statistics.mean(cell["images"] for cell in cells),
        "seconds": statistics.mean(cell["seconds"] for cell in cells),
        "curve": _mean_points([cell["curve"] for cell in cells]),
        "selection": _mean_points([cell["selection"] for cell in cells]),
        "given": cells[0]["given"],
    }
    pairs = _pairs(cells, reference)
    if pairs and cells[0] is not reference[0]:
        row["difference"] = {
            key: paired_difference([(a["figures"][key], b["figures"][key]) for a, b in pairs])
            for key in ("accuracy", "auroc")
            if all(key in cell["figures"] for pair in pairs for cell in pair)
        }
    return row


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation; None of a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def _pairs(
    cells: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Cells of the same seed, which had the same labels."""
    by_seed = {cell["seed"]: cell for cell in reference}
    return [(cell, by_seed[cell["seed"]]) for cell in cells if cell["seed"] in by_seed]


def paired_difference(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Mean of first minus second, with Student's interval over the draws of labels; none of fewer than 3."""
    differences = [first - second for first, second in pairs]
    mean, count = statistics.mean(differences), len(differences)
    if count < FEWEST_DRAWS:
        return {"mean": mean, "low": None, "high": None, "pairs": count}
    from scipy.stats import t  # slow to load

    half = float(t.ppf((1 + LEVEL) / 2, count - 1)) * statistics.stdev(differences) / math.sqrt(count)
    return {"mean": mean, "low": mean - half, "high": mean + half, "pairs": count}


def _mean_points(curves: Sequence[Sequence[Sequence[float | None]]]) -> list[list[float | None]]:
    """Mean over seeds of points that stand at the same places."""
    points: list[list[float | None]] = []
    longest = max(map(len, curves), default=0)
    for group in zip(*(curve for curve in curves if len(curve) == longest), strict=True):
        means: list[float | None] = []
        for values in zip(*group, strict=True):
            known = [value for value in values if value is not None]
            means.append(statistics.mean(known) if known else None)
        points.append(means)
    return points
