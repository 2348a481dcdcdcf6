"""Pools whose classes are not equally frequent: RoPAWSClassifier against what people use on features.

python benchmarks/imbalance.py --data FOLDER [--features lite0=FOLDER dinov2-s=FOLDER] [--work FOLDER]
    [--pools cifar10 solar xrays] [--junk none svhn cifar100] [--kinds "as the pool" equal reversed]
    [--labels 40] [--draws 5] [--methods ...]

FOLDER of --features is a --work folder of feature_collections.py; features are computed where they are
missing. CIFAR-10 is in a long tail: the largest class has up to 300 images, the smallest one ratio times
fewer. As many images of no class are added, or none. Solar cells and X-rays are as they are, unequal by
nature, beside images of other kinds as in features.py. Labels are drawn from the in-class images at
random ("as the pool"), are equally many per class, or are most where the pool has fewest ("reversed").
Every cell is a file below --work that keeps what each method has reached, so the benchmark can be
interrupted; draws come last. All figures are of the unlabeled images of the pool. Writes
results/imbalance.json from the cells that are there; other settings there stay.
"""

import argparse
import itertools
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import feature_rivals as rivals
import numpy as np
import torch
from feature_collections import Array, Network, collection
from feature_rivals import Problem
from feature_tasks import TABLE, Data, load
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from timing import RESULTS, write_results

from ropaws import RoPAWSClassifier
from ropaws.core.files import write_json

LARGEST = 300  # images of the largest class
NATURAL = 0  # ratio of a pool that is as it is
FIRST_DRAW = 1  # draw 0 was looked at while "auto" was made, so it is in no table
SETTINGS = (
    (1, "equal"), (10, "as the pool"), (100, "as the pool"), (10, "equal"), (100, "equal"), (10, "reversed"),
)  # fmt: skip
KINDS = ("as the pool", "equal", "reversed")
JUNK = ("none", "svhn", "cifar100")
REAL = {"solar": "solar cells + X-rays, Tiny-ImageNet", "xrays": "X-rays + solar cells, Tiny-ImageNet"}
NETWORKS = {"lite0": Network(views=0), "dinov2-s": Network("dinov2-small", views=0)}


class Cell(NamedTuple):
    """What is measured; a draw of images and labels."""

    network: str
    inside: str
    junk: str
    ratio: int
    kind: str  # of labels
    labels: int
    draw: int

    @property
    def file(self) -> str:
        return "_".join(str(part).replace(" ", "-") for part in self) + ".json"


class Pool(NamedTuple):
    """Features; truth is -1 for images of no class, y is -1 without a label."""

    rows: Array
    truth: Array
    y: Array

    @property
    def classes(self) -> Array:
        """Those that have a label; the others cannot be known."""
        return np.unique(self.y[self.y >= 0])

    def problem(self, draw: int) -> Problem:
        """As the rivals of features.py take it, with the pool in the place of the test images."""
        number = np.full(int(self.truth.max()) + 2, -1)
        number[self.classes] = np.arange(len(self.classes))
        truth = number[self.truth]
        data = Data(self.rows, None, truth, self.rows, truth, len(self.classes))
        return rivals.problem(data, 1, draw)._replace(labeled=np.flatnonzero(self.y >= 0))


def pool(cell: Cell, options: argparse.Namespace) -> Pool:
    random = np.random.default_rng(cell.draw)
    work, network = options.features[cell.network], NETWORKS[cell.network]
    if cell.inside in REAL:
        found = load(TABLE[REAL[cell.inside]], options.data, work, network)
        return Pool(found.features, found.truth, _labels(cell, found.truth, random))
    source = collection(cell.inside, options.data, work, network)
    counts = np.round(LARGEST * float(cell.ratio) ** (-np.arange(10) / 9)).astype(int)
    order = random.permutation(10)  # which class is how frequent
    chosen = [
        random.permutation(np.flatnonzero(source.labels == c)[:LARGEST])[:n]
        for c, n in zip(order, counts, strict=True)
    ]
    truth = np.repeat(order, counts)
    inside = source.features[np.concatenate(chosen)]
    y = _labels(cell, truth, random)
    if cell.junk != "none":
        other = collection(cell.junk, options.data, work, network).features
        outside = other[random.permutation(len(other))[: len(inside)]]
        inside = np.concatenate([inside, outside])
        truth, y = (np.concatenate([part, np.full(len(outside), -1)]) for part in (truth, y))
    return Pool(inside, truth, y)


def _labels(cell: Cell, truth: Array, random: np.random.Generator) -> Array:
    y, inside = np.full(len(truth), -1), np.flatnonzero(truth >= 0)
    sizes = np.bincount(truth[inside])
    if cell.kind == "as the pool":
        chosen = inside[random.permutation(len(inside))[: cell.labels]]
        y[chosen] = truth[chosen]
        return y
    wanted = np.full(len(sizes), cell.labels // len(sizes))
    if cell.kind == "reversed":
        inverse = np.sort(sizes)[::-1][np.argsort(np.argsort(sizes))]
        wanted = np.maximum(1, np.round(cell.labels * inverse / inverse.sum())).astype(int)
    for c, size in enumerate(sizes):
        own = random.permutation(np.flatnonzero(truth == c))
        y[own[: min(wanted[c], size - 1)]] = c
    return y


class Answer(NamedTuple):
    """Of all rows of the pool."""

    predicted: Array
    scores: dict[str, Array] = {}  # noqa: RUF012 - never changed; each is high in-class
    more: dict[str, float] = {}  # noqa: RUF012


def _of(rival: Callable[[Problem], rivals.Answer]) -> Callable[[Pool, int], Answer]:
    def answer(p: Pool, draw: int) -> Answer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = rival(p.problem(draw))
        return Answer(p.classes[found.probs.argmax(axis=1)], dict(found.scores))

    return answer


def _plain(p: Problem) -> rivals.Answer:
    model = LogisticRegression(C=10, max_iter=2000).fit(p.rows[p.labeled], p.known)
    probs = model.predict_proba(p.test)
    return rivals.Answer(probs, {"probability": probs.max(axis=1)})


def _with_em(p: Problem) -> rivals.Answer:
    """Saerens et al. (2002) on the balanced one, over all rows: it knows of no other class."""
    found = rivals.logistic_regression(p)
    frequencies = np.full(p.data.classes, 1 / p.data.classes)
    for _ in range(100):
        probs = found.probs * frequencies
        probs /= probs.sum(axis=1, keepdims=True)
        frequencies = probs.mean(axis=0)
    return found._replace(probs=probs)


def _ours(p: Pool, class_prior: Any, draw: int) -> Answer:
    true = np.array([(p.truth == c).sum() for c in p.classes], float)
    true /= true.sum()
    model = RoPAWSClassifier(class_prior=true if class_prior == "true" else class_prior, random_state=draw)
    model.fit(p.rows, p.y)
    inside = np.isin(p.truth, p.classes)[p.y < 0]
    share, flagged = model.in_class_share_, model.out_of_class(p.rows)[p.y < 0]
    more = {
        "share_error": 100 * (share.estimate - float(inside.mean())),
        "share_covers": 100.0 * float(share.low <= inside.mean() <= share.high),
        "prior_distance": 100 * float(np.abs(model.class_prior_ - true).sum()),
        "inside_flagged": 100 * float(flagged[inside].mean()),
        "head": 100.0 * (model.head_ is not None),
    }
    if not inside.all():
        more["outside_flagged"] = 100 * float(flagged[~inside].mean())
    return Answer(model.predict(p.rows), {"score": model.score_in_domain(p.rows)}, more)


UNIFORM, OURS, TRUE = (
    "RoPAWSClassifier, uniform",
    "RoPAWSClassifier",
    "RoPAWSClassifier, true frequencies",
)
METHODS: dict[str, Callable[[Pool, int], Answer]] = {
    "logistic regression": _of(_plain),
    "the same, balanced": _of(rivals.logistic_regression),
    "the same, with EM": _of(_with_em),
    "class means": _of(rivals.class_mean),
    "LabelSpreading": _of(rivals.label_spreading),
    "SelfTraining": _of(rivals.self_training),
    "OSLO": _of(rivals.oslo),
    UNIFORM: lambda p, draw: _ours(p, "uniform", draw),
    OURS: lambda p, draw: _ours(p, "auto", draw),
    TRUE: lambda p, draw: _ours(p, "true", draw),
}


def measure(p: Pool, answer: Answer) -> dict[str, float]:
    rows = (p.y < 0) & (p.truth >= 0)
    right = answer.predicted[rows] == p.truth[rows]
    sizes = np.bincount(p.truth[p.truth >= 0])
    recalls = [float(right[p.truth[rows] == c].mean()) for c in range(len(sizes))]
    rare = np.isin(p.truth[rows], np.argsort(sizes)[: max(1, len(sizes) // 3)])
    found = {
        "accuracy": 100 * float(right.mean()),
        "balanced": 100 * statistics.mean(recalls),
        "rare": 100 * float(right[rare].mean()),
        "unknown": 100 * float((~np.isin(p.truth[rows], p.classes)).mean()),  # of classes without a label
        **answer.more,
    }
    unlabeled = p.y < 0
    if answer.scores and (p.truth[unlabeled] < 0).any():
        truth = p.truth[unlabeled] >= 0
        found["auroc"] = 100 * max(
            float(roc_auc_score(truth, score[unlabeled])) for score in answer.scores.values()
        )
    return found


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    for cell in every_cell(options):
        if cell.kind in options.kinds:
            yield cell


def every_cell(options: argparse.Namespace) -> Iterator[Cell]:
    for draw in range(FIRST_DRAW, FIRST_DRAW + options.draws):
        for network, labels in itertools.product(options.features, options.labels):
            for inside in options.pools:
                if inside in REAL:
                    for kind in ("as the pool", "equal"):
                        yield Cell(network, inside, "others", NATURAL, kind, labels, draw)
                    continue
                for junk, (ratio, kind) in itertools.product(options.junk, SETTINGS):
                    yield Cell(network, inside, junk, ratio, kind, labels, draw)


def run(options: argparse.Namespace) -> None:
    for cell in cells(options):
        path = options.work / cell.file
        found = json.loads(path.read_text()) if path.exists() else {}
        missing = [name for name in options.methods if name not in found]
        if not missing:
            continue
        p = pool(cell, options)
        for name in missing:
            found[name] = measure(p, METHODS[name](p, cell.draw))
        write_json(path, found)
        print(cell.file, {name: round(found[name]["accuracy"], 1) for name in missing}, flush=True)


def summary(options: argparse.Namespace, published: dict[str, Any]) -> dict[str, Any]:
    """Means over the draws in which RoPAWSClassifier was measured, for the methods that all of these have.

    Published figures of other methods stay where they are of as many draws: these are the same ones. So do
    settings that were not measured anew.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in cells(options):
        path = options.work / cell.file
        parts = json.loads(path.read_text()) if path.exists() else {}
        if OURS in parts:
            name = ", ".join(str(part) for part in cell[:-1])
            found.setdefault(name, []).append(parts)
    settings = dict(published)
    for name, parts in found.items():
        before = published.get(name, {})
        kept = before if before.get("draws") == len(parts) else {}
        settings[name] = {**kept, "draws": len(parts), **_mean(parts)}
    return settings


def _mean(parts: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for method in METHODS:
        if all(method in part for part in parts):
            keys = set.intersection(*(set(part[method]) for part in parts))
            found[method] = {
                key: round(statistics.mean(p[method][key] for p in parts), 2) for key in sorted(keys)
            }
    return found


def _folder(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if name not in NETWORKS or not folder:
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER, NAME one of {list(NETWORKS)}, got {text}")
    return name, Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument(
        "--features",
        nargs="+",
        type=_folder,
        default=[("lite0", Path("runs/features"))],
        metavar="NAME=FOLDER",
    )
    parser.add_argument("--work", type=Path, default=Path("runs/imbalance"))
    parser.add_argument("--pools", nargs="+", choices=("cifar10", *REAL), default=["cifar10", *REAL])
    parser.add_argument("--junk", nargs="+", choices=JUNK, default=list(JUNK))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--labels", nargs="+", type=int, default=[40])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    options = parser.parse_args()
    options.features = dict(options.features)
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    run(options)
    before = json.loads((RESULTS / "imbalance.json").read_text())["settings"]
    write_results("imbalance", {"settings": summary(options, before)})


if __name__ == "__main__":
    main()
