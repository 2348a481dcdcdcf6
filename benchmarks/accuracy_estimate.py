"""How accurate is it, without test images? Bias and coverage of estimates from a person's labels, simulated.

python benchmarks/accuracy_estimate.py --data FOLDER --work FOLDER [--seeds 50] [--trials]

From pools of features with out-of-class rows, labels are chosen at random, as k-means centers or as `ropaws
suggest` does, in rounds up to 160, and answered by the truth. Logistic regression learns from them, with
out-of-class as one more class. What the labels say of its accuracy on the rest of the pool is compared with
the truth; the naive estimate takes the held-out labels for a random sample. --trials are other data, on which
the estimate was designed; they write no results. Each simulation is kept in the folder of --work, so that a
call goes on where the last one ended.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import feature_tasks
import numpy as np
import torch
from feature_collections import Array
from torch import Tensor

from ropaws.core.features import main_points
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.insight.accuracy_estimate import (
    AccuracyEstimate,
    audit_accuracy,
    closed_answers,
    draw_audit,
    open_answers,
    pool_accuracy,
)
from ropaws.insight.held_out import held_out_probs, logistic_probs
from ropaws.insight.suggestions import STRATEGIES, Situation, suggest

RESULT = Path(__file__).parent / "results/accuracy_estimate.json"
BUDGETS = (20, 40, 80, 160)
POOL = 2000  # rows at most, drawn anew for each seed
AUDIT = 30
TABLE = ("CIFAR-10", "CIFAR-10 + CIFAR-100", "garments", "texts")
TRIALS = ("20 of CIFAR-100 + others", "20 of Tiny-ImageNet + others", "SVHN + CIFAR-100", "other texts")
# points (n, d), labels (n,), classes, how many, seed  ->  positions
Choose = Callable[[Tensor, Tensor, int, int, int], list[int]]


def by_strategy(name: str) -> Choose:
    def choose(points: Tensor, labels: Tensor, classes: int, count: int, seed: int) -> list[int]:
        alike = torch.ones(len(points))
        return STRATEGIES[name](Situation(points, labels, classes, alike, alike[:, None]), count, seed)

    return choose


def by_suggestion(points: Tensor, labels: Tensor, classes: int, count: int, seed: int) -> list[int]:
    return [item.position for item in suggest(points, labels, classes=classes, count=count, seed=seed)]


CHOICES: dict[str, Choose] = {
    "random": by_strategy("random"),
    "k-means": by_strategy("k-means"),
    "suggested": by_suggestion,
}


class Round(NamedTuple):
    """The labels of a budget, what a classifier says, and the truth. Rows of probabilities end with out."""

    held_out: Array  # (l, c + 1) of the labeled rows
    labels: Array  # (l,)
    audit: Array  # (l,) bool
    pool: Array  # (u, c + 1) of the rows without a label
    truth: Array  # (u,)


def simulated(data: feature_tasks.Data, choose: Choose, seed: int) -> Iterator[Round]:
    """For each budget without an audit, then with one."""
    random = np.random.default_rng(seed)
    rows = random.permutation(len(data.features))[:POOL]
    points = main_points(torch.from_numpy(data.features[rows]))
    truth = torch.from_numpy(data.truth[rows])
    answers = torch.where(truth < 0, OUT_OF_CLASS, truth)
    labels = torch.full_like(truth, UNLABELED)
    for budget in BUDGETS:
        more = budget - int((labels != UNLABELED).sum())
        chosen = choose(points, labels, data.classes, more, seed)
        labels[chosen] = answers[chosen]
        audit = torch.zeros(len(labels), dtype=torch.bool)
        yield judged(points, labels, answers, audit, data.classes)
        audit[draw_audit((labels == UNLABELED).nonzero().squeeze(1), AUDIT, seed)] = True
        yield judged(points, torch.where(audit, answers, labels), answers, audit, data.classes)


def judged(points: Tensor, labels: Tensor, answers: Tensor, audit: Tensor, classes: int) -> Round:
    known = labels != UNLABELED
    numbers = torch.where(labels == OUT_OF_CLASS, classes, labels)[known]
    held_out = held_out_probs(points[known], numbers, classes=classes + 1)
    pool = logistic_probs(points[known], numbers, points[~known], classes + 1)
    found = (held_out.float(), labels[known], audit[known], pool.float(), answers[~known])
    return Round(*(part.numpy() for part in found))


def kept(path: Path, data: feature_tasks.Data, choice: str, seed: int) -> list[Round]:
    """From the file of an earlier call, else simulated."""
    if not path.exists():
        rounds = [found._asdict() for found in simulated(data, CHOICES[choice], seed)]
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, **{f"{i} {k}": v for i, found in enumerate(rounds) for k, v in found.items()})
        temporary.replace(path)
    with np.load(path) as arrays:
        return [Round(*(arrays[f"{i} {key}"] for key in Round._fields)) for i in range(2 * len(BUDGETS))]


class Found(NamedTuple):
    """One estimate and the truth."""

    estimate: AccuracyEstimate
    truth: float

    @property
    def holds(self) -> bool:
        return self.estimate.low <= self.truth <= self.estimate.high


def estimates(found: Round) -> dict[str, Found]:
    """By figure and way; those that say nothing are left out. Rounds with an audit are asked for it alone."""
    held_out, labels, audit, pool, truth = (torch.from_numpy(part) for part in found)
    classes = held_out.shape[1] - 1
    given, true = (torch.where(part == OUT_OF_CLASS, classes, part) for part in (labels, truth))
    inside, truly = given < classes, true < classes
    right = {"overall": open_answers(held_out).answer == given}
    right["in-class"] = (closed_answers(held_out).answer == given)[inside]
    actual = {"overall": share(open_answers(pool).answer == true)}
    actual["in-class"] = share((closed_answers(pool).answer == true)[truly])
    if bool(audit.any()):
        sample = {"overall": right["overall"][audit], "in-class": right["in-class"][audit[inside]]}
        ways = {f"{figure}, audit": audit_accuracy(sample[figure]) for figure in sample}
    else:
        corrected = pool_accuracy(held_out, labels, audit, pool)
        # The naive way says something of the same labels as the corrected one: they can be compared.
        ways = {"overall, corrected": corrected.overall, "in-class, corrected": corrected.in_class}
        for figure, said in (("overall", corrected.overall), ("in-class", corrected.in_class)):
            ways[f"{figure}, naive"] = audit_accuracy(right[figure]) if said is not None else None
    return {way: Found(said, actual[way.split(", ")[0]]) for way, said in ways.items() if said is not None}


def share(right: Tensor) -> float:
    return float(right.double().mean())


def summary(found: list[Found]) -> dict[str, float]:
    """In points; how often the interval holds, in percent."""
    errors = np.array([one.estimate.value - one.truth for one in found])
    return {
        "estimates": len(found),
        "truth": round(100 * float(np.mean([one.truth for one in found])), 2),
        "bias": round(100 * float(errors.mean()), 2),
        "error": round(100 * float(np.sqrt((errors**2).mean())), 2),
        "holds": round(100 * float(np.mean([one.holds for one in found])), 2),
        "width": round(100 * float(np.mean([one.estimate.high - one.estimate.low for one in found])), 2),
    }


def summaries(rounds: dict[tuple[str, str], list[list[Round]]]) -> dict[str, dict[str, float]]:
    """For each pool, choice, budget, figure and way; "all" takes all pools, choices or budgets together."""
    groups: dict[str, list[Found]] = {}
    for (task, choice), simulations in rounds.items():
        for i, found in ((i, found) for parts in simulations for i, found in enumerate(parts)):
            budget = str(BUDGETS[i // 2])
            for way, one in estimates(found).items():
                for where in (
                    *((task, choice, budget), (task, "all", "all"), ("all", choice, budget)),
                    *(("all", choice, "all"), ("all", "all", "all")),
                ):
                    groups.setdefault("; ".join((*where, way)), []).append(one)
    return {key: summary(found) for key, found in sorted(groups.items())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/features"))
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--trials", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks = feature_tasks.TRIALS if options.trials else feature_tasks.TABLE
    names = TRIALS if options.trials else TABLE
    data = {name: feature_tasks.load(tasks[name], options.data, options.work) for name in names}
    rounds: dict[tuple[str, str], list[list[Round]]] = {}
    folder = options.work / "accuracy_estimate"
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        for name in names:
            for choice in CHOICES:
                path = folder / f"{name}, {choice}, {seed}.npz"
                rounds.setdefault((name, choice), []).append(kept(path, data[name], choice, seed))
        print(f"seed {seed}", flush=True)
    groups = summaries(rounds)
    for key in (key for key in groups if key.startswith("all; all")):
        print(key, groups[key])
    if not options.trials:
        result = {"seeds": options.seeds, "pool": POOL, "audit": AUDIT, "pools": names, "groups": groups}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
