"""RoPAWSClassifier against what people use on features: few labels, pools with and without other images.

python benchmarks/features.py --data FOLDER [--work FOLDER] [--only NAME ...] [--methods NAME ...]
    [--labels 1 4] [--backbone dinov2-small --init FILE --views 0 --draws 3]

Ten settings (feature_tasks.py) with 1, 4 and 25 labels per class, five draws of the labels each, on features
that feature_collections.py computes once. Every cell is a file below --work, so the benchmark can be
interrupted, and shared among processes (--share 1/2 and 2/2). Runs on one thread. It writes what is there by
then, each row with its number of draws, to results/features.json; on another backbone, which needs a --work
of its own, the settings with images to results/features_BACKBONE.json. --draws 0 only writes.
"""

import argparse
import json
import statistics
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feature_collections import LITE0, SOURCES, Network
from feature_rivals import METHODS, OURS, Answer, Problem, problem
from feature_tasks import LABELS, TABLE, Data, load
from timing import write_results

from ropaws.core.files import write_json
from ropaws.insight.metrics import detection, expected_calibration_error

DRAWS = 5


def measure(method: str, p: Problem) -> dict[str, Any]:
    """Figures of one method on one draw, in percent."""
    began = time.perf_counter()
    answer = METHODS[method](p)
    seconds = time.perf_counter() - began
    found = {"seconds": round(seconds, 2), **figures(answer, p.data.test_truth)}
    if answer.share is not None:
        unlabeled = np.delete(p.data.truth, p.labeled)
        found |= {"share": 100 * answer.share, "true_share": 100 * float((unlabeled >= 0).mean())}
    return found | ({"words": answer.words} if answer.words else {})


def figures(answer: Answer, truth: np.ndarray) -> dict[str, Any]:
    known = truth >= 0
    probs, classes = torch.from_numpy(answer.probs[known]), torch.from_numpy(truth[known])
    found: dict[str, Any] = {
        "accuracy": 100 * float((probs.argmax(dim=1) == classes).double().mean()),
        "ece": 100 * expected_calibration_error(probs, classes),
    }
    if not known.all():
        inside = torch.from_numpy(known)
        by_score = {name: detection(torch.from_numpy(s), inside) for name, s in answer.scores.items()}
        name, best = max(by_score.items(), key=lambda item: item[1].auroc)
        found |= {"score": name, "auroc": 100 * best.auroc, "fpr95": 100 * best.fpr95}
    return found


def run_cells(options: argparse.Namespace) -> None:
    part, of = map(int, options.share.split("/"))
    # Draws last: a benchmark that is stopped early has all settings with fewer draws.
    cells = [(n, k, s) for s in range(options.draws) for n in options.only for k in options.labels]
    tasks: dict[str, Data] = {}
    for name, labels, seed in cells[part - 1 :: of]:
        path = cell_file(options.work, name, labels, seed)
        done = json.loads(path.read_text()) if path.exists() else {}
        missing = [method for method in options.methods if method not in done]
        if not missing:
            continue
        if name not in tasks:
            tasks[name] = load(TABLE[name], options.data, options.work, Network.chosen(options))
        p = problem(tasks[name], labels, seed)
        for method in missing:
            done[method] = measure(method, p)
        write_json(path, done)
        print(f"{name}, {labels} labels, draw {seed}: {_line(done)}", flush=True)


def cell_file(work: Path, name: str, labels: int, seed: int) -> Path:
    folder = work / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name.replace(' ', '_').replace(',', '')}-{labels}-{seed}.json"


def _line(done: dict[str, Any]) -> str:
    return ", ".join(f"{method} {found['accuracy']:.1f}" for method, found in done.items())


def summarize(work: Path, names: list[str]) -> dict[str, Any]:
    """The rows of the table of which a draw is complete, means of all such draws."""
    rows = {}
    for name in names:
        for labels in LABELS:
            paths = [cell_file(work, name, labels, seed) for seed in range(DRAWS)]
            draws = [json.loads(path.read_text()) for path in paths if path.exists()]
            if draws := [draw for draw in draws if set(draw) >= set(METHODS)]:
                rows[f"{name}, {labels}"] = row(draws)
    return rows


def row(draws: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and deviation of every figure, and how far ours is from the best rival."""
    methods = {}
    for method in METHODS:
        found: dict[str, Any] = {}
        for figure in ("accuracy", "auroc", "fpr95", "ece", "seconds", "share", "true_share"):
            values = [draw[method][figure] for draw in draws if figure in draw[method]]
            if values:
                found[figure] = round(statistics.fmean(values), 2)
                found[f"{figure}_deviation"] = round(statistics.stdev(values) if len(values) > 1 else 0.0, 2)
        methods[method] = found
    best = {}
    for figure in ("accuracy", "auroc"):
        rivals = {name: f[figure] for name, f in methods.items() if name != OURS and figure in f}
        if rivals:
            rival = max(rivals, key=lambda name: rivals[name])
            ahead = methods[OURS][figure] - rivals[rival]
            best[figure] = {"rival": rival, "ahead": round(ahead, 2)}
    heads = sum("head: linear" in draw[OURS]["words"] for draw in draws)
    return {"methods": methods, "best_rival": best, "draws": len(draws), "draws_with_head": heads}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/features"))
    parser.add_argument("--only", nargs="+", choices=TABLE, default=list(TABLE), metavar="NAME")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--labels", nargs="+", type=int, choices=LABELS, default=list(LABELS))
    parser.add_argument("--share", default="1/1")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--out", metavar="NAME", help="of the file in results")
    parser.add_argument("--commit", default=_commit(), help="that the cells were measured with")
    Network.add_options(parser)
    options = parser.parse_args()
    if (own := options.backbone != LITE0.backbone) and options.only == list(TABLE):
        options.only = [name for name, task in TABLE.items() if task.inside.collection in SOURCES]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # graphs that do not converge, regressions that separate perfectly
    run_cells(options)
    names = [name for name, task in TABLE.items() if not own or task.inside.collection in SOURCES]
    if rows := summarize(options.work, names):
        made = {"views": options.views, "commit": options.commit, "rows": rows}
        write_results(options.out or (f"features_{options.backbone}" if own else "features"), made)


def _commit() -> str:
    """Of the code that measures."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
