"""RoPAWSClassifier on raw measurements and small images: few rows, two labels per class, no network.

python benchmarks/small_data.py [--draws 10]

Pixels of scikit-learn's digits with some digits as the classes and the others in the pool (every other row),
and its breast cancer measurements, standardized, without others. The settings were chosen on other choices of
the digits, on wine and on iris. Figures are of all unlabeled rows. Logistic regression is scikit-learn's on
the rows as they are, the cosine that of the nearest label. Runs on one thread, writes
results/small_data.json.
"""

import argparse
import statistics
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler
from timing import write_results

from ropaws import RoPAWSClassifier

PER_CLASS = 2
DIGITS = {
    "0 to 4": (0, 1, 2, 3, 4),
    "5 to 9": (5, 6, 7, 8, 9),
    "even": (0, 2, 4, 6, 8),
    "odd": (1, 3, 5, 7, 9),
}
Array = NDArray[Any]


def tasks() -> dict[str, tuple[Array, Array]]:
    """Rows and truth; -1 is of no class."""
    pixels, digits = load_digits(return_X_y=True)
    pixels, digits = pixels[::2].astype(np.float32), digits[::2]
    found = {
        f"digits, {name}": (pixels, np.where(np.isin(digits, classes), digits, -1))
        for name, classes in DIGITS.items()
    }
    rows, truth = load_breast_cancer(return_X_y=True)
    found["breast cancer"] = (StandardScaler().fit_transform(rows).astype(np.float32), truth)
    return found


def measure(rows: Array, truth: Array, seed: int) -> dict[str, float]:
    """One draw of the labels: accuracy on unlabeled in-class rows, AUROC of in-class against the others."""
    random = np.random.default_rng(seed)
    classes = np.unique(truth[truth >= 0])
    labeled = np.concatenate(
        [random.permutation(np.flatnonzero(truth == c))[:PER_CLASS] for c in classes.tolist()]
    )
    y = np.full(len(rows), -1)
    y[labeled] = truth[labeled]
    rest = np.flatnonzero(y < 0)
    inside = truth[rest] >= 0
    ours = RoPAWSClassifier().fit(rows, y)
    regression = LogisticRegression(max_iter=2000).fit(rows[labeled], truth[labeled])
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = unit[rest] @ unit[labeled].T
    answers = {
        "ours": ours.predict(rows[rest]),
        "regression": regression.predict(rows[rest]),
        "cosine": truth[labeled][cosines.argmax(axis=1)],
    }
    found = {
        f"{name}_accuracy": 100 * float((answer == truth[rest])[inside].mean())
        for name, answer in answers.items()
    }
    if not inside.all():
        scores = {
            "ours": ours.score_in_domain(rows[rest]),
            "regression": regression.predict_proba(rows[rest]).max(axis=1),
            "cosine": cosines.max(axis=1),
        }
        found |= {
            f"{name}_auroc": 100 * float(roc_auc_score(inside, score)) for name, score in scores.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for name, (rows, truth) in tasks().items():
        draws = [measure(rows, truth, seed) for seed in range(options.draws)]
        found[name] = {
            key: {
                "mean": round(statistics.fmean(draw[key] for draw in draws), 2),
                "deviation": round(statistics.stdev(draw[key] for draw in draws), 2),
            }
            for key in draws[0]
        }
        print(name, {key: value["mean"] for key, value in found[name].items()}, flush=True)
    write_results("small_data", {"draws": options.draws, "labels_per_class": PER_CLASS, "rows": found})


if __name__ == "__main__":
    main()
