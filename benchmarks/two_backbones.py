"""Are two networks together worth their time? DINOv2-S, TinyViT-5M, and both side by side.

python benchmarks/two_backbones.py --data FOLDER --features FOLDER --init dinov2-small.safetensors
    --second tiny-vit-5m.safetensors --work FOLDER

CIFAR-10 (150 training images of each class, 1,000 test images), alone and with 1,000 images of CIFAR-100 in
the pool; 1, 4 and 25 labels per class. Accuracy of logistic regression (ten draws of the labels) and of
RoPAWSClassifier (one draw, the same for all networks, without views). --features is a --work folder of
feature_collections.py on DINOv2-S. Writes results/two_backbones.json.
"""

import argparse
import statistics
import warnings
from pathlib import Path

import numpy as np
import torch
from feature_collections import SOURCES, Network, collection
from feature_rivals import logistic_regression, ours, problem
from feature_tasks import LABELS, Data
from features import figures
from timing import write_results

import ropaws

PER_CLASS, TESTS, OUTSIDE = 150, 1000, 1000
WAYS = {"logistic regression": (logistic_regression, 10), "RoPAWSClassifier": (ours, 1)}  # draws of each


def chosen(labels: np.ndarray) -> np.ndarray:
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:PER_CLASS] for c in range(10)]))


def second_rows(data: Path, work: Path, backbone: str, init: Path, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Features of the other network of the same images."""
    cifar10, cifar100 = SOURCES["cifar10"](data, work), SOURCES["cifar100"](data, work)
    parts = {
        "train": cifar10.images[rows],
        "test": cifar10.test_images[:TESTS],
        "outside": cifar100.images[:OUTSIDE],
    }
    found = {}
    for name, images in parts.items():
        file = work / f"{name}.npz"
        np.savez(file, images=images)
        embedded = ropaws.embed(file, backbone=backbone, init=init, views=0, cache=work / "cache")
        found[name] = embedded.features
    return found


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("data", "features", "init", "second", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.work.mkdir(parents=True, exist_ok=True)
    dino = Network("dinov2-small", options.init, 0)
    cifar10 = collection("cifar10", options.data, options.features, dino)
    cifar100 = collection("cifar100", options.data, options.features, dino)
    rows = chosen(cifar10.labels)
    first = {
        "train": cifar10.features[rows],
        "test": cifar10.test_features[:TESTS],
        "outside": cifar100.features[:OUTSIDE],
    }
    second = second_rows(options.data, options.work, "tiny-vit", options.second, rows)
    unit = [
        {k: v / np.linalg.norm(v, axis=1, keepdims=True) for k, v in part.items()} for part in (first, second)
    ]
    networks = {
        "dinov2-small": unit[0],
        "tiny-vit": unit[1],
        "dinov2-small+tiny-vit": {k: np.concatenate([part[k] for part in unit], axis=1) for k in first},
    }
    truth, test = cifar10.labels[rows], cifar10.test_labels[:TESTS]
    found: dict[str, dict[str, list[float]]] = {}
    for outside in (False, True):
        for name, parts in networks.items():
            features = np.concatenate([parts["train"], *([parts["outside"]] if outside else [])])
            labels = np.concatenate([truth, np.full(OUTSIDE * outside, -1)])
            data = Data(features.astype(np.float32), None, labels, parts["test"].astype(np.float32), test, 10)
            for method, (way, draws) in WAYS.items():
                row = [
                    statistics.fmean(
                        figures(way(problem(data, count, seed)), test)["accuracy"] for seed in range(draws)
                    )
                    for count in LABELS
                ]
                key = "CIFAR-10 + CIFAR-100" if outside else "CIFAR-10"
                found.setdefault(f"{key}, {name}", {})[method] = [round(value, 1) for value in row]
                print(key, name, method, row, flush=True)
    write_results(
        "two_backbones", {"draws": {name: draws for name, (_, draws) in WAYS.items()}, "rows": found}
    )


if __name__ == "__main__":
    main()
