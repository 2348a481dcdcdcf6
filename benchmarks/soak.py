"""Training under attack: random kills, corrupt images, a slow disk. Nothing may be lost.

python benchmarks/soak.py                    some minutes; writes results/soak.json
python benchmarks/soak.py --steps 2000 --kills 40

Images on disk, read while training; some are corrupt, and every read may be slow. The run is killed
without warning (SIGKILL) again and again and resumed. A quiet run with the same settings tells what the
end should be. Lost steps are those beyond the last checkpoint that had to be taken again.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from timing import write_results

from ropaws import recipes
from ropaws.core.files import write_json
from ropaws.core.randomness import SupportConfig
from ropaws.pool.augment import AugmentConfig
from ropaws.pool.sources import DataConfig
from ropaws.run.config import to_json

CLASSES, LABELED, POOL, CORRUPT = 4, 5, 200, 10
# Runs `ropaws`, but every twentieth image takes a tenth of a second, as on a disk that others use.
SLOW = """
import sys, time, itertools
import ropaws.pool.decoding as images
import ropaws.pool.corpus as stacks
real, count = images._decode, itertools.count()
def slow(image, size):
    if next(count) % 20 == 0:
        time.sleep(0.1)
    return real(image, size)
images._decode = slow
if __name__ == "__main__":
    from ropaws.cli.main import main
    main(sys.argv[1:])
"""


def write_images(folder: Path) -> None:
    random_ = np.random.default_rng(0)
    for label in range(CLASSES):
        for i in range(LABELED):
            _save(folder / "labeled" / f"class{label}" / f"{i}.png", label, random_)
    for i in range(POOL):
        _save(folder / "pool" / f"{i:04d}.png", i % (CLASSES + 2), random_)
    for i in range(CORRUPT):
        (folder / "pool" / f"corrupt-{i}.png").write_bytes(b"not an image" * i)


def _save(path: Path, label: int, random_: np.random.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = random_.integers(0, 90, (32, 32, 3))
    pixels[label * 4 : label * 4 + 6] += 150
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def metrics(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # cut off by the kill
            break
    return rows


def next_step(run: Path) -> int:
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        try:
            return int(torch.load(run / name, weights_only=True)["next_step"])
        except (OSError, RuntimeError, EOFError, KeyError):
            continue
    return 0


def attack(script: Path, config: Path, run: Path, steps: int, kills: int) -> dict[str, int]:
    chance, again, survived = random.Random(0), 0, 0
    points = sorted(chance.sample(range(2, steps - 1), kills))
    start = ["train", str(config), "--out", str(run)]
    for point in points:
        process = subprocess.Popen([sys.executable, script, *start], env=_quiet(), stderr=subprocess.DEVNULL)
        while len(metrics(run)) < point and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        again += len(metrics(run)) - next_step(run)
        survived += 1
        start = ["train", "--resume", str(run)]
        print(f"killed after step {len(metrics(run))}, the checkpoint is at {next_step(run)}", flush=True)
    subprocess.run([sys.executable, script, *start], env=_quiet(), check=True, stderr=subprocess.DEVNULL)
    return {"kills_survived": survived, "steps_taken_again": again}


def _quiet() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=8)
    options = parser.parse_args()
    every = 10
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_images(folder)
        base = recipes.demo()
        config = replace(
            base,
            data=DataConfig(
                labeled=folder / "labeled", unlabeled=(folder / "pool",), image_size=32,
                labels_per_class=None, memory_gb=0.0, workers=1,
            ),
            augment=AugmentConfig(size=28, small_crops=1, small_size=16),
            support=SupportConfig(images_per_class=2, views=2),
            train=replace(
                base.train, steps=options.steps, batch=16, checkpoint_every=every, precision="fp32"
            ),
        )  # fmt: skip
        write_json(folder / "config.json", to_json(config))
        plain, slow = folder / "plain.py", folder / "slow.py"
        plain.write_text(
            "import sys\nfrom ropaws.cli.main import main\nif __name__ == '__main__': main(sys.argv[1:])\n"
        )
        slow.write_text(SLOW)
        quiet, hard = folder / "quiet", folder / "hard"
        start = [sys.executable, plain, "train", folder / "config.json", "--out", quiet]
        subprocess.run(start, env=_quiet(), check=True, stderr=subprocess.DEVNULL)
        results = attack(slow, folder / "config.json", hard, options.steps, options.kills)
        one, other = (load_file(run / "model.safetensors") for run in (quiet, hard))
        losses = [[row["loss"] for row in metrics(run)] for run in (quiet, hard)]
        listed = len((hard / "unreadable.txt").read_text().splitlines())
    write_results(
        "soak",
        {
            "steps_done": len(losses[1]),
            **results,
            "checkpoint_every": every,
            "steps_lost_beyond_a_checkpoint": options.steps - len(losses[1]),
            "corrupt_images_listed": f"{listed} of {CORRUPT}",
            "final_loss": losses[1][-1],
            "losses_equal_the_quiet_run": losses[0] == losses[1],
            "weights_equal_the_quiet_run": all(torch.equal(one[name], other[name]) for name in one),
        },
    )


if __name__ == "__main__":
    main()
