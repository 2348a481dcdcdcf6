"""Labels that are named as suspected errors: how many of them are wrong, and how many named where none is?

python benchmarks/label_checks.py --data FOLDER --work FOLDER [--only garments ...] [--draws 20]
    [--backbone dinov2-small --init FILE --views 0]

From collections of feature_collections.py, labels are drawn per class, and none, 3 or 10 % of them flipped
to any other class. check_labels was chosen on other draws. Writes means over draws.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from feature_collections import Array, Network, collection
from timing import write_results

from ropaws.insight.label_errors import check_labels

PER_CLASS, RATES = (3, 6, 20), (0.0, 0.03, 0.1)
COLLECTIONS = {"garments": 10, "CIFAR-10": 10, "CIFAR-100": 20, "solar cells": 4, "digits": 10}  # classes


def drawn(
    features: Array, truth: Array, per_class: int, rate: float, seed: int
) -> tuple[Array, Array, Array]:
    """Features, labels, and which of them are wrong."""
    random = np.random.default_rng([seed, per_class, round(100 * rate)])
    classes = int(truth.max()) + 1
    rows = np.concatenate(
        [random.permutation(np.flatnonzero(truth == c))[:per_class] for c in range(classes)]
    )
    labels, flipped = truth[rows], random.permutation(len(rows))[: round(rate * len(rows))]
    labels[flipped] = (labels[flipped] + random.integers(1, classes, len(flipped))) % classes
    return features[rows], labels, labels != truth[rows]


def measured(features: Array, truth: Array, draws: int) -> list[dict[str, float]]:
    rows = []
    for per_class in PER_CLASS:
        for rate in RATES:
            counts = []
            for seed in range(1000, 1000 + draws):
                points, labels, wrong = drawn(features, truth, per_class, rate, seed)
                found = check_labels(
                    torch.from_numpy(points), torch.from_numpy(labels), classes=int(truth.max()) + 1
                )
                named = [error.position for error in found.errors]
                right = wrong[named].sum()
                counts.append(
                    [len(labels), wrong.sum(), found.contradicted, found.by_chance, len(named), right]
                )
            keys = ("labels", "wrong", "contradicted", "by chance", "named", "named and wrong")
            means = dict(zip(keys, np.mean(counts, axis=0).round(2).tolist(), strict=True))
            rows.append({"per class": per_class, "rate": rate, **means})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/features"))
    parser.add_argument("--only", nargs="+", choices=COLLECTIONS, default=list(COLLECTIONS))
    parser.add_argument("--draws", type=int, default=20)
    Network.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in options.only:
        file = name.lower().replace("-", "").split(" ")[0]
        data = collection(file, options.data, options.work, Network.chosen(options))
        classes = np.unique(data.labels)[: COLLECTIONS[name]]
        inside = np.isin(data.labels, classes)
        found[name] = measured(
            data.features[inside].astype(np.float32),
            np.searchsorted(classes, data.labels[inside]),
            options.draws,
        )
        print(name, *found[name], sep="\n")
    write_results(
        "label_checks", {"backbone": options.backbone, "draws": options.draws, "collections": found}
    )


if __name__ == "__main__":
    main()
