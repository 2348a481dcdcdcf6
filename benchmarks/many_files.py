"""A folder of 100,000 image files: how fast it is listed, checked and predicted, and in how much memory.

python benchmarks/many_files.py        about ten minutes on two cores; writes results/many_files.json

JPEGs of 96 x 72 are generated, a few of them labeled, and a small network is trained on these. Then `ropaws
check` and `ropaws predict` run as a person runs them, over 10,000 files and over 100,000. The memory of the
command with all its worker processes is sampled while they run (pages that processes share count in each).
Needs /proc, so Linux.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from timing import write_results

from ropaws.pool.listing import list_unlabeled, merge

WIDTH, HEIGHT, BASE = 96, 72, 640
CLASSES, LABELED, FOLDER = 3, 20, 1000  # classes, labels of each, files in one folder
EVERY = 0.2  # seconds between two looks at the memory
PAGE = os.sysconf("SC_PAGE_SIZE")


def write_images(folder: Path, count: int) -> None:
    """Parts of large smooth forms with finer ones; every file is another part in another light."""
    random = np.random.default_rng(0)
    bases = []
    for _ in range(20):
        forms, detail = (
            Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)).resize((BASE, BASE), 3)
            for side in (24, 96)
        )
        bases.append(np.asarray(Image.blend(forms, detail, 0.4)))
    for index in range(count):
        top, left = random.integers(0, BASE - HEIGHT), random.integers(0, BASE - WIDTH)
        part = bases[index % len(bases)][top : top + HEIGHT, left : left + WIDTH]
        light = 0.6 + 0.4 * random.random()
        place = folder / f"{index // FOLDER:03d}" / f"{index:06d}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((part * light).astype(np.uint8)).save(place, quality=85)


def make_sources(folder: Path, few: int, many: int) -> dict[str, Path]:
    """The pool twice (the smaller one is the first folders of the larger), and labeled images."""
    write_images(folder / "many", many)
    places = {"few": folder / "few", "many": folder / "many", "labeled": folder / "labeled"}
    places["few"].mkdir()
    for number in range(few // FOLDER):
        (places["few"] / f"{number:03d}").symlink_to(places["many"] / f"{number:03d}")
    write_images(folder / "to-label", CLASSES * LABELED)
    for index, file in enumerate(sorted((folder / "to-label").rglob("*.jpg"))):
        place = places["labeled"] / f"class-{index % CLASSES}" / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        file.rename(place)
    return places


def watched(*arguments: object) -> dict[str, float]:
    """A `ropaws` command: its seconds, and the most memory that it and its workers take."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "ropaws", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    most = alone = 0
    while process.poll() is None:
        sizes = [resident(pid) for pid in family(process.pid)]
        most, alone = max(most, sum(sizes)), max(alone, sizes[0])
        time.sleep(EVERY)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}")
    return {
        "seconds": round(seconds, 1), "megabytes": round(most / 2**20),
        "megabytes_of_the_command_itself": round(alone / 2**20),
    }  # fmt: skip


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        try:
            threads = os.listdir(f"/proc/{parent}/task")
            for thread in threads:
                children = Path(f"/proc/{parent}/task/{thread}/children").read_text()
                found += map(int, children.split())
        except OSError:  # it has just ended
            continue
    return found


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def listing_seconds(folder: Path) -> float:
    began = time.perf_counter()
    merge([list_unlabeled(folder)])
    return round(time.perf_counter() - began, 2)


def compare(counts: dict[str, int], places: dict[str, Path], run: Path, out: Path) -> dict[str, object]:
    results: dict[str, object] = {"listing": {counts["many"]: listing_seconds(places["many"])}}
    commands = {
        "check": lambda pool: ("check", "--labeled", places["labeled"], "--unlabeled", pool),
        "predict": lambda pool: ("predict", run, pool, "--out", out),
    }
    for name, arguments in commands.items():
        few, many = (watched(*arguments(places[size])) for size in ("few", "many"))
        more = counts["many"] - counts["few"]
        results[name] = {
            counts["few"]: few, counts["many"]: many,
            "files_per_second": round(counts["many"] / many["seconds"]),
            "bytes_more_per_file": round((many["megabytes"] - few["megabytes"]) * 2**20 / more),
        }  # fmt: skip
        print(name, results[name], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000, help="a multiple of 1,000")
    parser.add_argument("--few", type=int, default=10_000, help="to compare the memory with")
    parser.add_argument("--keep", type=Path, help="folder for the files, used again if it is there")
    options = parser.parse_args()
    counts = {"few": options.few, "many": options.files}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        run = folder / "run"
        if run.exists():
            places = {name: folder / name for name in ("few", "many", "labeled")}
        else:
            places = make_sources(folder, options.few, options.files)
            watched(
                "train", "--labeled", places["labeled"], "--unlabeled", places["few"] / "000",
                "--backbone", "small", "--train.steps", 20, "--out", run,
            )  # fmt: skip
        results = compare(counts, places, run, folder / "labels.csv")
    write_results("many_files", {"files": options.files, "pixels": [WIDTH, HEIGHT], **results})


if __name__ == "__main__":
    main()
