"""Are two networks together worth their time? DINOv2-S, TinyViT-5M, and both side by side.

python benchmarks/two_backbones.py --data FOLDER --init dinov2-small.safetensors
    --second tiny-vit-5m.safetensors [--work FOLDER]

CIFAR-10 (60 training images of each class, 400 test images), alone and with 300 images of CIFAR-100 in the
pool; 1, 4 and 25 labels per class. Accuracy of logistic regression (ten draws of the labels) and of
RoPAWSClassifier (one draw, the same for all networks, without views). Writes results/two_backbones.json.
"""

import argparse
import statistics
import warnings
from pathlib import Path

import numpy as np
import torch
from feature_collections import SOURCES, Array
from feature_rivals import logistic_regression, ours, problem
from feature_tasks import LABELS, OUT, Data
from features import figures
from timing import write_results

import ropaws

PER_CLASS, TESTS, OUTSIDE = 60, 400, 300
WAYS = {"logistic regression": (logistic_regression, 10), "RoPAWSClassifier": (ours, 1)}  # draws of each
FIRST, SECOND = "dinov2-small", "tiny-vit"
Rows = dict[str, Array]


def images_of(data: Path, work: Path) -> tuple[Rows, Array, Array]:
    """Images by their part, classes of the training and of the test images."""
    ten, hundred = SOURCES["cifar10"](data, work), SOURCES["cifar100"](data, work)
    rows = np.sort(np.concatenate([np.flatnonzero(ten.labels == c)[:PER_CLASS] for c in range(10)]))
    parts = {"train": ten.images[rows], "test": ten.test_images[:TESTS], "outside": hundred.images[:OUTSIDE]}
    return parts, ten.labels[rows], ten.test_labels[:TESTS]


def features_of(parts: Rows, work: Path, backbone: str, init: Path) -> Rows:
    """Unit features."""
    found = {}
    for name, images in parts.items():
        np.savez(file := work / f"{name}.npz", images=images)
        rows = ropaws.embed(file, backbone=backbone, init=init, views=0, cache=work / "cache").features
        found[name] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


def accuracies(rows: Rows, truth: Array, tests: Array, outside: int) -> dict[str, list[float]]:
    """By way: with each number of labels."""
    features = np.concatenate([rows["train"], rows["outside"][:outside]]).astype(np.float32)
    labels = np.concatenate([truth, np.full(outside, OUT)])
    data = Data(features, None, labels, rows["test"].astype(np.float32), tests, 10)
    return {
        name: [
            round(
                statistics.fmean(
                    figures(way(problem(data, count, seed)), tests)["accuracy"] for seed in range(draws)
                ),
                1,
            )
            for count in LABELS
        ]
        for name, (way, draws) in WAYS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("data", "init", "second"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/two_backbones"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.work.mkdir(parents=True, exist_ok=True)
    parts, truth, tests = images_of(options.data, options.work)
    networks = {
        FIRST: features_of(parts, options.work, FIRST, options.init),
        SECOND: features_of(parts, options.work, SECOND, options.second),
    }
    networks[f"{FIRST}+{SECOND}"] = {
        part: np.concatenate([rows[part] for rows in networks.values()], axis=1) for part in parts
    }
    found = {}
    for images, outside in (("CIFAR-10", 0), ("CIFAR-10 + CIFAR-100", OUTSIDE)):
        for name, rows in networks.items():
            found[f"{images}, {name}"] = accuracies(rows, truth, tests, outside)
            print(images, name, found[f"{images}, {name}"], flush=True)
    write_results(
        "two_backbones", {"draws": {name: draws for name, (_, draws) in WAYS.items()}, "rows": found}
    )


if __name__ == "__main__":
    main()
