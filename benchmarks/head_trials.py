"""What a head on features is best trained with, on data that is in no table.

python benchmarks/head_trials.py --data FOLDER [--work FOLDER] [--only VARIANT ...] [--share 1/2]
    [--tasks NAME ...] [--backbone dinov2-small --init FILE --views 0]

Six settings (TRIALS in feature_tasks.py) with 4 labels per class. The variants differ in one thing from what
RoPAWSClassifier does. Accuracy, ECE and AUROC on test rows; every cell is a file below --work, so the trials
can be interrupted and shared among processes. Writes results/head_trials.json, on another backbone (with a
--work of its own) results/head_trials_BACKBONE.json.
"""

import argparse
import json
import statistics
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from feature_collections import LITE0, Network
from feature_rivals import Answer, Problem, logistic_regression, oslo, problem
from feature_tasks import TRIALS, load
from features import cell_file, figures
from timing import write_results

from ropaws import RoPAWSClassifier
from ropaws.classify import head
from ropaws.core.files import write_json

DRAWS = 1
LABELS = (4,)  # per class


class Variant(NamedTuple):
    """Settings of the estimator, and of training."""

    estimator: dict[str, Any] = {}  # noqa: RUF012 - never changed
    training: dict[str, Any] = {}  # noqa: RUF012
    views: int | None = None  # random views at most


OBJECTIVE = head.OBJECTIVE
VARIANTS: dict[str, Variant] = {
    "default": Variant(),
    "no head": Variant({"head": None}),
    "no logistic regression": Variant({"regression_share": 0.0}),
    "more logistic regression": Variant({"regression_share": 0.75}),
    "prior by distance": Variant({"prior": "distance"}),
    "no prior": Variant({"prior": None}),
    "me-max over all images": Variant(training={"OBJECTIVE": replace(OBJECTIVE, reweight_entropy=False)}),
    "no propagation": Variant(training={"OBJECTIVE": replace(OBJECTIVE, semi_supervised_density=False)}),
    "sharpening 0.25": Variant(training={"OBJECTIVE": replace(OBJECTIVE, sharpen_temperature=0.25)}),
    "100 steps": Variant({"steps": 100}),
    "no views": Variant(views=0),
}


def answer(variant: Variant, p: Problem) -> Answer:
    before = {name: getattr(head, name) for name in variant.training}
    views = p.data.views
    if variant.views is not None and views is not None:
        views = views[:, : variant.views] if variant.views else None
    try:
        for name, value in variant.training.items():
            setattr(head, name, value)
        model = RoPAWSClassifier(random_state=p.seed, **variant.estimator).fit(p.data.features, p.y, views)
        return Answer(
            model.predict_proba(p.data.test),
            {"score": model.score_in_domain(p.data.test)},
            words=str(model.head_),
        )
    finally:
        for name, value in before.items():
            setattr(head, name, value)


RIVALS: dict[str, Callable[[Problem], Answer]] = {"logistic regression": logistic_regression, "OSLO": oslo}


def run_cells(options: argparse.Namespace) -> None:
    part, of = map(int, options.share.split("/"))
    cells = [(v, n, k, s) for v in options.only for n in options.tasks for k in LABELS for s in range(DRAWS)]
    tasks = {}
    for variant, name, labels, seed in cells[part - 1 :: of]:
        path = cell_file(options.work / "trials", f"{variant} {name}", labels, seed)
        if path.exists():
            continue
        if name not in tasks:
            tasks[name] = load(TRIALS[name], options.data, options.work, Network.chosen(options))
        if np.bincount(tasks[name].truth[tasks[name].truth >= 0]).min() <= labels:
            continue  # nothing of the class would be left in the pool
        p = problem(tasks[name], labels, seed)
        found = RIVALS[variant](p) if variant in RIVALS else answer(VARIANTS[variant], p)
        write_json(path, figures(found, p.data.test_truth) | {"words": found.words})


def summarize(work: Path) -> dict[str, Any]:
    """Means over settings and draws, per number of labels; variants that are complete."""
    rows: dict[str, Any] = {}
    for variant in (*RIVALS, *VARIANTS):
        row: dict[str, Any] = {}
        for labels in LABELS:
            paths = [
                cell_file(work / "trials", f"{variant} {n}", labels, s) for n in TRIALS for s in range(DRAWS)
            ]
            found = [json.loads(path.read_text()) for path in paths if path.exists()]
            for figure in ("accuracy", "auroc", "ece"):
                values = [cell[figure] for cell in found if figure in cell]
                if values:
                    row[f"{figure}, {labels}"] = round(statistics.fmean(values), 2)
            if found:
                row[f"worst ece, {labels}"] = round(max(cell["ece"] for cell in found), 1)
        if row:
            rows[variant] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*RIVALS, *VARIANTS]
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/features"))
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="VARIANT")
    parser.add_argument("--tasks", nargs="+", choices=TRIALS, default=list(TRIALS), metavar="NAME")
    parser.add_argument("--share", default="1/1")
    Network.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run_cells(options)
    own = "" if options.backbone == LITE0.backbone else f"_{options.backbone}"
    write_results(f"head_trials{own}", {"draws": DRAWS, "variants": summarize(options.work)})


if __name__ == "__main__":
    main()
