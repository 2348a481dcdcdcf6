"""Likely new classes: how many kinds are found among the out-of-class images, and how pure the groups are.

python benchmarks/discover.py --data FOLDER --work lite0=FOLDER dinov2-s=FOLDER [--only garments ...]
    [--draws 3] [--cells FOLDER] [--kept] [--trials]

Each FOLDER of --work is one of feature_collections.py, whose features are used. In each draw some of the
classes are known, with LABELS labels each; the other ones are in the pool beside the unlabeled images of the
known ones, and are to be found. "told": it is known which images belong to no known class; "judged": the
in-class probability says so, as in `ropaws discover`. Accuracy is that of the best one-to-one assignment of
groups to classes (Hungarian), over the images that truly are of new classes. Beside: k-means given the true
number, on 128 main directions; HDBSCAN of scikit-learn, with at least as many images per group as we ask
for. --trials takes the classes that the table leaves out, by which the settings were chosen. Writes
results/discover.json.
"""

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from feature_collections import Array, collection
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import HDBSCAN, KMeans
from timing import write_results

from ropaws.classify.pool_prior import in_class_probability
from ropaws.core.features import main_points
from ropaws.core.labels import UNLABELED
from ropaws.insight.groups import DIMS, LEAST, new_classes
from ropaws.insight.suggestions import class_probs

LABELS = 10  # per known class
MOST = 100  # images per class
STARTS = 5  # of k-means
SUPERCLASSES = (
    "beaver dolphin otter seal whale", "aquarium_fish flatfish ray shark trout",
    "orchid poppy rose sunflower tulip", "bottle bowl can cup plate",
    "apple mushroom orange pear sweet_pepper", "clock keyboard lamp telephone television",
    "bed chair couch table wardrobe", "bee beetle butterfly caterpillar cockroach",
    "bear leopard lion tiger wolf", "bridge castle house road skyscraper",
    "cloud forest mountain plain sea", "camel cattle chimpanzee elephant kangaroo",
    "fox porcupine possum raccoon skunk", "crab lobster snail spider worm", "baby boy girl man woman",
    "crocodile dinosaur lizard snake turtle", "hamster mouse rabbit shrew squirrel",
    "maple_tree oak_tree palm_tree pine_tree willow_tree", "bicycle bus motorcycle pickup_truck train",
    "lawn_mower rocket streetcar tank tractor",
)  # fmt: skip


class Setting(NamedTuple):
    """A collection, and how its classes are divided."""

    collection: str
    known: int
    new: int


SETTINGS = {
    "CIFAR-100, fine classes": Setting("cifar100", 25, 25),
    "CIFAR-100, superclasses": Setting("cifar100", 5, 5),
    "CIFAR-10": Setting("cifar10", 5, 5),
    "Tiny-ImageNet": Setting("tiny", 20, 20),
    "SVHN (rebuilt)": Setting("svhn", 5, 5),
    "garments": Setting("garments", 5, 5),
    "digits (pixels)": Setting("digits", 5, 5),
    "solar cells": Setting("solar", 2, 2),
    "X-rays": Setting("xrays", 1, 1),
}


class Situation(NamedTuple):
    """A pool and what is known of it."""

    features: torch.Tensor  # (n, d)
    truth: Array  # (n,) known classes first
    labels: torch.Tensor  # (n,)
    known: int
    new: int


def images(
    setting: Setting, name: str, data: Path, work: Path, *, trials: bool
) -> tuple[Array, Array, Array]:
    """Features, classes, and the group of classes that are known or new together.   (n, d), (n,), (n,)"""
    if setting.collection != "digits" and not (work / f"{setting.collection}.npz").exists():
        raise FileNotFoundError(f"{work} has no {setting.collection}.npz; feature_collections.py writes it")
    found = collection(setting.collection, data, work)
    features = np.concatenate([found.features, found.test_features])
    classes = np.concatenate([found.labels, found.test_labels])
    if setting.collection == "garments":  # the file does not tell the out-of-class tests apart
        features, classes = found.features, found.labels
    together = classes
    if setting.collection == "cifar100":
        with np.load(data / "cifar100.npz") as arrays:
            names = list(arrays["class_names"])
        superclass = np.array(
            [next(i for i, row in enumerate(SUPERCLASSES) if n in row.split()) for n in names]
        )
        together = superclass[classes]
        if "superclasses" in name:
            classes = together
    kept = np.ones(len(classes), bool)
    if setting.collection in ("cifar100", "tiny"):
        other = (
            together % 2 if setting.collection == "cifar100" else together >= np.median(np.unique(together))
        )
        kept = other == trials
    return features[kept], classes[kept], together[kept]


def situation(setting: Setting, found: tuple[Array, Array, Array], seed: int) -> Situation:
    features, classes, together = found
    random = np.random.default_rng(seed)
    order = random.permutation(np.unique(together))
    chosen = [c for part in order for c in random.permutation(np.unique(classes[together == part]))]
    chosen = chosen[: setting.known + setting.new]
    rows, truth, labels = [], [], []
    for number, c in enumerate(chosen):
        mine = random.permutation(np.flatnonzero(classes == c))[:MOST]
        given = LABELS if number < setting.known else 0
        rows.append(mine)
        truth += [number] * len(mine)
        labels += [number] * given + [UNLABELED] * (len(mine) - given)
    points = torch.from_numpy(features[np.concatenate(rows)].astype(np.float32))
    return Situation(points, np.array(truth), torch.tensor(labels), setting.known, setting.new)


def accuracy(truth: Array, group: Array) -> float:
    """Of the best assignment of groups to classes; a group of -1 is wrong."""
    known = group >= 0
    counts = np.zeros((truth.max() + 1, max(1, group.max() + 1)))
    np.add.at(counts, (truth[known], group[known]), 1)
    rows, columns = linear_sum_assignment(-counts)
    return float(counts[rows, columns].sum() / len(truth))


def measured(case: Situation, in_class: torch.Tensor) -> dict[str, float]:
    """Figures of one draw, of ours and of the others on the same rows."""
    probs = class_probs(main_points(case.features), case.labels, case.known)
    began = time.perf_counter()
    groups = new_classes(case.features, case.labels, in_class, probs)
    seconds = time.perf_counter() - began
    group = np.full(len(case.truth), -1)
    for number, found in enumerate(groups):
        group[found.members.numpy()] = number
    rows = ((case.labels < 0) & (in_class < 0.5)).numpy()
    new = case.truth[rows] >= case.known
    truth = case.truth[rows][new] - case.known
    unit = main_points(case.features).numpy()[rows]
    points = main_points(case.features[torch.from_numpy(rows)], dims=DIMS).numpy()
    with_truth = KMeans(case.new, n_init=STARTS, random_state=0).fit_predict(unit)
    dense = HDBSCAN(min_cluster_size=LEAST, copy=True).fit_predict(points)
    return {
        "kinds": len(groups),
        "accuracy": accuracy(truth, group[rows][new]),
        "k-means": accuracy(truth, with_truth[new]),
        "hdbscan kinds": int(dense.max()) + 1,
        "hdbscan": accuracy(truth, dense[new]),
        "typical purity": _purity(case, groups),
        "pool": float(new.mean()),
        "seconds": seconds,
    }


def _purity(case: Situation, groups: Any) -> float:
    """Share of the 20 most typical images of each group that are of its most frequent kind."""
    shares = []
    for group in groups:
        kinds = case.truth[group.members[:20].numpy()]
        shares.append(np.bincount(kinds).max() / len(kinds))
    return float(np.mean(shares)) if shares else float("nan")


def cell(name: str, network: str, draw: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both ways of knowing what is out-of-class, from the file of an earlier call, else measured."""
    work, part = options.work[network], "trials" if options.trials else "table"
    path = options.cells / f"{part}, {network}, {name}, {draw}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    if options.kept:
        raise FileNotFoundError(f"draw {draw} is not there yet")
    setting = SETTINGS[name]
    case = situation(setting, images(setting, name, options.data, work, trials=options.trials), draw)
    told = torch.from_numpy(case.truth < case.known).float()
    judged = in_class_probability(case.features, case.labels, classes=case.known)
    found = {
        "true": case.new,
        "told": measured(case, torch.where(case.labels >= 0, 1.0, 0.02 + 0.96 * told)),
        "judged": measured(case, judged),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    return found


def summary(cells: list[dict[str, Any]], way: str) -> dict[str, Any]:
    rows = [cell[way] for cell in cells]
    found: dict[str, Any] = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
    for key in ("kinds", "hdbscan kinds"):
        found[key] = [row[key] for row in rows]
        true = cells[0]["true"]
        found[f"{key} median"] = statistics.median(found[key])
        found[f"{key} near"] = statistics.mean(abs(value - true) <= 0.2 * true for value in found[key])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", nargs="+", required=True, help="NETWORK=FOLDER")
    parser.add_argument("--cells", type=Path, default=Path("runs/discover"), help="keeps each draw")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=tuple(SETTINGS))
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--trials", action="store_true")
    parser.add_argument("--kept", action="store_true", help="write the table of the draws that are there")
    options = parser.parse_args()
    options.work = {name: Path(place) for name, place in (given.split("=") for given in options.work)}
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    settings: dict[str, Any] = {}
    for name in options.only:
        for network in options.work:
            if SETTINGS[name].collection == "digits" and network != next(iter(options.work)):
                continue  # pixels are their features
            cells = []
            for draw in range(options.draws):
                try:
                    cells.append(cell(name, network, draw, options))
                except FileNotFoundError as error:
                    print(f"left out {name}, {network}: {error}")
                    break
            if not cells:
                continue
            key = f"{name}, {'pixels' if SETTINGS[name].collection == 'digits' else network}"
            settings[key] = {"true": cells[0]["true"], "draws": len(cells)}
            settings[key] |= {way: summary(cells, way) for way in ("told", "judged")}
            _show(key, settings[key])
    if not options.trials:
        write_results("discover", {"labels": LABELS, "most": MOST, "settings": settings})


def _show(key: str, found: dict[str, Any]) -> None:
    for way in ("told", "judged"):
        row = found[way]
        print(
            f"{key:38} {way:6} true {found['true']:2} kinds {row['kinds']} accuracy {row['accuracy']:.3f}"
            f" k-means {row['k-means']:.3f} hdbscan {row['hdbscan kinds median']:g} {row['hdbscan']:.3f}"
            f" pure {row['typical purity']:.2f}"
            f" of new {row['pool']:.2f} {row['seconds']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
