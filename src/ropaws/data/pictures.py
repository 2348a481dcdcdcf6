"""Picture files of any kind as squares of RGB pixels."""

import functools
import itertools
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from ropaws.data.cache import SquareCache
from ropaws.data.rows import ArrayRow, DatasetRow
from ropaws.data.workers import starting_workers

Picture = Path | ArrayRow | DatasetRow

EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"))
# A picture of more pixels than this is taken for a decompression bomb and not decoded.
MOST_PIXELS = 200_000_000
CHUNK = 32  # pictures a worker takes at a time

P = TypeVar("P")
R = TypeVar("R")


class UnreadableError(Exception):
    """A picture that cannot be decoded, and why."""


def read_square(picture: Picture, size: int, cache: SquareCache | None = None) -> NDArray[np.uint8]:
    """The central square of a picture, upright and in RGB.   ->  (size, size, 3)"""
    if cache is None or not isinstance(picture, Path):
        return _decode(picture, size)
    square = cache.get(picture, size)
    if square is None:
        square = _decode(picture, size)
        cache.put(picture, size, square)
    return square


def _decode(picture: Picture, size: int) -> NDArray[np.uint8]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of odd metadata; the pixels are what counts
            with open_picture(picture) as opened:
                # A JPEG is decoded at the smallest of 1, 1/2, 1/4, 1/8 that still covers the target.
                opened.draft("RGB", (size, size))
                return np.asarray(square_of(opened, size))
    except UnreadableError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
        raise UnreadableError(str(error).splitlines()[0] if str(error) else type(error).__name__) from None


def open_picture(picture: Picture) -> Image.Image:
    """Opened, not decoded yet; nothing of an absurd size."""
    opened = Image.open(picture) if isinstance(picture, Path) else picture.open()
    if opened.width * opened.height > MOST_PIXELS:
        opened.close()
        raise UnreadableError(f"{opened.width} x {opened.height} pixels are more than {MOST_PIXELS:,}")
    return opened


def square_of(picture: Image.Image, size: int) -> Image.Image:
    """The central square, upright, in RGB and of that size."""
    # Asked first: Pillow copies the picture even where there is nothing to turn.
    if picture.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        picture = ImageOps.exif_transpose(picture)
    picture = to_rgb(picture)
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    square = picture.crop((left, top, left + side, top + side))
    return square.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)


def to_rgb(picture: Image.Image) -> Image.Image:
    """Any mode as RGB: 16 bits are scaled to 8, transparency shows white, palettes are looked up."""
    if picture.mode.startswith("I") or picture.mode == "F":
        values = np.asarray(picture, dtype=np.float64)
        # 16-bit files come as I;16 or as I, whose range is that of the file.
        scale = 257 if picture.mode != "F" and values.max(initial=0) > 255 else 1
        picture = Image.fromarray((values / scale).clip(0, 255).round().astype(np.uint8))
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def read_squares(
    pictures: Sequence[Picture], size: int, *, cache: SquareCache | None = None, workers: int | None = None
) -> Iterator[NDArray[np.uint8] | UnreadableError]:
    """All pictures in order; an UnreadableError in place of a bad one.

    Files are decoded in worker processes; arrays are in memory already and stay in this one.
    """
    read = functools.partial(read_or_error, size=size, cache=cache)
    for in_memory, group in itertools.groupby(pictures, lambda picture: isinstance(picture, ArrayRow)):
        together = list(group)
        yield from map(read, together) if in_memory else in_workers(read, together, workers=workers)


def read_or_error(
    picture: Picture, size: int, cache: SquareCache | None = None
) -> NDArray[np.uint8] | UnreadableError:
    try:
        return read_square(picture, size, cache)
    except UnreadableError as error:
        return error


def in_workers(function: Callable[[P], R], items: Sequence[P], *, workers: int | None = None) -> Iterator[R]:
    """function(item) for every item, in order, in worker processes.

    Only a few chunks are under way at a time: memory does not grow with the number of pictures.
    """
    workers = (os.cpu_count() or 1) if workers is None else workers
    chunks = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    if workers < 2 or len(chunks) < 2:
        yield from map(function, items)
        return
    # spawn: a forked child of a process with threads may hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        pending: deque[Future[list[R]]] = deque()
        for chunk in chunks:
            with starting_workers():  # the pool starts one with a task when it has too few
                pending.append(pool.submit(_apply, function, chunk))
            if len(pending) > 4 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


def _apply(function: Callable[[P], R], items: Sequence[P]) -> list[R]:
    return [function(item) for item in items]


def is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in EXTENSIONS


def walk_pictures(folder: Path) -> Iterable[Path]:
    """Picture files below a folder, sorted; links are followed, but no folder is entered twice."""
    found: list[Path] = []
    entered: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in entered:  # a link back to where we have been
            folders.clear()
            continue
        entered.add(real)
        found += [Path(place, name) for name in files if is_picture(name)]
    return sorted(found)
