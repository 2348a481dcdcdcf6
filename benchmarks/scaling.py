"""Throughput of one process, of one with two threads and of two processes, with the same global batch.

python benchmarks/scaling.py            a few minutes; writes results/scaling.json

In turns they train the demo's network on generated images; a step's time is the median of all steps but the
first few. Two threads show what the second core can give at all. On one machine with gloo this tells what the
exchange costs, not what a cluster would gain.
"""

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

import numpy as np
import torch
from timing import write_results

from ropaws import recipes
from ropaws.config import to_json
from ropaws.data.sources import DataConfig
from ropaws.models import build_encoder
from ropaws.runs.atomic import write_json

STEPS, WARM_UP, TURNS, BATCH = 14, 4, 3, 128


# processes, threads of each
WAYS = {"one process": (1, 1), "one process of two threads": (1, 2), "two processes": (2, 1)}


def train(config: Path, out: Path, processes: int, threads: int) -> list[float]:
    """Seconds of each step."""
    command = ["-m", "ropaws", "train", str(config), "--out", str(out)]
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


def main() -> None:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (2000, 28, 28), dtype=np.uint8)
        np.savez(folder / "data.npz", train_images=images, train_labels=np.arange(2000) % 5)
        config = recipes.demo()
        config = replace(
            config,
            data=DataConfig(source=str(folder / "data.npz"), labels_per_class=4),
            train=replace(config.train, steps=STEPS, batch=BATCH, precision="fp32"),
        )
        write_json(folder / "config.json", to_json(config))
        for turn in range(TURNS):
            for number, (way, (processes, threads)) in enumerate(WAYS.items()):
                out = folder / f"run-{turn}-{number}"
                seconds[way] += train(folder / "config.json", out, processes, threads)
                print(f"{way}: {statistics.median(seconds[way]):.2f} s per step", flush=True)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    first = medians["one process"]
    write_results(
        "scaling",
        {
            "images_per_second": {way: round(BATCH / median, 1) for way, median in medians.items()},
            "times_one_process": {way: round(first / median, 2) for way, median in medians.items()},
            "parameters": sum(p.numel() for p in build_encoder(config.model, channels=1).parameters()),
            "backend": f"gloo, torch {torch.__version__}",
        },
    )


if __name__ == "__main__":
    main()
