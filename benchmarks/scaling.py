"""Throughput of one and of two processes with the same global batch.

python benchmarks/scaling.py            a few minutes; writes results/scaling.json

Each process has one thread, so that two cores are two workers. Alternately one and two processes train
the demo's network on generated images; a step's time is the median of all steps but the first few. On
one machine with gloo this shows what the exchange costs, not what a cluster would gain.
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
from ropaws.training.checkpoint import write_json

STEPS, WARM_UP, TURNS, BATCH = 14, 4, 3, 128


def train(config: Path, out: Path, processes: int) -> list[float]:
    """Seconds of each step."""
    command = ["-m", "ropaws", "train", str(config), "--out", str(out)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port]
        command = [*launcher, *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command], env=environment, capture_output=True, check=False)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    moments = [json.loads(line)["seconds"] for line in lines]
    return [after - before for before, after in itertools.pairwise(moments)][WARM_UP:]


def main() -> None:
    seconds: dict[int, list[float]] = {1: [], 2: []}
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
            for processes in seconds:
                out = folder / f"run-{turn}-{processes}"
                seconds[processes] += train(folder / "config.json", out, processes)
                print(f"{processes} processes: {statistics.median(seconds[processes]):.2f} s a step")
    rates = {str(n): round(BATCH / statistics.median(times), 1) for n, times in seconds.items()}
    parameters = sum(p.numel() for p in build_encoder(config.model, channels=1).parameters())
    write_results(
        "scaling",
        {
            "images_per_second": rates,
            "speedup_of_two": round(statistics.median(seconds[1]) / statistics.median(seconds[2]), 2),
            "parameters": parameters,
            "threads_each": 1,
            "backend": f"gloo, torch {torch.__version__}",
        },
    )


if __name__ == "__main__":
    main()
