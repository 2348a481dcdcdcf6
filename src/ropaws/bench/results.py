"""The folder of a benchmark: its settings, which must stay the same, the results of its cells, and tables of
them with means, deviations and paired differences.
"""

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from scipy.special import stdtrit

from ropaws.bench.cells import RESULT, Cell, read_result
from ropaws.bench.entries import Task
from ropaws.bench.workers import WorkResult
from ropaws.core.files import read_json, write_json, write_text
from ropaws.core.run_layout import REPORT
from ropaws.report.bench_page import write_bench_page
from ropaws.run.config import differences
from ropaws.run.manifest import digest_images
from ropaws.run.outputs import fingerprint

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
    half = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * statistics.stdev(differences) / math.sqrt(count)
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


SETTINGS, RESULTS, ERROR = "bench.json", "results.json", "error.txt"


def task_facts(task: Task) -> dict[str, Any]:
    """What the page says of the data, and a digest of all images and labels."""
    state = hashlib.blake2b(digest_images(task.corpus.train_images).encode(), digest_size=16)
    state.update(bytes(fingerprint(task.corpus).tolist()))
    return {
        "classes": len(task.corpus.class_names),
        "in_class": int(task.in_class.sum()),
        "out_of_class": int((~task.in_class).sum()),
        "tests": int((task.corpus.test_labels >= 0).sum()),
        "out_tests": int((task.corpus.test_labels < 0).sum()) - task.unseen,
        "unseen_tests": task.unseen,
        "digest": state.hexdigest(),
    }


def open_folder(out: Path, settings: Mapping[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Check that the folder has cells of the same settings and data. Returns the facts of all its data.

    Methods, data, labels and seeds may be added.
    """
    path = out / SETTINGS
    if (out / "cells").is_dir() or path.exists():
        earlier = _read_settings(path)
        known = earlier.pop("data", {})
        changed = differences(earlier, settings)
        changed += [
            f"{name} had other images or labels"
            for name, found in facts.items()
            if name in known and known[name].get("digest") != found["digest"]
        ]
        if changed:
            raise ValueError(
                f"{out} is a bench of other settings: {'; '.join(changed)}. Choose another --out"
            )
        facts = known | facts
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, {**settings, "data": facts})
    return facts


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("data", {}), dict):
        raise ValueError(f"{path} is missing or damaged; choose another --out, or delete {path.parent}")
    return found


class BenchResults:
    """All results of a folder, those of earlier calls included, and what has failed in this one.

    Args:
        out: The folder.
        head: What results.json says of the whole bench.
        methods: In the order in which they are shown; others follow.
        console: Takes a line about a damaged result.
    """

    def __init__(self, out: Path, head: Mapping[str, Any], methods: Sequence[str], console: Console) -> None:
        self.out, self.head, self.methods, self.console = out, head, methods, console
        self.results: dict[Path, dict[str, Any]] = {}
        self.failures: list[dict[str, Any]] = []
        for path in sorted((out / "cells").glob(f"*/*/*/*/{RESULT}")):
            if (found := read_result(path)) is not None:
                self.results[path.parent] = found
            else:
                console.print(f"{path} is damaged; its cell is run again", highlight=False, soft_wrap=True)
                path.unlink()

    def has(self, cell: Cell) -> bool:
        return cell.folder(self.out) in self.results

    def note(self, cell: Cell, done: WorkResult) -> str:
        """Take down what became of a cell; a line about it."""
        name = f"{cell.method}, {cell.data.name}, {cell.labels} labels, seed {cell.seed}"
        folder = cell.folder(self.out)
        if done.result is not None:
            self.results[folder] = done.result
            (folder / ERROR).unlink(missing_ok=True)
            return f"{name}: accuracy {100 * done.result['figures']['accuracy']:.1f} %"
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / ERROR, f"{done.reason}\n{done.details}")
        self.failures.append(
            {
                "method": cell.method,
                "data": cell.data.name,
                "labels": cell.labels,
                "seed": cell.seed,
                "reason": done.reason,
                "file": str((folder / ERROR).relative_to(self.out)),
            }
        )
        return f"{name}: failed ({done.reason})"

    def ordered(self) -> list[dict[str, Any]]:
        """Results by data and labels; methods in the order of the call, then those of earlier calls."""
        order = {name: number for number, name in enumerate(self.methods)}
        last = len(order)
        return sorted(
            self.results.values(),
            key=lambda r: (r["data"], r["labels"], order.get(r["method"], last), r["method"], r["seed"]),
        )

    def write(self) -> dict[str, Any]:
        """results.json and the page."""
        results = self.ordered()
        shown = ("data", "labels", "seed", "method", "figures")
        content = {
            **self.head,
            "tables": summarize(results),
            "cells": [{key: result[key] for key in shown} for result in results],
            "failures": self.failures,
        }
        write_json(self.out / RESULTS, content)
        write_bench_page(self.out / REPORT, content)
        return content
