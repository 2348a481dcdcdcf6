"""The folder of a benchmark: its settings, which must stay the same, and the results of all its cells."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ropaws.bench.cells import RESULT, Cell, read_result
from ropaws.bench.summary import summarize
from ropaws.bench.tasks import Task
from ropaws.bench.workers import Done
from ropaws.config import differences
from ropaws.report.bench_page import write_bench_page
from ropaws.runs.atomic import read_json, write_json, write_text
from ropaws.runs.facts import digest_images
from ropaws.runs.images import fingerprint
from ropaws.runs.layout import REPORT

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


class Book:
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

    def note(self, cell: Cell, done: Done) -> str:
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
        """By data and labels; methods in the order of the call, then those of earlier calls."""
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
