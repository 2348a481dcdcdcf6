"""`ropaws evaluate`, `report`, `compare` and `suggest`: call, and print what was found."""

import csv
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ropaws.analysis import PARTS, evaluate, read_evaluation, suggest
from ropaws.folder import CONFIG, EVALUATION, METRICS
from ropaws.gallery import PICTURES
from ropaws.options import Compare, Evaluate, Report, Suggest, check_flags, parse
from ropaws.report.compare_page import write_comparison
from ropaws.report.comparison import compare_runs
from ropaws.report.run_files import RunFiles
from ropaws.report.run_page import write_report
from ropaws.report.tables import COLUMNS
from ropaws.report.verdict import verdict
from ropaws.training.checkpoint import read_json, write_atomically, write_json

MEASURES = {**COLUMNS, "fpr95": "FPR at 95 % TPR", "aupr_in": "AUPR in", "aupr_out": "AUPR out"}


RIVALS = {"knn": "k-NN on its embedding", "logistic": "logistic regression on it", "sskde": "SSKDE on it"}
SPARE = ("FPR95", "seconds", "conf. in", "seeds", "ECE")  # columns that a narrow terminal can do without
WIDE = 160  # characters of a table that is written to a file


def run_evaluate(arguments: list[str]) -> None:
    check_flags(arguments, Evaluate)
    command = parse(Evaluate, "evaluate", arguments)
    results = evaluate(command.run, only=command.only or None, pool=command.pool, device=command.device)
    if command.json:
        print(json.dumps(results, indent=2))
        return
    _show_figures(command.run, results, command.only)


def _show_figures(run: Path, results: dict[str, Any], only: Sequence[str]) -> None:
    """All that was found, or only the parts that were asked for."""
    console = Console()
    shown = {part: not only or part in only for part in PARTS}
    rows = [
        [name, f"{results[key]:.1f}" if key == "seconds" else _percent(results[key])]
        for key, name in MEASURES.items()
        if key in results
    ]
    if shown["soft-nn"] and "accuracy" in results:
        console.print(_table(str(run), ["measure", "value"], rows))
    if (shown["baselines"] and "baselines" in results) or (shown["supervised"] and "supervised" in results):
        rivals = {"soft nearest neighbours": results.get("accuracy")}
        rivals |= {name: results.get("baselines", {}).get(key) for key, name in RIVALS.items()}
        rivals["labels alone, the same network"] = results.get("supervised", {}).get("accuracy")
        ways = [[name, _percent(value)] for name, value in rivals.items() if value is not None]
        console.print(_table("Accuracy of other ways", ["classifier", "accuracy"], ways))
    if shown["snapshots"] and only and "over_training" not in results:
        print("There are no snapshots; train with --train.keep-every STEPS.")
    if shown["propagation"] and "propagation" in results:
        steps = [
            [
                "fixed point" if row["iterations"] is None else str(row["iterations"]),
                *(_percent(row.get(key)) for key in ("accuracy", "confidence_in", "confidence_out")),
            ]
            for row in results["propagation"]
        ]
        head = ["iterations", "accuracy", "conf. in", "conf. out"]
        console.print(_table("Label propagation among the test images", head, steps))
    _say_pool(results, shown)


def _say_pool(results: dict[str, Any], shown: Mapping[str, bool]) -> None:
    pool = results.get("pool")
    if pool and shown["pool"]:
        print(
            f"{pool['out_of_class']:.0%} of {pool['seen']:,} unlabelled images look out-of-class"
            f" (in-domain probability below {pool['threshold']:.2f})."
        )
        if "accuracy" in pool:
            print(f"Of {pool['known']:,} whose true class is known, {_percent(pool['accuracy'])} get it.")
    if results.get("doubts") and shown["labels"]:
        print(f"{len(results['doubts'])} labels are doubted by their neighbours; `ropaws report` shows them.")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _console() -> Console:
    """As wide as the terminal, or for a file as wide as a table may need."""
    return Console() if Console().is_terminal else Console(width=WIDE)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, wrap: bool = False) -> Table:
    table = Table(title=escape(title))
    for number, name in enumerate(head):
        # Figures are never cut off; names may take several lines.
        table.add_column(
            escape(name), justify="left" if number == 0 else "right", no_wrap=number > 0 and not wrap
        )
    for row in rows:
        table.add_row(*(escape(_printable(cell)) for cell in row))
    return table


def _print_fitting(title: str, head: list[str], rows: list[list[str]]) -> None:
    """On a narrow terminal the least important columns are left out, rather than figures cut off."""
    console = _console()
    table = _table(title, head, rows)
    for name in SPARE:
        if table.__rich_measure__(console, console.options).minimum <= console.width:
            break
        if name in head:
            place = head.index(name)
            head, rows = _without(head, place), [_without(row, place) for row in rows]
            table = _table(f"{title}; {name} and more in the page (--out)", head, rows)
    console.print(table)


def _without(row: list[str], place: int) -> list[str]:
    return row[:place] + row[place + 1 :]


def run_report(arguments: list[str]) -> None:
    check_flags(arguments, Report)
    command = parse(Report, "report", arguments)
    if not any((command.run / name).exists() for name in (CONFIG, METRICS, EVALUATION)):
        raise FileNotFoundError(f"{command.run} is not a run folder: it has no {CONFIG}")
    if command.out is not None and not command.out.parent.is_dir():
        raise FileNotFoundError(f"--out: no folder {command.out.parent}; make it first")
    if command.baseline is not None:
        _check_baseline(command.baseline)
    if not _evaluated(command.run):
        try:
            evaluate(command.run, device=command.device)
        except Exception as error:
            # The page is made from what the folder has; it says itself what is missing.
            Console(stderr=True).print(
                f"Not evaluated: {error}", highlight=False, soft_wrap=True, markup=False
            )
    page = write_report(command.run, command.out, baseline=command.baseline)
    print(verdict(RunFiles(command.run, command.baseline)))
    print(f"Written: {page}")


def _check_baseline(baseline: Path) -> None:
    """Was it evaluated, and trained on the labels alone?"""
    if not (baseline / EVALUATION).is_file():
        raise FileNotFoundError(
            f"--baseline: {baseline} has no {EVALUATION}; run `ropaws evaluate {baseline}`"
        )
    method = read_json(baseline / CONFIG).get("method", {}).get("name")
    if method != "supervised":
        raise ValueError(
            f"--baseline: {baseline} is a {method} run, which has seen the unlabelled images;"
            " `ropaws evaluate RUN --only supervised` trains one that has not"
        )


def _evaluated(run: Path) -> bool:
    """Was the whole of `ropaws evaluate` run, and not a part of it, or an earlier version?"""
    return "suggestions" in read_evaluation(run) and (run / PICTURES).exists()


def run_compare(arguments: list[str]) -> None:
    check_flags(arguments, Compare)
    command = parse(Compare, "compare", arguments)
    if not command.runs:
        raise ValueError("name the run folders to compare: ropaws compare runs/one runs/two")
    for run in command.runs:
        if not run.is_dir():
            raise FileNotFoundError(f"no run folder at {run}")
    comparison = compare_runs(command.runs)
    if command.out is not None:
        if not command.out.parent.is_dir():
            raise FileNotFoundError(f"--out: no folder {command.out.parent}; make it first")
        write_comparison(comparison, command.out)
    console = Console(stderr=True)
    for line in comparison.left_out:
        console.print(f"left out {line}", highlight=False, soft_wrap=True, markup=False)
    if command.json:
        found = [
            {
                "run": group.name,
                "folders": [str(files.run) for files in group.runs],
                "mean": {name: statistics.mean(values) for name, values in group.figures.items()},
                "values": group.figures,
                "settings": {name: group.settings.get(name) for name in comparison.varied},
            }
            for group in comparison.groups
        ]
        print(json.dumps(found, indent=2))
    else:
        _print_fitting("In percent, mean and deviation over seeds", *comparison.rows())
        if comparison.varied and len(comparison.groups) > 1:
            # Names and values may take several lines: there is no limit to what can differ.
            _console().print(_table("What differs", *comparison.settings_rows(), wrap=True))
    if command.out is not None:
        print(f"Written: {command.out}", file=sys.stderr)


def run_suggest(arguments: list[str]) -> None:
    check_flags(arguments, Suggest)
    command = parse(Suggest, "suggest", arguments)
    if command.out is not None:
        if command.out.suffix not in (".csv", ".json"):
            raise ValueError(f"--out must end in .csv or .json, got {command.out}")
        if not command.out.parent.is_dir():
            raise FileNotFoundError(f"--out: no folder {command.out.parent}; make it first")
    found = suggest(command.run, n=command.n, pool=command.pool, device=command.device)
    if not found:
        print("There is no unlabelled image to suggest.")
        return
    if command.out is not None:
        _write_suggestions(command.out, found)
    rows = [[str(item["rank"]), item["name"], item["reason"]] for item in found]
    table = Table(title=f"Most worth a label in {escape(str(command.run))}")
    table.add_column("", justify="right")
    table.add_column("image", overflow="fold")
    table.add_column("why")
    for row in rows:
        table.add_row(*(escape(_printable(cell)) for cell in row))
    Console().print(table)
    if command.out is not None:
        print(f"Written: {command.out}")


def _printable(name: str) -> str:
    """File names need not be UTF-8; a terminal is."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _write_suggestions(out: Path, found: Sequence[dict[str, Any]]) -> None:
    if out.suffix == ".json":
        write_json(out, found)
        return

    def put(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.DictWriter(file, fieldnames=list(found[0]))
            writer.writeheader()
            writer.writerows(found)

    write_atomically(out, put)
