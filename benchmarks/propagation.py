"""Label propagation over a pool: ropaws.RoPAWSClassifier against scikit-learn's semi-supervised classifiers.

python benchmarks/propagation.py [--data FOLDER] [--work FOLDER] [--only 2000 real ...] [--again]

Seconds of fit (which labels every unlabeled row), taken turn by turn in one process; peak memory of each
alone in a process of its own, above what the data takes; accuracy on the unlabeled rows of known classes.
The same rows of unit length go to all; gamma = 5 makes scikit-learn's rbf kernel equal to ours at
temperature 0.1. A third of the generated rows, and half of the embedded ones, belong to no class; the
generated ones are for the seconds only, as everybody solves them. An rbf kernel of 50,000 rows needs 20 GB
for each of its copies and is not tried. "real" has EfficientNet-Lite0 features of CIFAR-10, alone and among
CIFAR-100, as feature_tasks.py has them, prepared as in feature_rivals.py; --data is the folder with the
images, and without it this part is left out. "classes" times the default with hundreds to thousands of
classes, 2 labels and about 5 unlabeled rows each. Larger pools: large_pools.py. What is in
results/propagation.json already is left out, unless --again.
"""

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.semi_supervised import LabelPropagation, LabelSpreading
from timing import interleaved, median_ratio, read_results, write_results

from ropaws import RoPAWSClassifier
from ropaws.pool.datasets.catalog import embedded_truth
from ropaws.pool.sources import DataConfig, load_corpus

warnings.filterwarnings("ignore", category=ConvergenceWarning)
DIMS, CLASSES, OTHERS, LABELS = 128, 10, 5, 25
METHODS: dict[str, Callable[[], Any]] = {
    "ropaws": lambda: closed_form(),
    "ropaws, all vote": lambda: closed_form(voters=None),
    "ropaws, default": RoPAWSClassifier,
    "LabelSpreading rbf": lambda: LabelSpreading(kernel="rbf", gamma=5),
    "LabelSpreading knn": lambda: LabelSpreading(kernel="knn"),
    "LabelPropagation rbf": lambda: LabelPropagation(kernel="rbf", gamma=5),
    "LabelPropagation knn": lambda: LabelPropagation(kernel="knn"),
}
DEFAULT = "ropaws, default"
SLOW = ("LabelPropagation rbf", DEFAULT)  # seconds to a minute: a single turn
RIVALS = [name for name in METHODS if not name.startswith("ropaws")]
GRAPHS = ["ropaws", "LabelSpreading knn", "LabelPropagation knn"]
# What is measured at which size: quadratic memory ends before 50,000 rows, quadratic time a little later.
SIZES: dict[str, list[str]] = {
    "embedded": ["ropaws", "ropaws, all vote", DEFAULT, "LabelSpreading rbf", *GRAPHS[1:]],
    "2000": list(METHODS),
    "10000": GRAPHS,
    "50000": GRAPHS,
}
TURNS = {"embedded": 5, "2000": 21, "10000": 5, "50000": 1}
CLASS_COUNTS = (500, 1000, 2000, 5000)
REAL = ("CIFAR-10", "CIFAR-10 + CIFAR-100")
PARTS = [*SIZES, "classes", "real"]
REAL_LABELS, REAL_DRAWS = (4, 25), 3
REGRESSION = "logistic regression"
REAL_METHODS = (*GRAPHS, REGRESSION, DEFAULT)


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
    if (rows.truth[some] >= 0).all():
        return found
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


def measure(data: str) -> dict[str, Any]:
    rows, names, repeats = load(data), SIZES[data], TURNS[data]
    tasks = {name: lambda name=name: METHODS[name]().fit(rows.points, rows.labels) for name in names}
    slow = {name: tasks.pop(name) for name in names if name in SLOW}
    seconds = interleaved(tasks, repeats, warm_up=1 if repeats > 1 else 0)
    for name, once in interleaved(slow, 1, warm_up=0).items():
        seconds[name] = once * repeats
    found: dict[str, Any] = {}
    for name in names:
        command = [sys.executable, __file__, "--alone", name, data]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[name] = {"seconds": statistics.median(seconds[name]), **json.loads(told.splitlines()[-1])}
        if name != "ropaws":
            found[name]["times ours"] = median_ratio(seconds[name], seconds["ropaws"])
        print(data, name, found[name], flush=True)
    return found


@cache
def many_classes(count: int) -> Rows:
    """Narrow clusters, a sixth of them of no class: 2 labels and on average 5 unlabeled rows per cluster."""
    random = np.random.default_rng(0)
    clusters = count + count // 5
    centers = random.normal(size=(clusters, DIMS)).astype(np.float32)
    cluster = np.concatenate([np.repeat(np.arange(count), 2), random.integers(0, clusters, 5 * clusters)])
    points = centers[cluster] + random.normal(scale=0.7, size=(len(cluster), DIMS)).astype(np.float32)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    truth = np.where(cluster < count, cluster, -1)
    return Rows(points, np.where(np.arange(len(truth)) < 2 * count, truth, -1), truth)


def measure_classes(count: int) -> dict[str, float]:
    """The default classifier in this process: seconds of fit on the wall and of CPU, and its score."""
    rows = many_classes(count)
    wall, cpu = time.perf_counter(), time.process_time()
    model = RoPAWSClassifier(random_state=0).fit(rows.points, rows.labels)
    seconds = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return {"rows": len(rows.truth), **seconds, **score(model, rows)}


def real(data: Path, work: Path, *, again: bool) -> None:
    """Accuracy on features of real images, the same rows for all: means over draws of the labels."""
    from feature_rivals import problem
    from feature_tasks import TABLE
    from feature_tasks import load as load_task

    tasks = {name: load_task(TABLE[name], data, work) for name in REAL}
    for method in REAL_METHODS:  # the slow one last
        for name, task in tasks.items():
            for labels in REAL_LABELS:
                found = read_results("propagation").get("real", {})
                row = found.setdefault(f"{name}, {labels}", {"rows": len(task.truth)})
                if method in row and not again:
                    continue
                draws = [problem(task, labels, seed) for seed in range(REAL_DRAWS)]
                rows = [Rows(draw.rows.astype(np.float32), draw.y, task.truth) for draw in draws]
                row[method] = _mean([_judged(method, draw) for draw in rows])
                write_results("propagation", {"real": found})


def _judged(method: str, rows: Rows) -> dict[str, float]:
    if method == REGRESSION:
        return _regression(rows)
    return score(METHODS[method]().fit(rows.points, rows.labels), rows)


def _regression(rows: Rows) -> dict[str, float]:
    """On the labels alone."""
    known, hidden = rows.labels >= 0, (rows.labels < 0) & (rows.truth >= 0)
    model = LogisticRegression(C=10, class_weight="balanced", max_iter=2000)
    model.fit(rows.points[known], rows.labels[known])
    return {"accuracy": float((model.predict(rows.points[hidden]) == rows.truth[hidden]).mean())}


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.fmean(each[key] for each in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/features"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone(*options.alone)
        return
    for part in options.only:
        before = read_results("propagation")
        if part in before.get("sizes", {}) and not options.again:
            continue
        if part == "classes":
            for count in CLASS_COUNTS:
                found = read_results("propagation").get("classes", {})
                if str(count) not in found or options.again:
                    write_results("propagation", {"classes": {**found, str(count): measure_classes(count)}})
        elif part != "real":
            write_results("propagation", {"sizes": {**before.get("sizes", {}), part: measure(part)}})
        elif options.data is None or not options.data.is_dir():
            print(f"left out: real features need --data, a folder of images, got {options.data}")
        else:
            real(options.data, options.work, again=options.again)


if __name__ == "__main__":
    main()
