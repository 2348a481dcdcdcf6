"""Suspected label errors: our ranking against cleanlab's, on the same features with flipped labels.

python benchmarks/label_errors.py --data FOLDER --work FOLDER [--seeds 20] [--trials]

Needs `pip install cleanlab`. Labels are drawn per class, and 10 or 20 % of them flipped: to any other class,
or to the most similar one. cleanlab gets out-of-sample probabilities of scikit-learn's logistic regression by
five-fold cross-validation, on unit rows that are centered and scaled as ours are, with scikit-learn's C = 1
and with the C = 10 of this package. --trials are other data, on which ours was chosen; they write no results.
Each cell is kept in the folder of --work, so that a call goes on where the last one ended.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cleanlab
import numpy as np
import torch
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
from feature_collections import Array, Collection, collection
from scipy.stats import t as student
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from ropaws.classify.logistic import unit_rows
from ropaws.classify.soft_nn import LabeledEmbeddings, leave_one_out
from ropaws.insight.label_errors import label_quality, main_directions, rank_label_errors

RESULT = Path(__file__).parent / "results/label_errors.json"
PER_CLASS, RATES, FLIPS = (5, 25, 100), (0.1, 0.2), ("any", "similar")
SCORES = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")
STRENGTHS = (1.0, 10.0)  # C of logistic regression
FOLDS = 5
OURS, FORMER = "ours", "former"  # the former one: soft nearest neighbors at temperature 0.1
# Positions of the classes among the sorted labels of a collection; what comes after a colon is a note.
TABLE: dict[str, range] = {
    "cifar10": range(10),
    "garments": range(10),
    "solar": range(4),
    "xrays": range(2),
    "texts": range(6),
}
TRIALS: dict[str, Any] = {
    "cifar100": np.random.default_rng(5).permutation(100)[:20],
    "tiny": np.random.default_rng(6).permutation(172)[:20],
    "digits": range(10),
    "svhn": range(10),
    "texts": range(12, 18),
    "digits: two": (3, 8),
    "digits: four": (1, 4, 8, 9),
    "svhn: two": (3, 8),
    "texts: two": (12, 14),
    "texts: four": (13, 15, 16, 17),
}


class Labeled(NamedTuple):
    """Labels, some of them flipped."""

    features: Array  # (l, d)
    labels: Array  # (l,) as given
    wrong: Array  # (l,) bool
    classes: int


def rows_of(found: Collection, positions: Any, *, tests: bool) -> tuple[Array, Array]:
    """Features of some classes, with those of test images or without, and class numbers from 0."""
    features, labels = found.features, found.labels
    if tests:
        features = np.concatenate([features, found.test_features])
        labels = np.concatenate([labels, found.test_labels])
    names = np.sort(np.unique(labels)[list(positions)])
    inside = np.isin(labels, names)
    return features[inside].astype(np.float32), np.searchsorted(names, labels[inside])


def most_similar(features: Array, truth: Array) -> Array:
    """For each class the one whose mean is closest by cosine, around the mean of all."""
    rows = unit_rows(torch.from_numpy(features)).numpy()
    rows = rows - rows.mean(axis=0)
    means = np.stack([rows[truth == c].mean(axis=0) for c in range(truth.max() + 1)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    cosine = means @ means.T
    np.fill_diagonal(cosine, -np.inf)
    return cosine.argmax(axis=1)


def draw(features: Array, truth: Array, per_class: int, rate: float, flip: str, seed: int) -> Labeled:
    """Every class keeps two labels at least, without which cross-validation cannot be."""
    random = np.random.default_rng([seed, per_class, round(100 * rate), FLIPS.index(flip)])
    classes = int(truth.max()) + 1
    rows = np.concatenate(
        [random.permutation(np.flatnonzero(truth == c))[:per_class] for c in range(classes)]
    )
    right = truth[rows]
    similar = most_similar(features, truth)
    while True:
        flipped = random.permutation(len(rows))[: round(rate * len(rows))]
        labels = right.copy()
        if flip == "any":
            labels[flipped] = (right[flipped] + random.integers(1, classes, len(flipped))) % classes
        else:
            labels[flipped] = similar[right[flipped]]
        if np.bincount(labels, minlength=classes).min() >= 2:
            return Labeled(features[rows], labels, labels != right, classes)


def ours(data: Labeled) -> tuple[Array, list[int]]:
    features, labels = torch.from_numpy(data.features), torch.from_numpy(data.labels)
    found = rank_label_errors(features, labels, classes=data.classes)
    return label_quality(features, labels, classes=data.classes).numpy(), [item.position for item in found]


def former(data: Labeled) -> tuple[Array, list[int]]:
    labels = torch.from_numpy(data.labels)
    rows = unit_rows(torch.from_numpy(data.features))
    probs = leave_one_out(LabeledEmbeddings(rows, labels, data.classes), temperature=0.1)
    margin = probs.gather(1, labels[:, None]).squeeze(1) - probs.amax(dim=1)
    return margin.numpy(), (margin < 0).nonzero().squeeze(1).tolist()


def out_of_sample(data: Labeled, strength: float) -> Array:
    points = main_directions(torch.from_numpy(data.features))
    rows = points.left * points.squared.sqrt()  # turned: the fit and its penalty stay
    folds = StratifiedKFold(min(FOLDS, int(np.bincount(data.labels).min())), shuffle=True, random_state=0)
    model = LogisticRegression(C=strength, max_iter=1000)
    return cross_val_predict(model, rows.numpy(), data.labels, cv=folds, method="predict_proba")


def figures(data: Labeled, quality: Array, flagged: list[int]) -> dict[str, float]:
    count = int(data.wrong.sum())
    first = np.argsort(quality, kind="stable")[:count]
    hits = int(data.wrong[flagged].sum())
    return {
        "precision": float(data.wrong[first].mean()),  # at the number of errors
        "auprc": float(average_precision_score(data.wrong, -np.clip(quality, -1e9, 1e9))),
        "flagged": len(flagged) / len(quality),
        "f1": 2 * hits / (len(flagged) + count),
    }


def cell(data: Labeled) -> dict[str, Any]:
    begin = time.process_time()
    found = {OURS: figures(data, *ours(data))}
    found[OURS]["seconds"] = time.process_time() - begin
    found[FORMER] = figures(data, *former(data))
    for strength in STRENGTHS:
        begin = time.process_time()
        probs = out_of_sample(data, strength)
        seconds = time.process_time() - begin
        flagged = find_label_issues(data.labels, probs, return_indices_ranked_by="self_confidence", n_jobs=1)
        for score in SCORES:
            quality = get_label_quality_scores(data.labels, probs, method=score)
            found[f"{score}, C={strength:g}"] = figures(data, quality, flagged.tolist()) | {
                "seconds": seconds
            }
    return found


def interval(differences: Array) -> list[float]:
    """Mean, and the ends of its 95 % interval."""
    count = len(differences)
    reach = float(student.ppf(0.975, count - 1)) * differences.std(ddof=1) / math.sqrt(count)
    return [float(differences.mean() + side * reach) for side in (0, -1, 1)]


def row(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of all rankings, and ours against the one that is best on average in this row."""
    names = list(cells[0])
    means = {n: {k: float(np.mean([c[n][k] for c in cells])) for k in cells[0][n]} for n in names}
    against: dict[str, Any] = {}
    for figure in ("precision", "auprc", "f1"):
        values = {n: np.array([c[n][figure] for c in cells]) for n in names}
        best = max((n for n in names if n not in (OURS, FORMER)), key=lambda n: values[n].mean())
        against[figure] = {
            "best": best,
            "ahead": interval(values[OURS] - values[best]),
            "ahead_of_former": interval(values[OURS] - values[FORMER]),
        }
    return {"rankings": means, "cleanlab": against, "seeds": len(cells)}


def settings(classes: int, most: int) -> Iterator[tuple[int, float, str]]:
    """Labels per class, share of flipped ones, to which class; with two classes there is one other."""
    for per_class in (count for count in PER_CLASS if count <= most):
        for rate in RATES:
            for flip in FLIPS[: 1 if classes == 2 else 2]:
                yield per_class, rate, flip


def kept(path: Path, features: Array, truth: Array, setting: tuple[int, float, str], seed: int) -> Any:
    """The figures of a draw: from the file of an earlier call, else computed."""
    if not path.exists():
        found = cell(draw(features, truth, *setting, seed))
        path.with_suffix(".tmp").write_text(json.dumps(found))
        path.with_suffix(".tmp").replace(path)
    return json.loads(path.read_text())


def measured(options: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    folder = options.work / ("label_errors_trials" if options.trials else "label_errors")
    folder.mkdir(parents=True, exist_ok=True)
    for name, positions in (TRIALS if options.trials else TABLE).items():
        features, truth = rows_of(
            collection(name.split(":")[0], options.data, options.work), positions, tests=options.trials
        )
        for setting in settings(int(truth.max()) + 1, int(np.bincount(truth).min())):
            words = ", ".join(map(str, (name, *setting)))
            seeds = range(options.seeds)
            cells = [kept(folder / f"{words}, {seed}.json", features, truth, setting, seed) for seed in seeds]
            per_class, rate, flip = setting
            key = f"{name}, {per_class}, {round(100 * rate)}, {flip}"
            rows[key] = row(cells)
            for figure, against in rows[key]["cleanlab"].items():
                print(key, figure, [round(100 * value, 1) for value in against["ahead"]], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/features"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measured(options)
    if not options.trials:
        found = {"cleanlab": cleanlab.__version__, "rows": rows}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
