"""A million small images in tar shards, end to end: time and memory of each command, in two sizes.

python benchmarks/million.py [--images 1000000] [--work FOLDER] [--only STAGE ...] [--of few many] [--again]

JPEGs of 32 pixels are generated from the embedded garments (shifted, in another light, with noise) and
written to tar shards of 10,000. A small convolutional network with random weights gives the features: time
and memory count here, accuracy does not. Each command runs as a person runs it, over a tenth of the shards
and over all. Memory is that of the command with all its worker processes, sampled while they run (pages that
processes share count in each, and so do pages of memory-mapped files). `explore` is started, asked for its
page, and ended when its map is drawn and near duplicates are found. It can be interrupted: what
results/million.json has is left out, unless --again. Needs /proc, so Linux, and 3 kB of disk for each image.
"""

import argparse
import http.client
import io
import json
import os
import re
import resource
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from many_files import EVERY, family, resident
from PIL import Image
from timing import read_results, write_results

from ropaws.embedding.convnets import SmallConvNet
from ropaws.pool.sources import DataConfig, load_corpus

SHARD = 10_000  # images of a tar file
SIDE = 32  # pixels
LABELS = 25  # of each class
WITH_RUN = ("predict", "suggest", "explore")  # stages that need the run of train
FEW = 10  # part of the shards that memory and time are compared with

Measured = dict[str, float]


def write_shard(path: Path, number: int, garments: np.ndarray) -> None:
    """Every image is a garment at another place, in another light, with its own noise."""
    random = np.random.default_rng(number)
    temporary = path.with_suffix(".tmp")
    with tarfile.open(temporary, "w") as archive:
        for index in range(SHARD):
            add(archive, f"{number:04d}{index:05d}.jpg", variant(random, garments))
    temporary.rename(path)


def variant(random: np.random.Generator, garments: np.ndarray) -> bytes:
    square = np.zeros((SIDE, SIDE), np.float32)
    top, left = random.integers(0, 1 + SIDE - garments.shape[-1], 2)
    one = garments[random.integers(len(garments))]
    square[top : top + len(one), left : left + len(one)] = one * (0.6 + 0.4 * random.random())
    square += 6 * random.standard_normal(square.shape, np.float32)
    stream = io.BytesIO()
    Image.fromarray(square.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def prepare(work: Path, images: int) -> None:
    """Shards (all, and links to the first of them), labeled images, and weights."""
    corpus = load_corpus(DataConfig(source="fashion-demo"))
    pixels = np.asarray(corpus.train_images[:])
    garments = pixels.reshape(len(pixels), *pixels.shape[-2:]).astype(np.float32)
    for folder in ("many", "few"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    for number in range(images // SHARD):
        path = work / "many" / f"{number:04d}.tar"
        if not path.exists():
            write_shard(path, number, garments)
        link = work / "few" / path.name
        if number < max(1, images // SHARD // FEW) and not link.exists():
            os.link(path, link)
    labels = np.asarray(corpus.train_labels)
    for code, name in enumerate(corpus.class_names):
        folder = work / "labeled" / name
        folder.mkdir(parents=True, exist_ok=True)
        for row in np.flatnonzero(labels == code)[:LABELS]:
            Image.fromarray(garments[row].astype(np.uint8)).resize((SIDE, SIDE)).save(folder / f"{row}.png")
    if not (work / "weights.pth").exists():
        torch.manual_seed(0)
        torch.save(SmallConvNet().state_dict(), work / "weights.pth")


def commands(work: Path, size: str) -> dict[str, list[object]]:
    """The stages that are commands which end."""
    shards, labeled = work / size, work / "labeled"
    made = work / f"made-{size}"
    made.mkdir(exist_ok=True)
    network = ("--backbone", "small", "--init", work / "weights.pth")
    cache, run = made / "features", made / "run"
    train = ("--labeled", labeled, "--unlabeled", shards, *network, "--data.feature-cache", cache)
    return {
        "check": ["check", "--labeled", labeled, "--unlabeled", shards],
        "embed": ["embed", shards, "--labeled", labeled, *network, "--cache", cache,
                  "--out", made / "features.npz"],
        "train": ["train", *train, "--out", run, "--no-report"],
        "predict": ["predict", run, shards, "--out", made / "labels.parquet"],
        "suggest": ["suggest", run, "--pool", "0", "--n", "50"],
    }  # fmt: skip


def measured(process: "subprocess.Popen[str]", until: Callable[[], bool]) -> Measured:
    began, before, most, alone = time.perf_counter(), cpu_seconds(), 0, 0
    while not until():
        sizes = [resident(pid) for pid in family(process.pid)]
        most, alone = max(most, sum(sizes)), max(alone, sizes[0])
        time.sleep(EVERY)
    seconds = round(time.perf_counter() - began, 1)
    sizes = {"megabytes": round(most / 2**20), "megabytes_itself": round(alone / 2**20)}
    return {"seconds": seconds, "cpu_seconds": round(cpu_seconds() - before, 1), **sizes}


def cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_command(arguments: list[object]) -> Measured:
    command = [sys.executable, "-m", "ropaws", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True)
    found = measured(process, lambda: process.poll() is not None)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}")
    return found


def explore(run: Path) -> Measured:
    """Until the page opens, its columns are there, and the work in the background is done."""
    command = [sys.executable, "-m", "ropaws", "explore", str(run), "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    began, before = time.perf_counter(), cpu_seconds()
    assert process.stdout is not None
    try:
        lines = (re.search(r":(\d+)/\?token=(\S+)", line) for line in process.stdout)
        address = next(filter(None, lines))
        opens = round(time.perf_counter() - began, 1)
        port, token = int(address[1]), address[2]
        start = time.perf_counter()
        columns = len(asked(port, token, "/api/columns"))
        page = round(time.perf_counter() - start, 2)
        found = measured(process, lambda: json.loads(asked(port, token, "/api/state"))["job"] is None)
        facts = {"opens": opens, "columns_seconds": page, "columns_bytes": columns}
    finally:
        process.terminate()
        process.wait()
    return {**found, **facts, "cpu_seconds": round(cpu_seconds() - before, 1)}


def asked(port: int, token: str, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", path, headers={"Cookie": f"ropaws-{port}={token}", "X-Ropaws-Client": "bench"})
    reply = connection.getresponse()
    body = reply.read()
    if reply.status != 200:
        raise SystemExit(f"{path} answered {reply.status}: {body[:200]!r}")
    return body


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = ("check", "embed", "train", "predict", "suggest", "explore")
    parser.add_argument("--images", type=int, default=1_000_000, help=f"a multiple of {SHARD * FEW:,}")
    parser.add_argument("--work", type=Path, default=Path("runs/million"))
    parser.add_argument("--only", nargs="+", choices=stages, default=list(stages), metavar="STAGE")
    parser.add_argument("--of", nargs="+", choices=("few", "many"), default=["few", "many"])
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    prepare(options.work, options.images)
    counts = {"few": max(SHARD, options.images // FEW), "many": options.images}
    for size in options.of:
        count = counts[size]
        for stage in options.only:
            results: dict[str, Any] = read_results("million")
            kept = results.setdefault("images", {}).setdefault(str(count), {})
            if stage in kept and not options.again:
                continue
            run = options.work / f"made-{size}" / "run"
            if stage in WITH_RUN and not run.exists():
                print(f"{count:,} {stage}: left out, as there is no run; measure train first", flush=True)
                continue
            given = commands(options.work, size)
            kept[stage] = explore(run) if stage == "explore" else run_command(given[stage])
            kept[stage]["load_average"] = round(os.getloadavg()[0], 1)
            print(f"{count:,} {stage}: {kept[stage]}", flush=True)
            write_results("million", {"images": results["images"]})


if __name__ == "__main__":
    main()
