"""Images per second from every kind of source, against the loaders of webdataset and datasets.

python benchmarks/pool_sources.py [--images 2000]     writes results/pool_sources.json

The same JPEGs of 256 x 192 in a folder, tar shards, parquet (Hugging Face's layout), a zip file, behind
fsspec's memory and a local web server. Each is listed, decoded and scaled to squares of 224 in this
process, in turns, so that other load hits all alike. `datasets` and `webdataset` (where they are installed)
read the same parquet and tar shards, decode with Pillow and scale the same squares by Pillow. "cache" is
the second look at the folder, from the memory-mapped cache of decoded squares.
"""

import argparse
import functools
import http.server
import importlib.util
import io
import statistics
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
from many_files import write_images
from PIL import Image
from timing import interleaved, write_results

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


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A web server that does not write a line for each image."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass


def measure(folder: Path, images: int) -> dict[str, float]:
    sources = make_sources(folder, images)
    handler = functools.partial(Quiet, directory=str(folder / "files"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    listing = folder / "addresses.csv"
    files = sorted((folder / "files").rglob("*.jpg"))
    lines = (f"{address}/{file.relative_to(folder / 'files')}" for file in files)
    listing.write_text("\n".join(["path", *lines]) + "\n")
    cache = SquareCache(folder / "squares", 1 << 30, settled=0)
    tasks = {name: functools.partial(look, source) for name, source in sources.items()}
    tasks["local HTTP"] = functools.partial(look, str(listing))
    tasks["cache"] = functools.partial(look, sources["folder"], cache)
    seconds = interleaved({**tasks, **other_loaders(folder)}, TURNS)
    server.shutdown()
    return {name: round(images / statistics.median(took)) for name, took in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(Path(temporary), options.images)
    write_results("pool_sources", {"images": options.images, "images_per_second": found})


if __name__ == "__main__":
    main()
