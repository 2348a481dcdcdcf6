"""`ropaws evaluate`, `report` and `compare`."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from ropaws.cli.parsing import parse, percent, print_fitting, run_of, text_table, wide_console
from ropaws.core.files import check_out_folder
from ropaws.core.run_layout import CONFIG, EVALUATION, METRICS
from ropaws.core.terminal import Terminal, say, say_json
from ropaws.report import rivals, run_page
from ropaws.report.compare_page import compare_runs, write_comparison
from ropaws.report.page import COLUMNS
from ropaws.report.rivals import verdict
from ropaws.report.run_files import RunFiles, figure
from ropaws.report.run_page import write_report
from ropaws.run.evaluate import PARTS
from ropaws.run.run import POOL, Run

MEASURES = {**COLUMNS, "fpr95": "FPR at 95 % TPR", "aupr_in": "AUPR in", "aupr_out": "AUPR out"}


@dataclass(frozen=True)
class Evaluate:
    """Analyze a run: accuracy, calibration, out-of-class detection, plain classifiers, pool, labels.

    Written to RUN/evaluation.json and RUN/gallery.json, from which `ropaws report` makes a page. What the run
    says of its images is kept in RUN/embeddings.safetensors: a second call is quick and needs no images.

    ropaws evaluate runs/mine --only soft-nn propagation
    """

    run: tyro.conf.Positional[Path]
    """A run folder."""
    only: tuple[str, ...] = ()
    """Only these: soft-nn, reliability, confusion, propagation, baselines, features, pool, labels,
    suggestions, snapshots, gallery; and supervised, which trains the supervised baseline: the same network on
    the labeled images alone."""
    pool: int = POOL
    """Unlabeled images to look at, at most; 0 for all."""
    test: Path | None = None
    """Where the test images are, if they are others than the run was trained with."""
    method: str | None = None
    """The run's method, repeated, if it is not part of ropaws: package.module:Class."""
    device: str | None = None
    """Where to compute; by default as the run was trained: auto, cpu, cuda ..."""
    json: bool = False
    """Print JSON instead of a table."""


def evaluate(arguments: list[str]) -> None:
    command = parse(Evaluate, "evaluate", arguments)
    run = run_of(command.run, command.method, pool=command.pool, device=command.device, test=command.test)
    results = run.evaluate(command.only or None)
    if command.json:
        say_json(results)
        return
    _show_figures(command.run, results, command.only)


def _show_figures(run: Path, results: Mapping[str, Any], only: Sequence[str]) -> None:
    """All that was found, or only the parts that were asked for."""
    console = Terminal()
    shown = {part: not only or part in only for part in PARTS}
    rows = [
        [name, f"{figure(results[key]) or 0:.1f}" if key == "seconds" else percent(results[key])]
        for key, name in MEASURES.items()
        if key in results
    ]
    if shown["soft-nn"] and "accuracy" in results:
        console.print(text_table(str(run), ["measure", "value"], rows))
    if any(shown[name] and name in results for name in ("baselines", "features", "supervised")):
        _show_rivals(console, results)
    if shown["snapshots"] and only and "over_training" not in results:
        print("There are no snapshots; train with --train.keep-every STEPS.")
    if shown["propagation"] and "propagation" in results:
        steps = [
            [
                "fixed point" if row["iterations"] is None else str(row["iterations"]),
                *(percent(row.get(key)) for key in ("accuracy", "confidence_in", "confidence_out")),
            ]
            for row in results["propagation"]
        ]
        head = ["iterations", "accuracy", "conf. in", "conf. out"]
        console.print(text_table("Label propagation among the test images", head, steps))
    _say_pool(results, shown)


def _show_rivals(console: Console, results: Mapping[str, Any]) -> None:
    """Other classifiers, on test images or else on labels that were held out."""
    rows = rivals.on_tests(results)
    if rows:
        alone = results.get("supervised", {})
        rows += [rivals.Row("supervised baseline", figure(alone.get("accuracy")), figure(alone.get("auroc")))]
        known = (row for row in rows if row.accuracy is not None)
        cells = [[row.name, percent(row.accuracy), percent(row.auroc)] for row in known]
        console.print(text_table("Other classifiers", ["classifier", "accuracy", "AUROC"], cells))
    elif rows := rivals.on_labels(results):
        cells = [[row.name, percent(row.accuracy), row.interval] for row in rows]
        head = ["classifier", "accuracy", "90 % interval"]
        console.print(text_table("On labels that were held out in turn", head, cells))
    if (found := rivals.on_features(results)) is not None:
        say(rivals.sentence(found))
    if (doubling := run_page.last_doubling(results)) is not None:
        say(run_page.doubling_sentence(doubling))


def _say_pool(results: Mapping[str, Any], shown: Mapping[str, bool]) -> None:
    pool = results.get("pool")
    if pool and shown["pool"]:
        print(
            f"{pool['out_of_class']:.0%} of {pool['seen']:,} unlabeled images look out-of-class"
            f" (in-domain probability below {pool['threshold']:.2f})."
        )
        if (share := pool.get("in_class_share")) is not None:
            ends = f"{100 * share['low']:.0f} to {share['high']:.0%}"
            doubt = f" {pool['share_doubt']}" if pool.get("share_doubt") else ""
            say(f"About {share['estimate']:.0%} ({ends}) of the pool belongs to your classes.{doubt}")
        if prior := pool.get("class_prior"):
            parts = (
                f"{name} {part['estimate']:.0%} ({100 * part['low']:.0f} to {part['high']:.0%})"
                for name, part in prior.items()
            )
            say(f"Of these, by class: {', '.join(parts)}.")
        if "accuracy" in pool:
            print(f"Of {pool['known']:,} whose true class is known, {percent(pool['accuracy'])} get it.")
    if results.get("label_errors") and shown["labels"]:
        print(f"{len(results['label_errors'])} suspected label errors; `ropaws report` shows them.")


@dataclass(frozen=True)
class Report:
    """Show a run on one self-contained page: what it learned, how sure it is, what to label next.

    Reads the run folder alone. A run that was not evaluated yet is evaluated first, for which its images
    must be there.

    ropaws report runs/mine
    """

    run: tyro.conf.Positional[Path]
    """A run folder."""
    out: Path | None = None
    """The page; by default RUN/report.html."""
    baseline: Path | None = None
    """A run of the supervised baseline to compare with; by default RUN/supervised, if it is there."""
    test: Path | None = None
    """Where the test images are, if they are others than the run was trained with."""
    method: str | None = None
    """The run's method, repeated, if it is not part of ropaws: package.module:Class."""
    device: str | None = None
    """Where to compute; by default as the run was trained."""


def report(arguments: list[str]) -> None:
    command = parse(Report, "report", arguments)
    if not any((command.run / name).exists() for name in (CONFIG, METRICS, EVALUATION)):
        raise FileNotFoundError(f"{command.run} is not a run folder: it has no {CONFIG}")
    _check_parent(command.out)
    if command.baseline is not None:
        _check_baseline(command.baseline)
    try:
        run = run_of(command.run, command.method, device=command.device, test=command.test)
    except (OSError, ValueError) as error:  # the page is made from what the folder has
        _warn(f"Not evaluated: {error}")
        _say_written(
            write_report(command.run, command.out, baseline=command.baseline), command.run, command.baseline
        )
        return
    write_page(run, command.out, command.baseline)


def write_page(run: Run, out: Path | None = None, baseline: Path | None = None) -> None:
    """Write the report of a run, and print its verdict."""
    _say_written(run.report(out, baseline=baseline), run.path, baseline)


def _say_written(page: Path, run: Path, baseline: Path | None) -> None:
    say(verdict(RunFiles(run, baseline)))
    say(f"Written: {page}")


def _warn(line: str) -> None:
    say(line, error=True)


def _check_parent(out: Path | None) -> None:
    if out is not None:
        check_out_folder(out.parent)


def _check_baseline(baseline: Path) -> None:
    """Was it evaluated, and is it a supervised baseline?"""
    if not (baseline / EVALUATION).is_file():
        raise FileNotFoundError(
            f"--baseline: {baseline} has no {EVALUATION}; run `ropaws evaluate {baseline}`"
        )
    method = RunFiles(baseline).method_name
    if method != "supervised":
        raise ValueError(
            f"--baseline: {baseline} is a {method} run, which has seen the unlabeled images;"
            " `ropaws evaluate RUN --only supervised` trains one that has not"
        )


@dataclass(frozen=True)
class Compare:
    """Put runs side by side; those that differ in the seed alone become one row with mean and deviation.

    ropaws compare runs/paws-* runs/ropaws-* --out comparison.html
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders that were evaluated; gains are over the first."""
    out: Path | None = None
    """Also write a page."""
    json: bool = False
    """Print JSON instead of a table."""


def compare(arguments: list[str]) -> None:
    command = parse(Compare, "compare", arguments)
    if not command.runs:
        raise ValueError("name the run folders to compare: ropaws compare runs/one runs/two")
    for run in command.runs:
        if not run.is_dir():
            raise FileNotFoundError(f"no run folder at {run}")
    comparison = compare_runs(command.runs)
    _check_parent(command.out)
    if command.out is not None:
        write_comparison(comparison, command.out)
    for line in comparison.left_out:
        _warn(f"left out {line}")
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
        say_json(found)
    else:
        print_fitting("In percent, mean and deviation over seeds", *comparison.rows())
        if comparison.varied and len(comparison.groups) > 1:
            # Names and values may take several lines: there is no limit to what can differ.
            wide_console().print(text_table("What differs", *comparison.settings_rows(), wrap=True))
    if command.out is not None:
        say(f"Written: {command.out}", error=True)
