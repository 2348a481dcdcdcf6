"""Does the flag find what is out-of-class, and does the share hold? Many small pools with known truth.

python benchmarks/flag_and_share.py --data FOLDER --work FOLDER [--draws 10] [--suggested 3] [--trials]
    [--backbone dinov2-small --init FILE --views 0] [--measured]

From the settings of features.py that have images of no class, pools are drawn of 100, 300, 1,000 or 2,000
unlabeled images, of which 20 to 100 % are in-class, with classes that are equally frequent or ten times
as frequent one as the other. 1 to 25 labels per class are drawn at random, or chosen by `ropaws suggest`
from one per class on and answered by the truth. --trials are other data, on which borders and widths were
chosen; they write no results. --work is that of feature_collections.py; what was measured is kept there.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from feature_collections import Array, Network
from feature_tasks import TABLE, TRIALS, Data, load
from sklearn.metrics import roc_auc_score
from timing import write_results

from ropaws.classify.pool_prior import PoolPrior, RowPass
from ropaws.core.features import FeatureRows
from ropaws.core.files import write_json
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.insight.suggestions import suggest

LABELS = (1, 3, 5, 10, 25)  # per class
SIZES = (100, 300, 1000, 2000)
SHARES = (1.0, 0.85, 0.5, 0.2)
RATIOS = (1, 10)
LEFT_OUT = ("texts", "digits 0-5 + 6-9", "CIFAR-10", "20 of CIFAR-100", "other texts")
SEPARATED = 0.99  # AUROC from which a flag has no excuse
THIRD = 1 / 3


class Drawn(NamedTuple):
    """A pool; truth is -1 for images of no class."""

    rows: Array
    truth: Array
    labels: Array  # class, UNLABELED or OUT_OF_CLASS
    classes: int


def drawn(data: Data, per_class: int, kind: str, seed: int) -> Drawn:
    random = np.random.default_rng((seed, per_class))
    size, share, ratio = (random.choice(choices) for choices in (SIZES, SHARES, RATIOS))
    weights = float(ratio) ** (-random.permutation(data.classes) / max(1, data.classes - 1))
    wanted = np.maximum(2, np.round(share * size * weights / weights.sum())).astype(int)
    labeled, chosen = [], []
    for c, count in enumerate(wanted):
        own = random.permutation(np.flatnonzero(data.truth == c))
        labeled.append(own[:per_class])
        chosen.append(own[per_class:][:count])
    outside = random.permutation(np.flatnonzero(data.truth < 0))[: size - round(share * size)]
    rows = np.concatenate([*labeled, *chosen, outside])
    labels = np.full(len(rows), UNLABELED)
    first = np.concatenate(labeled)
    labels[: len(first)] = data.truth[first]
    pool = Drawn(data.features[rows], data.truth[rows], labels, data.classes)
    return pool if kind == "random" else _suggested(pool, per_class, seed)


def _suggested(pool: Drawn, per_class: int, seed: int) -> Drawn:
    """One label per class is kept; rounds of as many suggestions as there are classes follow."""
    labels = torch.full((len(pool.labels),), UNLABELED)
    answers = torch.from_numpy(np.where(pool.truth < 0, OUT_OF_CLASS, pool.truth))
    first = [np.flatnonzero((pool.labels >= 0) & (pool.truth == c))[0] for c in range(pool.classes)]
    labels[first] = answers[first]
    features = torch.from_numpy(pool.rows)
    for round_ in range(per_class - 1):
        found = suggest(features, labels, classes=pool.classes, count=pool.classes, seed=seed + round_)
        positions = [each.position for each in found]
        labels[positions] = answers[positions]
    return pool._replace(labels=labels.numpy())


def measure(pool: Drawn) -> dict[str, float]:
    """Of the unlabeled images."""
    features, labels = torch.from_numpy(pool.rows), torch.from_numpy(pool.labels)
    where = (labels >= 0).nonzero().squeeze(1)
    outside = (labels == OUT_OF_CLASS).nonzero().squeeze(1)
    prior = PoolPrior(features.shape[1], pool.classes, len(features))
    prior.fit(RowPass(FeatureRows(features)), where, labels[where], outside_rows=outside, class_prior="auto")
    rest = labels == UNLABELED
    judged, share = prior(features[rest]), prior.estimated_share()
    inside, flagged = pool.truth[rest.numpy()] >= 0, (judged.in_domain < 0.5).numpy()
    found = {
        "share": float(inside.mean()),
        "estimate": share.estimate,
        "low": share.low,
        "high": share.high,
        "doubt": float(bool(share.doubt)),
        "inside_flagged": float(flagged[inside].mean()),
        "wrong": float((flagged == inside).mean()),
        "size": float(rest.sum()),
        "unequal": float(prior.class_prior is not None),
    }
    if not inside.all():
        found["outside_flagged"] = float(flagged[~inside].mean())
        found["auroc"] = float(roc_auc_score(inside, judged.score.numpy()))
    return found


def one_sided(found: dict[str, float]) -> bool:
    """Is the surplus of one kind of error more than a third of the images of that kind?"""
    lost = found["share"] * found["inside_flagged"]
    missed = (1 - found["share"]) * (1 - found.get("outside_flagged", 0.0))
    surplus = lost - missed
    return surplus > THIRD * found["share"] or -surplus > THIRD * (1 - found["share"])


def summary(found: list[dict[str, float]]) -> dict[str, float | None]:
    """In percent, but for numbers of draws; None where there is no draw to tell."""

    def mean(values: list[float]) -> float | None:
        return round(100 * float(np.mean(values)), 1) if values else None

    mixed = [f for f in found if "auroc" in f]
    apart = [f for f in mixed if f["auroc"] >= SEPARATED]
    return {
        "draws": len(found),
        "covers": mean([float(f["low"] <= f["share"] <= f["high"]) for f in found]),
        "width": mean([f["high"] - f["low"] for f in found]),
        "share error": mean([abs(f["estimate"] - f["share"]) for f in found]),
        "share bias": mean([f["estimate"] - f["share"] for f in found]),
        "auroc": mean([f["auroc"] for f in mixed]),
        "outside_flagged": mean([f["outside_flagged"] for f in mixed]),
        "inside_flagged": mean([f["inside_flagged"] for f in found]),
        "one_sided": mean([float(one_sided(f)) for f in found]),
        "one_sided_silent": mean([float(one_sided(f) and not f["doubt"]) for f in found]),
        "doubt": mean([f["doubt"] for f in found]),
        "apart": len(apart),
        "apart_outside_flagged": mean([f["outside_flagged"] for f in apart]),
        "apart_inside_flagged": mean([f["inside_flagged"] for f in apart]),
        "apart_held": mean(
            [float(f["outside_flagged"] >= 0.9 and f["inside_flagged"] <= 0.1) for f in apart]
        ),
    }


def draws(options: argparse.Namespace) -> Iterator[tuple[str, str, int, int]]:
    tasks = [name for name in (TRIALS if options.trials else TABLE) if name not in LEFT_OUT]
    for draw in range(options.draws):
        for task in options.only or tasks:
            chosen = [("suggested", 5)] if draw < options.suggested else []  # rounds of suggestions take long
            for kind, labels in (*(("random", n) for n in LABELS), *chosen):
                yield task, kind, labels, draw


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/features"))
    parser.add_argument("--cells", type=Path, help="where what was measured is kept, by default below --work")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--suggested", type=int, default=10, help="draws whose labels are suggested ones")
    parser.add_argument("--trials", action="store_true")
    parser.add_argument("--measured", action="store_true", help="tables of what has been measured alone")
    parser.add_argument("--only", nargs="+", choices=[*TABLE, *TRIALS])
    Network.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = options.cells or options.work / "flag_and_share"
    cells.mkdir(parents=True, exist_ok=True)
    data: dict[str, Data] = {}
    groups: dict[str, list[dict[str, Any]]] = {}
    for task, kind, labels, draw in draws(options):
        path = cells / f"{task}, {kind}, {labels}, {draw}.json"
        if not path.exists() and options.measured:
            continue
        if not path.exists():
            if task not in data:
                tasks = TRIALS if options.trials else TABLE
                data[task] = load(tasks[task], options.data, options.work, Network.chosen(options))
            write_json(path, measure(drawn(data[task], labels, kind, draw)))
        found = json.loads(path.read_text())
        for group in (f"{task}, {kind}", f"{kind}, {labels} per class", kind):
            groups.setdefault(group, []).append(found)
    figures = {group: summary(found) for group, found in sorted(groups.items())}
    if options.trials:
        for group, row in figures.items():
            print(group, row)
        return
    write_results("flag_and_share", {"backbone": options.backbone, "draws": options.draws, "groups": figures})


if __name__ == "__main__":
    main()
