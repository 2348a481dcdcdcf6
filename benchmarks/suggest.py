"""Is a suggested label worth more than a random one? Accuracy against the number of answers, by strategy.

python benchmarks/suggest.py --data FOLDER [--work FOLDER] [--seeds 40] [--only NAME ...]

Pools of suggest_settings.py on features that feature_collections.py computes once. Labels are chosen from
nothing: a cold start, then rounds, up to budgets of 1, 2, 4, 8 and 16 answers per class. A person answers
with the class or "out-of-class", which is an answer spent. After each round two classifiers are fitted to the
labels and tested on in-class rows: logistic regression, and RoPAWSClassifier, which also sees the pool; a
class without a label is never right. A seed draws a pool, the same for all strategies, so differences are
paired. Features are in 128 main directions, and RoPAWSClassifier is used without a head, to save time.

Every seed of a setting is a file below --work, so the benchmark can be interrupted, and shared among
processes (--share 1/2 and 2/2). Runs on one thread. Writes results/suggest.json from the seeds that all
settings have. `--tuning` runs the settings on which the choice was tuned instead; the table in the docs is of
`--tuning --seeds 20 --ways random typiclust coverage --judges "logistic regression"`.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student
from suggest_settings import TABLE, TUNING, Draw, Setting, Source, source
from timing import write_results
from torch import Tensor

from ropaws import RoPAWSClassifier
from ropaws.classify.logistic import fit_logistic
from ropaws.core.files import write_json
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.insight.suggestions import OURS, STRATEGIES, suggest

BUDGETS = (1, 2, 4, 8, 16)  # answers per class
JUDGES = ("logistic regression", "RoPAWSClassifier")
WAYS = (*STRATEGIES, OURS)
LEVEL = 0.95  # of the intervals
# Pools of these seeds and later ones were drawn after the last change to the choice; see docs/analysis.md.
FRESH = 20


def acquire(draw: Draw, strategy: str, seed: int) -> list[Tensor]:
    """Labels after each round.   ->  (n,) per budget"""
    labels = torch.full((len(draw.points),), UNLABELED)
    found = []
    for budget in BUDGETS:
        count = budget * draw.classes - int((labels != UNLABELED).sum())
        picks = suggest(
            draw.points,
            labels,
            classes=draw.classes,
            count=count,
            strategy=strategy,
            seed=1000 * seed + budget,
        )
        rows = torch.tensor([pick.position for pick in picks])
        labels[rows] = torch.where(draw.truth[rows] >= 0, draw.truth[rows], OUT_OF_CLASS)
        found.append(labels.clone())
    return found


def judged(draw: Draw, labels: Tensor, judges: Sequence[str]) -> dict[str, float]:
    """Accuracy on in-class test rows, and what the answers were, in percent."""
    known = labels >= 0
    answers = int((labels != UNLABELED).sum())
    found = {
        "in-class": 100 * int(known.sum()) / answers,
        "classes": 100 * len(labels[known].unique()) / draw.classes,
    }
    for judge in judges:
        predicted = _predict(draw, labels, judge) if bool(known.any()) else torch.tensor(UNLABELED)
        found[judge] = 100 * float((predicted == draw.test_truth).double().mean())
    return found


def _predict(draw: Draw, labels: Tensor, judge: str) -> Tensor:
    known = labels >= 0
    if judge == "logistic regression":
        model = fit_logistic(draw.points[known], labels[known], classes=draw.classes)
        return model(draw.test).argmax(dim=1)
    y = torch.where(known, labels, UNLABELED).numpy()
    classifier = RoPAWSClassifier(head=None).fit(draw.points.numpy(), y)
    return torch.from_numpy(classifier.predict(draw.test.numpy()))


def run_cells(options: argparse.Namespace, settings: dict[str, Setting]) -> None:
    part, of = map(int, options.share.split("/"))
    sources: dict[str, Source] = {}
    # Seeds first: a benchmark that is stopped early has all settings with fewer seeds.
    cells = [(seed, name) for seed in range(options.seeds) for name in options.only or settings]
    for seed, name in cells[part - 1 :: of]:
        path = cell_file(options.work, name, seed)
        missing = [way for way in options.ways if way not in read_cell(path)]
        if not missing:
            continue
        if name not in sources:
            sources[name] = source(settings[name], options.data, options.work)
        draw = sources[name].draw(seed)
        for way in missing:
            began = time.perf_counter()
            rounds = acquire(draw, way, seed)
            seconds = time.perf_counter() - began
            figures = [judged(draw, labels, options.judges) for labels in rounds]
            # Read anew: another process may have added other ways.
            write_json(path, {**read_cell(path), way: {"seconds": round(seconds, 2), "rounds": figures}})
        done = read_cell(path)
        line = ", ".join(f"{way} {_area(done[way], options.judges[0]):.1f}" for way in options.ways)
        print(f"{name}, seed {seed}: {line}", flush=True)


def cell_file(work: Path, name: str, seed: int) -> Path:
    folder = work / "suggest"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name.replace(' ', '_').replace(',', '').replace('%', 'percent')}-{seed}.json"


def read_cell(path: Path) -> dict[str, Any]:
    """What is known of a setting and seed, by strategy."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _area(found: dict[str, Any], figure: str) -> float:
    """Mean over the budgets: the area under the curve over the logarithm of the budget."""
    return statistics.fmean(row[figure] for row in found["rounds"])


def summarize(options: argparse.Namespace, settings: dict[str, Setting], first: int = 0) -> dict[str, Any]:
    """Means and paired differences to random choice, of the seeds from `first` on that all settings have."""
    ways, judges = options.ways, options.judges
    whole = [
        seed
        for seed in range(first, options.seeds)
        if all(_is_whole(cell_file(options.work, name, seed), ways, judges) for name in settings)
    ]
    if len(whole) < 2:
        return {}
    rows = {}
    for name in settings:
        cells = [read_cell(cell_file(options.work, name, seed)) for seed in whole]
        rows[name] = {judge: {way: _way(cells, way, judge) for way in ways} for judge in judges}
    return {
        "seeds": len(whole),
        "budgets": BUDGETS,
        "ours": OURS,
        "rows": rows,
        "verdict": verdict(rows, ways, judges),
    }


def _is_whole(path: Path, ways: Sequence[str], judges: Sequence[str]) -> bool:
    done = read_cell(path)
    return all(way in done and set(judges) <= set(done[way]["rounds"][-1]) for way in ways)


def _way(cells: list[dict[str, Any]], way: str, judge: str) -> dict[str, Any]:
    """Of one strategy: accuracy, in-class share and classes by budget, differences to random choice."""

    def by_budget(figure: str) -> list[float]:
        values = zip(*([row[figure] for row in cell[way]["rounds"]] for cell in cells), strict=True)
        return [round(statistics.fmean(column), 2) for column in values]

    gains = [
        paired([c[way]["rounds"][i][judge] - c["random"]["rounds"][i][judge] for c in cells])
        for i in range(len(BUDGETS))
    ]
    areas = [_area(cell[way], judge) for cell in cells]
    others = [_area(cell["random"], judge) for cell in cells]
    ours = [_area(cell[OURS], judge) for cell in cells]
    return {
        "accuracy": by_budget(judge),
        "in_class": by_budget("in-class"),
        "classes": by_budget("classes"),
        "over_random": gains,
        "area": round(statistics.fmean(areas), 2),
        "area_over_random": paired([a - b for a, b in zip(areas, others, strict=True)]),
        "ours_ahead": paired([a - b for a, b in zip(ours, areas, strict=True)]),
        "seconds": round(statistics.fmean(cell[way]["seconds"] for cell in cells), 2),
    }


def paired(differences: Sequence[float]) -> list[float]:
    """Mean, and the ends of its interval (Student's t)."""
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = float(student.ppf((1 + LEVEL) / 2, len(differences) - 1)) * error
    return [round(mean, 2), round(mean - half, 2), round(mean + half, 2)]


def verdict(rows: dict[str, Any], ways: Sequence[str], judges: Sequence[str]) -> dict[str, Any]:
    """Is it ahead of random at 1, 2 and 4, level with the best rival, nowhere below random?"""
    gains = {
        f"{name}, {judge}, {budget}": gain
        for name, by_judge in rows.items()
        for judge, by_way in by_judge.items()
        for budget, gain in zip(BUDGETS, by_way[OURS]["over_random"], strict=True)
    }
    early = {cell: gain for cell, gain in gains.items() if int(cell.rsplit(" ", 1)[1]) <= 4}
    cells = [(found, judge) for found in rows.values() for judge in judges]
    means = {
        way: round(statistics.fmean(found[judge][way]["area"] for found, judge in cells), 2) for way in ways
    }
    return {
        "early_cells": len(early),
        "not_ahead_early": {cell: gain for cell, gain in early.items() if gain[1] <= 0},
        "below_random": {cell: gain for cell, gain in gains.items() if gain[2] < 0},
        "mean_area": means,
        "best_rival": max((way for way in ways if way != OURS), key=lambda way: means[way]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/features"))
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME")
    parser.add_argument("--judges", nargs="+", choices=JUDGES, default=list(JUDGES), metavar="NAME")
    parser.add_argument("--share", default="1/1")
    parser.add_argument("--tuning", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # regressions that separate perfectly
    settings = TUNING if options.tuning else TABLE
    run_cells(options, settings)
    found = summarize(options, settings)
    if options.tuning and found:
        write_results("suggest", {"tuning": found})
    elif found:
        later = summarize(options, settings, FRESH)
        fresh = {"seeds": later["seeds"], **later["verdict"]} if later else {}
        write_results("suggest", {**found, "fresh": fresh})


if __name__ == "__main__":
    main()
