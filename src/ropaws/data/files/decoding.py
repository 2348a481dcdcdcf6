"""Image files of any kind as squares of RGB pixels."""

import functools
import hashlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from ropaws.data.files.cache import SquareCache
from ropaws.data.files.rows import ArrayRow
from ropaws.data.files.saved_datasets import DatasetRow
from ropaws.data.files.whole import Whole, squeeze
from ropaws.data.files.worker_pool import map_in_workers
from ropaws.limits import IMAGE_FILE, PIXELS
from ropaws.processes.cores import own_cores
from ropaws.runs.opening import check_regular, open_regular

ImageRef = Path | ArrayRow | DatasetRow

EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"))
DRAFTED = 3  # times as many pixels as others may an image have that is decoded at a smaller size
STRIP = 1 << 22  # pixels that are converted at a time
CHUNK = 32  # images a worker takes at a time

P = TypeVar("P")
R = TypeVar("R")


class UnreadableError(Exception):
    """An image that cannot be decoded, and why."""


def read_square(image: ImageRef, size: int, cache: SquareCache | None = None) -> NDArray[np.uint8]:
    """The central square of an image, upright and in RGB.   ->  (size, size, 3)"""
    if cache is None or not isinstance(image, Path):
        return np.asarray(_decode(image, size, square_of))
    square = cache.get(image, size)
    if square is None:
        square = np.asarray(_decode(image, size, square_of))
        cache.put(image, size, square)
    return square


def read_whole(image: ImageRef, size: int, cache: SquareCache | None = None) -> Whole:
    """All of an image, upright and in RGB, squeezed to a square."""
    if cache is None or not isinstance(image, Path):
        return _decode(image, size, whole_of)
    whole = cache.get_whole(image, size)
    if whole is None:
        whole = _decode(image, size, whole_of)
        cache.put_whole(image, size, whole)
    return whole


def _decode(image: ImageRef, size: int, make: Callable[[Image.Image, int], R]) -> R:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of odd metadata; the pixels are what counts
            with open_image(image, size) as opened:
                return make(opened, size)
    except UnreadableError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
        raise UnreadableError(str(error).splitlines()[0] if str(error) else type(error).__name__) from None


def open_image(image: ImageRef, size: int | None = None) -> Image.Image:
    """Opened, not decoded yet; nothing of an absurd size.

    size: pixels per side that are wanted, where less than the whole image will do.
    """
    if isinstance(image, Path):
        check_regular(image, IMAGE_FILE)
    opened: Image.Image = Image.open(image) if isinstance(image, Path) else image.open()
    try:
        what, pixels = f"an image of {opened.width} x {opened.height}", opened.width * opened.height
        most = PIXELS.value
        if size is not None and opened.draft("RGB", (size, size)) is not None:
            # A JPEG, which is decoded at the smallest of 1, 1/2, 1/4, 1/8 that still covers the target.
            PIXELS.check(opened.width * opened.height, f"{what}, decoded,")
            most *= DRAFTED
        PIXELS.check(pixels, what, most=most)
    except BaseException:
        opened.close()
        raise
    return opened


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
        scale = _to_eight_bits(image)
        image = image if box is None else image.crop(box)
        parts = [(values * scale).clip(0, 255).round().astype(np.uint8) for values in _strips(image)]
        image = Image.fromarray(np.concatenate(parts))
    elif box is not None:
        image = image.crop(box)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_eight_bits(image: Image.Image) -> float:
    """What the values of a gray image of 16 bits or of floats are multiplied by to be 0 to 255."""
    ends = np.array([(values.min(), values.max()) for values in _strips(image)])
    lowest, highest = ends.min(), ends.max()  # NaN if any value is
    if image.mode == "F":
        if not np.isfinite(lowest + highest):
            raise ValueError("its values are not finite")
        return 255 if lowest >= 0 and highest <= 1 else 1
    return 1 / 257 if highest > 255 else 1  # 16-bit files come as I;16 or as I, whose range is the file's


def _strips(image: Image.Image) -> Iterator[NDArray[np.float64]]:
    """The values of an image, some rows at a time: as a whole they would take eight bytes a pixel."""
    rows = max(1, STRIP // max(1, image.width))
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        yield np.asarray(strip, dtype=np.float64)


KEY_BYTES = 16  # of content_key


def content_key(image: ImageRef) -> bytes:
    """A key by the content of an image: the bytes of a file, the pixels of a row. Zeros if it is gone."""
    state = hashlib.blake2b(digest_size=KEY_BYTES, person=b"file" if isinstance(image, Path) else b"pixels")
    try:
        if isinstance(image, Path):
            with open_regular(image, IMAGE_FILE) as file:
                while part := file.read(1 << 20):
                    state.update(part)
            return state.digest()
        with open_image(image) as opened:
            state.update(f"{opened.mode} {opened.size}".encode() + opened.tobytes())
            return state.digest()
    except Exception:  # a file that is gone, a damaged row: it is listed when its pixels are read
        return bytes(KEY_BYTES)


Wanted = Literal["center", "whole", "both"]


class Found(NamedTuple):
    """What was read of an image."""

    square: NDArray[np.uint8]  # (size, size, 3) the central square, or the whole image if that was wanted
    whole: NDArray[np.uint8] | None = None  # (size, size, 3) where both were wanted
    aspect: float = 1.0  # of the whole image


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
        if wanted == "center":
            return Found(read_square(image, size, cache))
        if wanted == "whole":
            pixels, aspect = read_whole(image, size, cache)
            return Found(pixels, aspect=aspect)
        return _read_both(image, size, cache)
    except UnreadableError as error:
        return error


def _read_both(image: ImageRef, size: int, cache: SquareCache | None) -> Found:
    """Decoded once."""
    if cache is not None and isinstance(image, Path):
        square, whole = cache.get(image, size), cache.get_whole(image, size)
        if square is not None and whole is not None:
            return Found(square, *whole)
    found = _decode(image, size, _both_of)
    if cache is not None and isinstance(image, Path) and found.whole is not None:
        cache.put(image, size, found.square)
        cache.put_whole(image, size, Whole(found.whole, found.aspect))
    return found


def _both_of(image: Image.Image, size: int) -> Found:
    image = upright(image)
    whole = whole_of(image, size)
    square = whole.pixels if image.width == image.height else np.asarray(square_of(image, size))
    return Found(square, *whole)


class ReadRequest(NamedTuple):
    """Images to read at once."""

    files: Sequence[ImageRef]
    size: int
    wanted: Wanted = "center"


class ReadBatch(NamedTuple):
    """Images that were read at once; rows of unreadable ones are undefined."""

    squares: NDArray[np.uint8]  # (k, size, size, 3) central squares, or whole images if those were wanted
    unreadable: dict[int, str]  # row: reason
    wholes: NDArray[np.uint8] | None = None  # (k, size, size, 3) where both were wanted
    aspects: NDArray[np.float32] | None = None  # (k,) of the whole images, where they were wanted


def read_batch(request: ReadRequest, cache: SquareCache | None = None) -> ReadBatch:
    """Read images in this process."""
    shape = (len(request.files), request.size, request.size, 3)
    squares = np.empty(shape, np.uint8)
    wholes = np.empty(shape, np.uint8) if request.wanted == "both" else None
    aspects = None if request.wanted == "center" else np.ones(len(request.files), np.float32)
    unreadable: dict[int, str] = {}
    for row, file in enumerate(request.files):
        found = read_or_error(file, request.wanted, request.size, cache)
        if isinstance(found, UnreadableError):
            unreadable[row] = str(found)
            continue
        squares[row] = found.square
        if wholes is not None and found.whole is not None:
            wholes[row] = found.whole
        if aspects is not None:
            aspects[row] = found.aspect
    return ReadBatch(squares, unreadable, wholes, aspects)


def in_workers(function: Callable[[P], R], items: Sequence[P], *, workers: int | None = None) -> Iterator[R]:
    """function(item) for every item, in order, in worker processes.

    Only a few chunks are under way at a time: memory does not grow with the number of images.
    """
    workers = own_cores() if workers is None else workers
    if workers < 2 or len(items) <= CHUNK:
        yield from map(function, items)
        return
    chunks = (items[start : start + CHUNK] for start in range(0, len(items), CHUNK))
    for results in map_in_workers(functools.partial(_apply, function), chunks, workers=workers):
        yield from results


def _apply(function: Callable[[P], R], items: Sequence[P]) -> list[R]:
    return [function(item) for item in items]


def is_image_file(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in EXTENSIONS


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
