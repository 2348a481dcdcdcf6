"""Label propagation over a pool: ropaws.RoPAWSClassifier against scikit-learn's semi-supervised classifiers.

python benchmarks/propagation.py [--largest 1000000]

Seconds of fit (which labels every unlabeled row), taken turn by turn in one process; peak memory of each
alone in a process of its own, above what the data takes; accuracy on the unlabeled rows of known classes.
The same rows of unit length go to all; gamma = 5 makes scikit-learn's rbf kernel equal to ours at
temperature 0.1. A third of the generated rows, and half of the embedded ones, belong to no class. An rbf
kernel of 50,000 rows needs 20 GB for each of its copies and is not tried. Writes results/propagation.json.
"""

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import roc_auc_score
from sklearn.semi_supervised import LabelPropagation, LabelSpreading
from timing import interleaved, median_ratio, write_results

from ropaws import RoPAWSClassifier
from ropaws.data.datasets.truth import embedded_truth
from ropaws.data.sources import DataConfig, load_corpus

warnings.filterwarnings("ignore", category=ConvergenceWarning)
DIMS, CLASSES, OTHERS, LABELS = 128, 10, 5, 25
METHODS: dict[str, Callable[[], Any]] = {
    "ropaws": lambda: closed_form(),
    "ropaws, all vote": lambda: closed_form(voters=None),
    "LabelSpreading rbf": lambda: LabelSpreading(kernel="rbf", gamma=5),
    "LabelSpreading knn": lambda: LabelSpreading(kernel="knn"),
    "LabelPropagation rbf": lambda: LabelPropagation(kernel="rbf", gamma=5),
    "LabelPropagation knn": lambda: LabelPropagation(kernel="knn"),
}
SLOW = "LabelPropagation rbf"  # a minute and more: a single turn
RIVALS = [name for name in METHODS if not name.startswith("ropaws")]
# What is measured at which size: quadratic memory ends before 50,000 rows, quadratic time a little later.
SIZES: dict[int, list[str]] = {
    2_000: list(METHODS),
    10_000: list(METHODS),
    50_000: ["ropaws", "LabelSpreading knn", "LabelPropagation knn"],
    200_000: ["ropaws"],
    1_000_000: ["ropaws"],
}


def closed_form(**settings: Any) -> RoPAWSClassifier:
    """Label propagation alone, with the paper's prior: no head, no logistic regression."""
    return RoPAWSClassifier(head=None, prior="distance", temperature=0.1, regression_share=0, **settings)


class Rows(NamedTuple):
    points: np.ndarray  # (n, d) unit rows, float32
    labels: np.ndarray  # (n,) class, or -1 where it is not told
    truth: np.ndarray  # (n,) class, or -1 for none of them


@cache
def generated(count: int) -> Rows:
    """Clusters on a sphere; some are of no class."""
    random = np.random.default_rng(0)
    centers = random.normal(size=(CLASSES + OTHERS, DIMS)).astype(np.float32)
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    cluster = random.integers(0, CLASSES + OTHERS, count)
    points = random.normal(scale=0.09, size=(count, DIMS)).astype(np.float32)
    points += centers[cluster]
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    return _with_labels(points, np.where(cluster < CLASSES, cluster, -1))


@cache
def embedded() -> Rows:
    """The embedded pool of garments, as 128 principal components of its pixels."""
    corpus = load_corpus(DataConfig(source="fashion-demo"))
    pixels = np.asarray(corpus.train_images[:]).reshape(len(corpus.train_images), -1).astype(np.float32) / 255
    points = PCA(DIMS, random_state=0).fit_transform(pixels).astype(np.float32)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    truth = embedded_truth().labels.numpy()
    return _with_labels(points, np.where(truth < len(corpus.class_names), truth, -1))


def _with_labels(points: np.ndarray, truth: np.ndarray) -> Rows:
    labels = np.full(len(truth), -1)
    for label in range(truth.max() + 1):
        labels[np.flatnonzero(truth == label)[:LABELS]] = label
    return Rows(points, labels, truth)


def load(data: str) -> Rows:
    return embedded() if data == "embedded" else generated(int(data))


def score(model: Any, rows: Rows) -> dict[str, float]:
    """Of unlabeled rows: accuracy in-class, and how well the certainty tells the others."""
    hidden = rows.labels < 0
    known = hidden & (rows.truth >= 0)
    found = {"accuracy": float((model.transduction_[known] == rows.truth[known]).mean())}
    some = np.flatnonzero(hidden)[:20_000]
    if hasattr(model, "in_domain"):
        certainty = model.in_domain(rows.points[some])
    else:
        certainty = model.label_distributions_[some].max(axis=1)
    found["auroc"] = float(roc_auc_score(rows.truth[some] >= 0, np.nan_to_num(certainty)))
    return found


def memory(kind: str) -> int:
    """Bytes that this process holds (VmRSS), or has held at most since the mark was reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(kind)).split()[1])


def alone(name: str, data: str) -> None:
    """One method in this process: prints memory and score as JSON."""
    rows = load(data)
    small = generated(400)
    METHODS[name]().fit(small.points, small.labels)  # what a library sets up once is not the method's
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory goes back, or it would hide what fit takes
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before = memory("VmRSS")
    model = METHODS[name]().fit(rows.points, rows.labels)
    peak = memory("VmHWM") - before
    print(json.dumps({"megabytes": round(peak / 2**20), **score(model, rows)}))


def measure(data: str, names: list[str], repeats: int) -> dict[str, Any]:
    rows = load(data)
    tasks = {name: lambda name=name: METHODS[name]().fit(rows.points, rows.labels) for name in names}
    slow = {name: tasks.pop(name) for name in names if name == SLOW}
    seconds = interleaved(tasks, repeats, warm_up=1 if repeats > 1 else 0)
    for name, once in interleaved(slow, 1, warm_up=0).items():
        seconds[name] = once * repeats
    found: dict[str, Any] = {}
    for name in names:
        command = [sys.executable, __file__, "--alone", name, data]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[name] = {"seconds": statistics.median(seconds[name]), **json.loads(told.splitlines()[-1])}
        if name in RIVALS:
            found[name]["times ours"] = median_ratio(seconds[name], seconds["ropaws"])
        print(data, name, found[name], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--largest", type=int, default=1_000_000)
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone(*options.alone)
        return
    results: dict[str, Any] = {"embedded": measure("embedded", list(METHODS), 3)}
    for size, names in SIZES.items():
        if size <= options.largest:
            results[f"generated {size}"] = measure(str(size), names, 3 if size <= 10_000 else 1)
    write_results("propagation", {"sizes": results})


if __name__ == "__main__":
    main()
