"""Images per second from every kind of source, against the loaders of webdataset and datasets.

python benchmarks/pool_sources.py [--images 2000]     writes results/pool_sources.json

The same JPEGs of 256 x 192 in a folder, tar shards, parquet (Hugging Face's layout), a zip file, behind
fsspec's memory and a local web server. Each is listed, decoded and scaled to squares of 224 in this
process, in turns, so that other load hits all alike: by the clock in the fastest turn, and by the seconds
that the process computed (the web server is another one). `datasets` and `webdataset` (where they are
installed) read the same parquet and tar shards, decode with Pillow and scale the same squares by Pillow.
"cache" is the second look at the folder, from the memory-mapped cache of decoded squares.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
from many_files import write_images
from PIL import Image
from timing import write_results

from ropaws.pool.decoding import SquareCache, read_squares
from ropaws.pool.listing import Pool

SIZE, SHARDS, TURNS = 224, 4, 3


def make_sources(folder: Path, images: int) -> dict[str, str]:
    """The same images in each kind of source."""
    write_images(folder / "files", images)
    files = sorted((folder / "files").rglob("*.jpg"))
    for file in files:  # larger ones, as photos are
        Image.open(file).resize((256, 192)).save(file, quality=85)
    data = [file.read_bytes() for file in files]
    (folder / "tar").mkdir()
    for shard in range(SHARDS):
        with tarfile.open(folder / "tar" / f"{shard}.tar", "w") as archive:
            for number in range(shard, images, SHARDS):
                member = tarfile.TarInfo(f"{number:06d}.jpg")
                member.size = len(data[number])
                archive.addfile(member, io.BytesIO(data[number]))
    rows = [{"bytes": one, "path": None} for one in data]
    table = pyarrow.table({"image": rows})
    pyarrow.parquet.write_table(table, folder / "images.parquet", row_group_size=100)
    with zipfile.ZipFile(folder / "images.zip", "w", zipfile.ZIP_STORED) as archive:
        for file, one in zip(files, data, strict=True):
            archive.writestr(file.name, one)
    memory = fsspec.filesystem("memory")
    for file, one in zip(files, data, strict=True):
        memory.pipe(f"/pool/{file.name}", one)
    return {
        "folder": str(folder / "files"),
        "tar shards": str(folder / "tar"),
        "parquet": str(folder / "images.parquet"),
        "zip": str(folder / "images.zip"),
        "fsspec memory": "memory://pool",
    }


def look(source: str, cache: SquareCache | None = None) -> None:
    """Every image of a source once, as a square."""
    pool = Pool.open(source)
    for square in read_squares(pool.images, SIZE, cache=cache, workers=1):
        if isinstance(square, Exception):
            raise square


def squares(images: Iterable[Image.Image]) -> None:
    """What another loader gives, decoded and scaled as ours."""
    for image in images:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image.draft("RGB", (SIZE, SIZE))
        image.convert("RGB").crop((left, top, left + side, top + side)).resize((SIZE, SIZE))


def other_loaders(folder: Path) -> dict[str, Callable[[], None]]:
    """Those that are installed."""
    found: dict[str, Callable[[], None]] = {}
    if importlib.util.find_spec("webdataset"):
        import webdataset

        shards = str(folder / "tar" / f"{{0..{SHARDS - 1}}}.tar")

        def by_webdataset() -> None:
            samples = webdataset.WebDataset(shards, shardshuffle=False)
            squares(Image.open(io.BytesIO(sample["jpg"])) for sample in samples)

        found["webdataset: tar shards"] = by_webdataset
    if importlib.util.find_spec("datasets"):
        import datasets

        datasets.disable_progress_bars()
        rows = datasets.load_dataset(
            "parquet", data_files=str(folder / "images.parquet"), split="train", cache_dir=str(folder / "hf")
        ).cast_column("image", datasets.Image())
        found["datasets: parquet"] = lambda: squares(row["image"] for row in rows)
    return found


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """The address of a web server of Python's own, in another process."""
    command = ("-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--protocol", "HTTP/1.1")
    process = subprocess.Popen(
        [sys.executable, *command, "--directory", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        port = process.stdout.readline().split("port ")[1].split()[0]
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def addresses(folder: Path, root: str) -> Path:
    """A table of the address of each file."""
    files = sorted((folder / "files").rglob("*.jpg"))
    listing = folder / "addresses.csv"
    lines = (f"{root}/{file.relative_to(folder / 'files')}" for file in files)
    listing.write_text("\n".join(["path", *lines]) + "\n")
    return listing


def measure(folder: Path, images: int) -> dict[str, dict[str, int]]:
    sources = make_sources(folder, images)
    cache = SquareCache(folder / "squares", 1 << 30, settled=0)
    with web_server(folder / "files") as root:
        tasks: dict[str, Callable[[], None]] = {
            name: functools.partial(look, source) for name, source in sources.items()
        }
        tasks["local HTTP"] = functools.partial(look, str(addresses(folder, root)))
        tasks["cache"] = functools.partial(look, sources["folder"], cache)
        tasks |= other_loaders(folder)
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in tasks}
        for turn in range(1 + TURNS):  # the first one loads what is needed
            for name, task in tasks.items():
                began, computed = time.perf_counter(), time.process_time()
                task()
                if turn:
                    took[name].append((time.perf_counter() - began, time.process_time() - computed))
    return {
        name: {
            "images_per_second": round(images / min(clock for clock, _ in turns)),
            "per_cpu_second": round(images / min(cpu for _, cpu in turns)),
        }
        for name, turns in took.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(Path(temporary), options.images)
    load = round(os.getloadavg()[0], 1)
    write_results("pool_sources", {"images": options.images, "load_average": load, "sources": found})


if __name__ == "__main__":
    main()
