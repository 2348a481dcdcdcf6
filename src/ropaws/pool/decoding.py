"""Image files of any kind as squares of RGB pixels."""

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from ropaws.core.cores import own_cores
from ropaws.core.files import is_image_file
from ropaws.core.worker_pool import map_in_workers
from ropaws.pool.array_files import ArrayRow
from ropaws.pool.content import (
    KEY_BYTES,
    Content,
    ImageRef,
    UnreadableError,
    one_line_errors,
    open_image,
    read_content,
)
from ropaws.pool.remote import RemoteImage
from ropaws.pool.square_cache import Found, SquareCache, Wanted
from ropaws.pool.whole_images import Whole, squeeze

# Of all formats that may be read: a photograph that cannot be read here is listed, never passed over.
WHITE = 65535  # of gray images of 16 bits, which Pillow also opens as 32 bits
STRIP = 1 << 22  # pixels that are converted at a time
CHUNK = 32  # images a worker takes at a time
FIRST_SECONDS = 0.3  # of work, done and left, up to which no workers are started: they take about that
AT_ONCE = 16  # images behind addresses that a worker waits for at a time

P = TypeVar("P")
R = TypeVar("R")


def read_image(image: ImageRef, size: int, wanted: Wanted, cache: SquareCache | None = None) -> Found:
    """The pixels of an image, upright and in RGB, and the key of the very bytes that they come from.

    Raises:
        UnreadableError: It cannot be read or decoded.
    """
    kept = cache.get(image, size, wanted) if cache is not None and isinstance(image, Path) else None
    if kept is not None:
        return kept
    with one_line_errors():
        content = read_content(image)
    found = decode_content(content, size, wanted)
    if cache is not None and isinstance(image, Path) and content.facts is not None:
        cache.put(image, content.facts, size, wanted, found)
    return found


def read_square(image: ImageRef, size: int) -> NDArray[np.uint8]:
    """The central square of an image; see read_image.   ->  (size, size, 3)"""
    return read_image(image, size, "center").square


def decode_content(content: Content, size: int, wanted: Wanted) -> Found:
    """Decoded once, whatever is wanted.

    Raises:
        UnreadableError: It cannot be decoded.
    """
    with one_line_errors(), open_image(content, size) as opened:
        if wanted == "center":
            return Found(np.asarray(square_of(opened, size)), content.key)
        image = upright(opened)
        whole = whole_of(image, size)
        if wanted == "whole":
            return Found(whole.pixels, content.key, aspect=whole.aspect)
        square = whole.pixels if image.width == image.height else np.asarray(square_of(image, size))
        return Found(square, content.key, *whole)


def decode_whole(image: ImageRef, size: int | None = None) -> Image.Image:
    """A whole image, upright and in RGB; with size, a large JPEG may be smaller, as long as it covers that.

    Raises:
        UnreadableError: It cannot be read or decoded.
    """
    with one_line_errors(), open_image(read_content(image), size) as opened:
        decoded = to_rgb(upright(opened))
        decoded.load()  # before the file is closed: nothing may have asked for its pixels yet
        return decoded


def upright(image: Image.Image) -> Image.Image:
    """Turned as its metadata say."""
    # Asked first: Pillow copies the image even where there is nothing to turn.
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        return ImageOps.exif_transpose(image)
    return image


def square_of(image: Image.Image, size: int) -> Image.Image:
    """The central square, upright, in RGB and of that size."""
    image = upright(image)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = to_rgb(image, (left, top, left + side, top + side))
    return square.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)


def whole_of(image: Image.Image, size: int) -> Whole:
    """All of the image, upright, in RGB, squeezed to a square of that size."""
    image = upright(image)
    if image.width == image.height:
        return Whole(np.asarray(square_of(image, size)), 1.0)
    return Whole(squeeze(to_rgb(image), size), image.width / image.height)


def to_rgb(image: Image.Image, box: tuple[int, int, int, int] | None = None) -> Image.Image:
    """Any mode as RGB: 16 bits are scaled to 8, transparency shows white, palettes are looked up.

    box: the part that is wanted, left, top, right and bottom.
    """
    if image.mode.startswith("I") or image.mode == "F":
        white = _white(image)
        image = image if box is None else image.crop(box)
        parts = [(values * (255 / white)).round().astype(np.uint8) for values in _strips(image)]
        image = Image.fromarray(np.concatenate(parts))
    elif box is not None:
        image = image.crop(box)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image if image.mode == "RGB" else image.convert("RGB")


def _white(image: Image.Image) -> int:
    """The value that is white in a gray image of more than 8 bits: by its mode, whatever its values are.

    Raises:
        ValueError: Its values are beyond black and white, which are a guess for 32 bits and floats.
    """
    if image.mode.startswith("I;16"):
        return WHITE
    white, kind = (1, "floating-point numbers") if image.mode == "F" else (WHITE, "integers of 32 bits")
    ends = np.array([(values.min(), values.max()) for values in _strips(image)])
    lowest, highest = ends.min(), ends.max()  # NaN if any value is
    if not 0 <= lowest <= highest <= white:
        raise ValueError(
            f"its values are {kind}, where 0 is black and {white} is white, but they go from {lowest:g} to"
            f" {highest:g}; scale them, or save it with 8 or 16 bits"
        )
    return white


def _strips(image: Image.Image) -> Iterator[NDArray[np.float64]]:
    """The values of an image, some rows at a time: as a whole they would take eight bytes a pixel."""
    rows = max(1, STRIP // max(1, image.width))
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        yield np.asarray(strip, dtype=np.float64)


def read_squares(
    images: Sequence[ImageRef], size: int, *, cache: SquareCache | None = None, workers: int | None = None
) -> Iterator[NDArray[np.uint8] | UnreadableError]:
    """The central squares of all images in order; an UnreadableError in place of a bad one."""
    for found in read_images(images, size, "center", cache=cache, workers=workers):
        yield found if isinstance(found, UnreadableError) else found.square


def read_images(
    images: Sequence[ImageRef],
    size: int,
    wanted: Wanted,
    *,
    cache: SquareCache | None = None,
    workers: int | None = None,
) -> Iterator[Found | UnreadableError]:
    """All images in order; an UnreadableError in place of a bad one.

    Files are decoded in worker processes; arrays are in memory already and stay in this one.
    """
    read = functools.partial(read_or_error, wanted=wanted, size=size, cache=cache)
    for in_memory, group in itertools.groupby(images, lambda image: isinstance(image, ArrayRow)):
        together = list(group)
        yield from map(read, together) if in_memory else in_workers(read, together, workers=workers)


def read_or_error(
    image: ImageRef, wanted: Wanted, size: int, cache: SquareCache | None = None
) -> Found | UnreadableError:
    try:
        return read_image(image, size, wanted, cache)
    except UnreadableError as error:
        return error


class ReadRequest(NamedTuple):
    """Images to read at once."""

    files: Sequence[ImageRef]
    size: int
    wanted: Wanted = "center"


class ReadBatch(NamedTuple):
    """Images that were read at once; rows of unreadable ones are undefined."""

    squares: NDArray[np.uint8]  # (k, size, size, 3) central squares, or whole images if those were wanted
    keys: NDArray[np.uint8]  # (k, KEY_BYTES) of the content that the pixels were decoded from
    unreadable: dict[int, str]  # row: reason
    wholes: NDArray[np.uint8] | None = None  # (k, size, size, 3) where both were wanted
    aspects: NDArray[np.float32] | None = None  # (k,) of the whole images, where they were wanted


def read_batch(request: ReadRequest, cache: SquareCache | None = None) -> ReadBatch:
    """Read images in this process."""
    shape = (len(request.files), request.size, request.size, 3)
    squares = np.empty(shape, np.uint8)
    keys = np.zeros((len(request.files), KEY_BYTES), np.uint8)
    wholes = np.empty(shape, np.uint8) if request.wanted == "both" else None
    aspects = None if request.wanted == "center" else np.ones(len(request.files), np.float32)
    unreadable: dict[int, str] = {}
    read = functools.partial(read_or_error, wanted=request.wanted, size=request.size, cache=cache)
    for row, found in enumerate(_read_each(read, request.files)):
        if isinstance(found, UnreadableError):
            unreadable[row] = str(found)
            continue
        squares[row] = found.square
        keys[row] = np.frombuffer(found.key, np.uint8)
        if wholes is not None and found.whole is not None:
            wholes[row] = found.whole
        if aspects is not None:
            aspects[row] = found.aspect
    return ReadBatch(squares, keys, unreadable, wholes, aspects)


def in_workers(function: Callable[[P], R], items: Sequence[P], *, workers: int | None = None) -> Iterator[R]:
    """function(item) for every item, in order, in worker processes once it takes longer than to start them.

    Only a few chunks are under way at a time: memory does not grow with the number of images.
    """
    workers = own_cores() if workers is None else workers
    done, seconds = 0, 0.0
    step = CHUNK if any(isinstance(item, RemoteImage) for item in items) else 1
    while done < len(items) and (
        workers < 2
        or len(items) - done <= CHUNK
        or seconds < FIRST_SECONDS
        or seconds / done * (len(items) - done) < FIRST_SECONDS
    ):
        begun = time.monotonic()
        results = list(_read_each(function, items[done : done + step]))
        seconds += time.monotonic() - begun
        done += len(results)
        yield from results
    chunks = (items[start : start + CHUNK] for start in range(done, len(items), CHUNK))
    for results in map_in_workers(functools.partial(_apply, function), chunks, workers=workers):
        yield from results


def _apply(function: Callable[[P], R], items: Sequence[P]) -> list[R]:
    return list(_read_each(function, items))


def _read_each(function: Callable[[P], R], items: Sequence[P]) -> Iterable[R]:
    """In order. Images behind addresses are waited for together."""
    if not any(isinstance(item, RemoteImage) for item in items):
        return map(function, items)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(function, items))


def walk_images(folder: Path) -> Iterable[Path]:
    """Image files below a folder, sorted; links are followed, but no folder is entered twice."""
    found: list[Path] = []
    entered: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in entered:  # a link back to where we have been
            folders.clear()
            continue
        entered.add(real)
        found += [Path(place, name) for name in files if is_image_file(name)]
    return sorted(found)
