"""Throughput of `ropaws predict --engine ray` with one worker and two, beside one process.

python benchmarks/ray_scale.py [--images 2000] [--turns 3]     writes results/ray_scale.json

JPEGs of 96 x 72 are labeled by a small network: each command as a person runs it, in turns, with its start. A
worker's share of the time is what Ray takes to start, which the second figure, of a pool of one image, shows.
"""

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from many_files import make_sources, watched
from timing import write_results

WAYS = {
    "one process": (),
    "Ray, 1 worker": ("--engine", "ray", "--workers", "1"),
    "Ray, 2 workers": ("--engine", "ray", "--workers", "2"),
}


def measure(folder: Path, images: int, turns: int) -> dict[str, dict[str, float]]:
    places = make_sources(folder, 1000, images)
    run = folder / "run"
    watched("train", "--labeled", places["labeled"], "--unlabeled", places["few"], "--backbone", "small",
            "--train.steps", 20, "--out", run, "--no-report")  # fmt: skip
    one = folder / "one"
    one.mkdir()
    shutil.copy(next(places["many"].rglob("*.jpg")), one)
    seconds: dict[str, dict[str, list[float]]] = {way: {"all": [], "start": []} for way in WAYS}
    for turn in range(turns):
        for way, options in WAYS.items():
            for what, source in (("all", places["many"]), ("start", one)):
                out = folder / f"out-{turn}-{len(options)}-{options[-1:]}-{what}"
                target = out if options else out.with_suffix(".parquet")
                more = () if options else ("--no-map",)
                found = watched("predict", run, source, "--out", target, *options, *more)
                seconds[way][what].append(found["seconds"])
    return {
        way: {
            "seconds": statistics.median(took["all"]),
            "seconds_of_one_image": statistics.median(took["start"]),
            "images_per_second_after_the_start": round(
                images / max(0.1, statistics.median(took["all"]) - statistics.median(took["start"]))
            ),
        }
        for way, took in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2000, help="a multiple of 1,000")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(Path(temporary), options.images, options.turns)
    load = round(os.getloadavg()[0], 1)
    write_results("ray_scale", {"images": options.images, "load_average": load, "ways": found})


if __name__ == "__main__":
    main()
