"""What random views are worth to a classifier on frozen features, on data that is in no table.

python benchmarks/view_worth.py --data FOLDER --work FOLDER [--weights dinov2-small.safetensors]

FOLDER of --data has cifar100.npz, tinyimagenet32.npz and svhn.npz. Every image is embedded in the center view
and in four random ones; RoPAWSClassifier learns from none, the first, the first two, or all of them, or from
views that cost no pass of the network: the row itself, with noise, or moved along the
difference of two other rows.
Accuracy and AUROC on test images; every cell is a file below --work. Writes results/view_worth.json.
"""

import argparse
import json
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from timing import write_results

import ropaws
from ropaws import RoPAWSClassifier
from ropaws.core.files import write_json

Array = NDArray[Any]
DRAWS, LABELS = 3, (1, 4)
VIEWS, TESTS = 4, 20  # random views of an image; test images per class
SIZES = {"efficientnet-lite0": None, "dinov2-small": 112}
# (classes, images of each, images of all other classes)
FILES = {"cifar100": (20, 40, 500), "tinyimagenet32": (40, 20, 500), "svhn": (10, 50, 0)}
TASKS = {
    "CIFAR-100": ("cifar100", None),
    "CIFAR-100 + others": ("cifar100", "cifar100"),
    "Tiny-ImageNet + others": ("tinyimagenet32", "tinyimagenet32"),
    "SVHN + CIFAR-100": ("svhn", "cifar100"),
}


class Images(NamedTuple):
    """Rows of a file: truth -1 is out-of-class."""

    features: Array  # (n, d)
    views: Array  # (n, VIEWS, d)
    truth: Array  # (n,)
    test: Array  # (t, d)
    test_truth: Array  # (t,)


def chosen_rows(labels: Array, name: str) -> tuple[Array, Array, Array, Array]:
    """Positions of training and test images, with their truths."""
    count, per_class, others = FILES[name]
    order = np.random.default_rng(7).permutation(np.unique(labels))
    random = np.random.default_rng(8)
    mine = [random.permutation(np.flatnonzero(labels == c)) for c in order[:count]]
    rest = random.permutation(np.flatnonzero(~np.isin(labels, order[:count])))
    tests_out = 200 if others else 0
    train = np.concatenate([*(rows[:per_class] for rows in mine), rest[:others]])
    test = np.concatenate(
        [*(rows[per_class : per_class + TESTS] for rows in mine), rest[others : others + tests_out]]
    )
    inside = np.repeat(np.arange(count), per_class)
    tested = np.repeat(np.arange(count), [len(rows[per_class : per_class + TESTS]) for rows in mine])
    return (
        train,
        np.concatenate([inside, np.full(len(rest[:others]), -1)]),
        test,
        np.concatenate([tested, np.full(len(test) - len(tested), -1)]),
    )


def embedded(name: str, backbone: str, options: argparse.Namespace) -> Images:
    path = options.work / f"{name} {backbone}.npz"
    if not path.exists():
        with np.load(options.data / f"{name}.npz") as arrays:
            images, labels = arrays["train_images"], arrays["train_labels"].ravel()
        train, truth, test, test_truth = chosen_rows(labels, name)
        found = {}
        for part, rows, views in (("train", train, VIEWS), ("test", test, 0)):
            source = options.work / f"{name} {part}.images.npz"
            np.savez(source, images=images[rows])
            init = options.weights if backbone != "efficientnet-lite0" else "pretrained"
            found[part] = ropaws.embed(
                source,
                backbone=backbone,
                init=init,
                views=views,
                size=SIZES[backbone],
                cache=options.work / "cache",
            )
            assert len(found[part]) == len(rows)
        views = found["train"].views.astype(np.float16)
        np.savez(path, *Images(found["train"].features, views, truth, found["test"].features, test_truth))
    with np.load(path) as arrays:
        return Images(*arrays.values())


def joined(task: str, backbone: str, options: argparse.Namespace) -> Images:
    inside, outside = TASKS[task]
    mine = embedded(inside, backbone, options)
    known, tested = mine.truth >= 0, mine.test_truth >= 0
    parts = [
        Images(
            mine.features[known],
            mine.views[known],
            mine.truth[known],
            mine.test[tested],
            mine.test_truth[tested],
        )
    ]
    if outside is not None:
        other = embedded(outside, backbone, options)
        out, test_out = other.truth < 0, other.test_truth < 0
        parts.append(
            Images(
                other.features[out],
                other.views[out],
                other.truth[out],
                other.test[test_out],
                other.test_truth[test_out],
            )
        )
    return Images(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def noisy(share: float) -> Callable[[Images], Array]:
    """Rows with noise as long as this share of their distance to the mean."""

    def views(images: Images) -> Array:
        rows = images.features[:, None]
        random = np.random.default_rng(0).standard_normal((len(rows), VIEWS, rows.shape[-1]))
        spread = rows.std(axis=0, keepdims=True)
        return (rows + share * spread * random).astype(np.float32)

    return views


def shifted(share: float) -> Callable[[Images], Array]:
    """Rows moved along the difference of two other rows: noise as wide as the pool in every direction."""

    def views(images: Images) -> Array:
        rows, random = images.features, np.random.default_rng(0)
        one, other = random.integers(0, len(rows), (2, len(rows), VIEWS))
        return (rows[:, None] + share * (rows[one] - rows[other])).astype(np.float32)

    return views


VARIANTS: dict[str, Callable[[Images], Array | None]] = {
    "0 views": lambda images: None,
    "4 views": lambda images: images.views,
    "1 view": lambda images: images.views[:, :1],
    "2 views": lambda images: images.views[:, :2],
    "center and 1 view": lambda images: np.concatenate(
        [images.features[:, None], images.views[:, :1]], axis=1
    ),
    "center as the only view": lambda images: images.features[:, None],
    "noise 0.5": noisy(0.5),
    "shifted 0.2": shifted(0.2),
    "shifted 0.4": shifted(0.4),
}


def cell(images: Images, variant: str, labels: int, seed: int) -> dict[str, float]:
    random = np.random.default_rng(seed)
    y = np.full(len(images.truth), -1)
    for c in range(images.truth.max() + 1):
        y[random.permutation(np.flatnonzero(images.truth == c))[:labels]] = c
    views = VARIANTS[variant](images)
    model = RoPAWSClassifier(random_state=seed).fit(images.features, y, views)
    inside = images.test_truth >= 0
    right = model.predict(images.test[inside]) == images.test_truth[inside]
    found = {"accuracy": 100 * float(right.mean())}
    if not inside.all():
        found["auroc"] = 100 * float(roc_auc_score(inside, model.score_in_domain(images.test)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--weights", type=Path, help="of DINOv2-S; without it only EfficientNet-Lite0 is tried"
    )
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for backbone in list(SIZES)[: 1 if options.weights is None else 2]:
        for task in TASKS:
            images = joined(task, backbone, options)
            for labels in LABELS:
                row: dict[str, Any] = {}
                for variant in VARIANTS:
                    found = []
                    for seed in range(DRAWS):
                        path = options.work / f"{backbone} {task} {labels} {variant} {seed}.json"
                        if not path.exists():
                            write_json(path, cell(images, variant, labels, seed))
                        found.append(json.loads(path.read_text()))
                    row[variant] = {
                        key: round(statistics.fmean(c[key] for c in found), 2) for key in found[0]
                    }
                results[f"{backbone}, {task}, {labels}"] = row
                print(backbone, task, labels, row, flush=True)
    means = {
        f"{backbone}, {variant}": round(
            statistics.fmean(r[variant]["accuracy"] for n, r in results.items() if n.startswith(backbone)), 2
        )
        for backbone in SIZES
        for variant in VARIANTS
        if any(n.startswith(backbone) for n in results)
    }
    write_results("view_worth", {"draws": DRAWS, "mean_accuracy": means, "settings": results})


if __name__ == "__main__":
    main()
