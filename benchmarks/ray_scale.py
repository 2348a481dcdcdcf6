"""Throughput of `ropaws predict --engine ray` with one worker and two, beside one process without Ray.

python benchmarks/ray_scale.py [--images 20000] [--turns 3]     writes results/ray_scale.json

JPEGs of 32 pixels in tar shards (those of million.py) are labeled by a small network; nothing is in the
cache of features. Each command is run as a person runs it, in turns. Its seconds count the start of Ray;
images per second are those between the first part of each worker and the last one. Ray's own priority for
workers, which is the lowest but four, is set to that of other programs.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from many_files import watched
from million import prepare
from timing import write_results

from ropaws.core.terminal import Terminal
from ropaws.pool.listing import Pool
from ropaws.run.predict import Predictor, predict_files
from ropaws.run.run import Run

PART = 1000
WORKERS = (1, 2)


def by_ray(run: Path, shards: Path, out: Path, workers: int) -> tuple[float, float]:
    """Seconds of the command, and images per second once all workers are at work."""
    options = ("--engine", "ray", "--workers", workers, "--part", PART)
    seconds = watched("predict", run, shards, "--out", out, *options)["seconds"]
    times = sorted(part.stat().st_mtime for part in out.glob("part-*.parquet"))
    return seconds, PART * (len(times) - workers) / (times[-1] - times[workers - 1])


def by_one_process(run: Path, shards: Path) -> float:
    """Images per second after the first part, without Ray."""
    found = predict_files(Predictor(Run(run, console=Terminal(quiet=True))), Pool.open(shards).images)
    for number, _ in enumerate(found, start=1):
        if number == PART:
            began = time.perf_counter()
    return (number - PART) / (time.perf_counter() - began)


def measure(folder: Path, images: int, turns: int) -> dict[str, dict[str, float]]:
    prepare(folder, images)
    run, shards = folder / "run", folder / "many"
    labeled = ("--labeled", folder / "labeled", "--unlabeled", folder / "labeled")
    network = ("--backbone", "small", "--init", folder / "weights.pth", "--train.steps", 20)
    watched("train", *labeled, *network, "--out", run, "--no-report")
    speeds: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for _ in range(turns):
        for workers in (0, *WORKERS):
            os.environ["ROPAWS_CACHE"] = str(folder / "cache")
            name = f"Ray, {workers} worker{'s' if workers > 1 else ''}" if workers else "one process"
            if workers:
                took, speed = by_ray(run, shards, folder / "out", workers)
                seconds.setdefault(name, []).append(took)
                shutil.rmtree(folder / "out")
            else:
                speed = by_one_process(run, shards)
            speeds.setdefault(name, []).append(speed)
            shutil.rmtree(folder / "cache")
            print(name, seconds.get(name, [""])[-1], round(speed), flush=True)
    return {
        name: {"images_per_second": round(statistics.median(found))}
        | ({"seconds": statistics.median(seconds[name])} if name in seconds else {})
        for name, found in speeds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=20_000, help="a multiple of 10,000")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own spelling
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(Path(temporary), options.images, options.turns)
    facts = {"images": options.images, "turns": options.turns, "load_average": round(os.getloadavg()[0], 1)}
    write_results("ray_scale", {**facts, "ways": found})


if __name__ == "__main__":
    main()
