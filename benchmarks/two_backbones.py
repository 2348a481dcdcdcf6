"""Are two networks together worth their time? DINOv2-S, TinyViT-5M, and both side by side.

python benchmarks/two_backbones.py --data FOLDER --init dinov2-small.safetensors
    --second tiny-vit-5m.safetensors [--work FOLDER] [--per-class 60] [--ours]

CIFAR-10, the first images of each class; 1, 4 and 25 labels per class. Accuracy on the unlabeled rest by
logistic regression, ten draws of the labels, the same for all networks; with --ours also by RoPAWSClassifier
(one draw, without views). Writes results/two_backbones.json.
"""

import argparse
import statistics
import warnings
from pathlib import Path

import numpy as np
import torch
from feature_collections import SOURCES, Array
from feature_rivals import logistic_regression, ours, problem
from feature_tasks import LABELS, Data
from features import figures
from timing import write_results

import ropaws

DRAWS, DRAWS_OF_OURS = 10, 1
FIRST, SECOND = "dinov2-small", "tiny-vit"


def unit_features(images: Array, work: Path, backbone: str, init: Path) -> Array:
    np.savez(file := work / "images.npz", images=images)
    rows = ropaws.embed(file, backbone=backbone, init=init, views=0, cache=work / "cache").features
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def accuracy(rows: Array, truth: Array, labels: int, seed: int, *, by_ours: bool) -> float:
    """Of the unlabeled rest."""
    data = Data(rows.astype(np.float32), None, truth, rows[:0], truth[:0], int(truth.max()) + 1)
    rest = np.setdiff1d(np.arange(len(truth)), data.draw(labels, seed))
    data = data._replace(test=data.features[rest], test_truth=truth[rest])
    way = ours if by_ours else logistic_regression
    found: float = figures(way(problem(data, labels, seed)), data.test_truth)["accuracy"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("data", "init", "second"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/two_backbones"))
    parser.add_argument("--per-class", type=int, default=60)
    parser.add_argument("--ours", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.work.mkdir(parents=True, exist_ok=True)
    ten = SOURCES["cifar10"](options.data, options.work)
    chosen = np.sort(
        np.concatenate([np.flatnonzero(ten.labels == c)[: options.per_class] for c in range(10)])
    )
    images, truth = ten.images[chosen], ten.labels[chosen]
    networks = {
        name: unit_features(images, options.work, name, init)
        for name, init in ((FIRST, options.init), (SECOND, options.second))
    }
    networks[f"{FIRST}+{SECOND}"] = np.concatenate(list(networks.values()), axis=1)
    rows: dict[str, dict[str, list[float]]] = {name: {} for name in networks}
    for by_ours in (False, True) if options.ours else (False,):
        way, draws = ("RoPAWSClassifier", DRAWS_OF_OURS) if by_ours else ("logistic regression", DRAWS)
        for name, features in networks.items():
            rows[name][way] = [
                round(
                    statistics.fmean(
                        accuracy(features, truth, count, seed, by_ours=by_ours) for seed in range(draws)
                    ),
                    1,
                )
                for count in LABELS
            ]
        write_results("two_backbones", {"images": len(images), "draws": DRAWS, "rows": rows})


if __name__ == "__main__":
    main()
