"""From a folder of images to labels: `ropaws train` and `ropaws predict` against the plain way.

python benchmarks/plain_way.py --work FOLDER        writes results/plain_way.json

The plain way is a script: Pillow, one pass of the same network at the same size, logistic regression, and a
table. Both start as processes of their own, in turns, with the same threads, which wait alike (threads that
spin would count as work on a busy machine). Cold: no feature is known. Warm: the same commands again. Seconds
of the CPU are counted too: they hold on a busy machine. The images are
the solar cells of feature_collections.py (300 px), with 10 labels per class, drawn at random; the accuracy is
that of the likeliest class of every image of the pool, for one draw.
"""

import argparse
import csv
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from feature_collections import SOURCES
from timing import write_results

from ropaws.__main__ import WAITING
from ropaws.classify.head import RANDOM_VIEWS

LABELS = 10
SCRIPT = """
import csv, sys
from pathlib import Path
import numpy as np, torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from ropaws.embedding.convnets import EfficientNetLite0, pretrained_weights
root, size = Path(sys.argv[1]), int(sys.argv[2])
net = EfficientNetLite0().eval(); net.load_state_dict(pretrained_weights())
def look(path):
    image = Image.open(path).convert("RGB"); side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.crop((left, top, left + side, top + side)).resize((size, size), Image.BICUBIC)
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() - 127) / 128
def features(paths):
    with torch.inference_mode():
        parts = [net(torch.stack([look(p) for p in paths[i:i + 32]])) for i in range(0, len(paths), 32)]
    return torch.nn.functional.normalize(torch.cat(parts), dim=1).numpy()
labeled, pool = sorted((root / "labeled").glob("*/*.png")), sorted((root / "pool").glob("*.png"))
known, rest = features(labeled), features(pool)
mean = np.concatenate([known, rest]).mean(axis=0)
model = LogisticRegression(C=10, max_iter=1000).fit(known - mean, [p.parent.name for p in labeled])
probs = model.predict_proba(rest - mean)
with open(root / "plain.csv", "w", newline="") as file:
    out = csv.writer(file); out.writerow(["path", "label", "confidence"])
    for path, row in zip(pool, probs):
        out.writerow([path, model.classes_[row.argmax()], row.max()])
"""


def write_folders(work: Path, most: int) -> dict[str, str]:
    """labeled/CLASS and pool below a folder; the class of each image of the pool."""
    found = SOURCES["solar"](None, work)
    counts: dict[str, int] = {}
    truth = {}
    shutil.rmtree(work / "images", ignore_errors=True)
    images = list(zip(found.images, found.labels.tolist(), strict=True))[:most]
    random.Random(0).shuffle(images)  # neighbors in the file are cells of one module
    for path, label in images:
        name = f"class-{label}"
        counts[name] = counts.get(name, 0) + 1
        place = Path("labeled") / name if counts[name] <= LABELS else Path("pool")
        (work / "images" / place).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, work / "images" / place / path.name)
        if place.name == "pool":
            truth[path.name] = name
    return truth


def plain(root: Path, size: int) -> None:
    words = [sys.executable, "-c", SCRIPT, str(root), str(size)]
    subprocess.run(words, env=os.environ | WAITING, check=True)


def ours(root: Path, cache: Path, size: int, views: int) -> None:
    run = root / "run"
    shutil.rmtree(run, ignore_errors=True)
    environment = os.environ | {"ROPAWS_CACHE": str(cache)}
    train = ["train", "--labeled", root / "labeled", "--unlabeled", root / "pool", "--out", run]
    train += ["--no-report", "--backbone", "efficientnet-lite0", "--augment.size", size]
    train += ["--model.frozen-views", views]
    for command in (train, ["predict", run, root / "pool", "--out", root / "ours.csv"]):
        words = [sys.executable, "-m", "ropaws", *map(str, command)]
        subprocess.run(words, env=environment, check=True, capture_output=True)


def accuracy(table: Path, truth: dict[str, str]) -> float:
    with table.open() as file:
        rows = list(csv.DictReader(file))
    column = "nearest_class" if "nearest_class" in rows[0] else "label"  # the likeliest class of every image
    return statistics.mean(truth[Path(row["path"]).name] == row[column] for row in rows)


def times_the_first(found: dict[str, list[float]]) -> dict[str, float]:
    """Of each way: the median over turns of what it takes, against the plain way."""
    plain = found["plain"]
    return {n: statistics.median(a / b for a, b in zip(found[n], plain, strict=True)) for n in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--views", type=int, default=RANDOM_VIEWS)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    truth = write_folders(options.work, options.images)
    root, cache = options.work / "images", options.work / "features"
    seconds: dict[str, list[float]] = {"plain": [], "cold": [], "warm": []}
    cpu: dict[str, list[float]] = {name: [] for name in seconds}
    for _ in range(options.turns):
        shutil.rmtree(cache, ignore_errors=True)
        ways = {
            "plain": lambda: plain(root, options.size),
            "cold": lambda: ours(root, cache, options.size, options.views),
            "warm": lambda: ours(root, cache, options.size, options.views),
        }
        for name, way in ways.items():
            began, before = time.perf_counter(), os.times()
            way()
            after = os.times()
            seconds[name].append(time.perf_counter() - began)
            used = after.children_user + after.children_system - before.children_user - before.children_system
            cpu[name].append(used)
        print({name: [round(s, 1) for s in values] for name, values in seconds.items()}, flush=True)
    wall, work = times_the_first(seconds), times_the_first(cpu)
    write_results(
        "plain_way",
        {
            "images": len(truth),
            "size": options.size,
            "views": options.views,
            "turns": options.turns,
            "seconds": {name: statistics.median(values) for name, values in seconds.items()},
            "cpu_seconds": {name: statistics.median(values) for name, values in cpu.items()},
            "times_the_plain_way": {name: wall[name] for name in ("cold", "warm")},
            "times_its_cpu_seconds": {name: work[name] for name in ("cold", "warm")},
            "accuracy": {
                "plain": accuracy(root / "plain.csv", truth),
                "ours": accuracy(root / "ours.csv", truth),
            },
        },
    )


if __name__ == "__main__":
    main()
