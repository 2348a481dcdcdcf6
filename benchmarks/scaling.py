"""Throughput of one process, of one with two threads and of two processes, with the same global batch.

python benchmarks/scaling.py            three minutes; writes results/scaling.json
python benchmarks/scaling.py --only wide    the larger of the two networks

In turns they train the demo's network, and a wide residual network, on generated images; a step's time is the
median of all steps but the first few. Two threads show what the second core can give at all. On one machine
with gloo this tells what the exchange costs, not what a cluster would gain.
"""

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from timing import write_results

from ropaws import recipes
from ropaws.config import to_json
from ropaws.data.sources import DataConfig
from ropaws.models import build_encoder
from ropaws.runs.atomic import write_json


class Setting(NamedTuple):
    """What is trained, and for how long."""

    backbone: str | None  # None: the demo's
    batch: int
    steps: int
    turns: int


SETTINGS = {"demo": Setting(None, 128, 24, 3), "wide": Setting("wrn-28-2", 32, 10, 2)}
WARM_UP = 4
# processes, threads of each
WAYS = {"one process": (1, 1), "one process of two threads": (1, 2), "two processes": (2, 1)}


def train(config: Path, out: Path, processes: int, threads: int) -> list[float]:
    """Seconds of each step."""
    command = ["-m", "ropaws", "train", str(config), "--out", str(out), "--train.threads", str(threads)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port]
        command = [*launcher, *command]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, *command], env=environment, capture_output=True, check=False)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    moments = [json.loads(line)["seconds"] for line in lines]
    return [after - before for before, after in itertools.pairwise(moments)][WARM_UP:]


def measure(setting: Setting, folder: Path) -> dict[str, object]:
    config = recipes.scratch()
    config = replace(
        config,
        data=DataConfig(source=str(folder / "data.npz"), labels_per_class=4),
        train=replace(config.train, steps=setting.steps, batch=setting.batch, precision="fp32"),
        model=replace(config.model, backbone=setting.backbone or config.model.backbone),
    )
    write_json(folder / "config.json", to_json(config))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(setting.turns):
        for number, (way, (processes, threads)) in enumerate(WAYS.items()):
            out = folder / f"{setting.backbone}-{turn}-{number}"
            seconds[way] += train(folder / "config.json", out, processes, threads)
            print(f"{way}: {statistics.median(seconds[way]):.3f} s per step", flush=True)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    first = medians["one process"]
    return {
        "images_per_second": {way: round(setting.batch / median, 1) for way, median in medians.items()},
        "times_one_process": {way: round(first / median, 2) for way, median in medians.items()},
        "processes_against_threads": round(
            medians["one process of two threads"] / medians["two processes"], 2
        ),
        "parameters": sum(p.numel() for p in build_encoder(config.model, channels=1).parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(SETTINGS))
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (2000, 28, 28), dtype=np.uint8)
        np.savez(folder / "data.npz", train_images=images, train_labels=np.arange(2000) % 5)
        for name in [only] if only else list(SETTINGS):
            found = measure(SETTINGS[name], folder)
            write_results("scaling", {name: found, "backend": f"gloo, torch {torch.__version__}"})


if __name__ == "__main__":
    main()
