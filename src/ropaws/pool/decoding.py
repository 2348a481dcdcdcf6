"""Image files of any kind as squares of RGB pixels, or whole, and kept on disk to be decoded once.

Worker processes import this file; torch, which takes a second of each, is not loaded by it.
"""

import contextlib
import functools
import hashlib
import itertools
import os
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from ropaws.core.cores import own_cores
from ropaws.core.files import IMAGE_FILE, is_image_file, read_regular
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

Wanted = Literal["center", "whole", "both"]

DECODER = 2  # part of every key: raise it when read_image gives other pixels
WHOLE = "whole"  # part of the key of a whole image
KINDS = {"center": ("",), "whole": (WHOLE,), "both": ("", WHOLE)}  # entries by what is wanted
TAIL = struct.Struct(f"<d{KEY_BYTES}s")  # after the pixels: aspect, key of what they were decoded from
SHARDS = 64  # folders; each has its share of the limit and is counted on its own
RECOUNT = 32  # times that a shard is asked for room before it is counted again: others write to it too
UNUSED_SECONDS = 24 * 3600  # entries that were not used for so long make room for new ones
SETTLED = 2.0  # seconds in which a file can be changed twice and have the same time: clocks of disks are slow


class Found(NamedTuple):
    """What was read of an image."""

    square: NDArray[np.uint8]  # (size, size, 3) the central square, or the whole image if that was wanted
    key: bytes  # of the content that the pixels were decoded from
    whole: NDArray[np.uint8] | None = None  # (size, size, 3) where both were wanted
    aspect: float = 1.0  # of the whole image, where it was wanted


class SquareCache:
    """Squares by file, size and kind; any number of processes and runs may share a folder.

    A changed file has another key, as its times and its length are part of it. Entries are written beside and
    renamed, and carry a checksum: a torn or foreign one is decoded anew. When the limit is reached,
    entries that were not used for a day go; if there are none, nothing is added. (Dropping the oldest
    instead would drop, in a set that is larger than the cache, every entry before it is used again.)

    Args:
        folder: Where entries are.
        limit: Bytes of all of them at most.
        settled: Seconds since its last change after which a file is kept.
    """

    def __init__(self, folder: Path, limit: int, settled: float = SETTLED) -> None:
        self.folder = folder
        self.limit = limit
        self.settled = settled
        self._used: dict[str, int] = {}  # bytes in a shard, as last counted
        self._asked: dict[str, int] = {}  # times that room was asked for since then

    def get(self, path: Path, size: int, wanted: Wanted) -> Found | None:
        """What was kept of an image; None unless all that is wanted is there."""
        try:
            facts = path.stat()
        except OSError:
            return None
        entries = [self._read(self._place(path, facts, size, kind), size) for kind in KINDS[wanted]]
        first, last = entries[0], entries[-1]
        if first is None or last is None or first.key != last.key:
            return None
        return first if wanted != "both" else first._replace(whole=last.square, aspect=last.aspect)

    def put(self, path: Path, facts: os.stat_result, size: int, wanted: Wanted, found: Found) -> None:
        """Keep what was found in a file, if there is room. A disk that refuses costs the cache, not the run.

        facts: of the file, taken before it was read: if it has changed since, they fit it no more.
        """
        if facts.st_ctime > time.time() - self.settled:
            return
        for kind, pixels in zip(KINDS[wanted], (found.square, found.whole), strict=False):
            assert pixels is not None
            tail = TAIL.pack(found.aspect if kind == WHOLE else 1.0, found.key)
            self._write(self._place(path, facts, size, kind), pixels.tobytes() + tail)

    def _read(self, place: Path, size: int) -> Found | None:
        try:
            content = read_regular(place, IMAGE_FILE)
            os.utime(place)  # used just now
        except (OSError, ValueError):
            return None
        content, checksum = content[:-4], content[-4:]
        if len(content) != size * size * 3 + TAIL.size or checksum != _checksum(content):
            return None
        aspect, key = TAIL.unpack(content[-TAIL.size :])
        pixels = np.frombuffer(content, np.uint8, size * size * 3).reshape(size, size, 3)
        return Found(pixels, key, aspect=aspect)

    def _write(self, place: Path, content: bytes) -> None:
        # Not by write_atomically, which waits for the disk: a torn entry is recognized by its checksum.
        temporary = place.with_name(f".{place.name}.{secrets.token_hex(8)}.part")
        try:
            if self._has_room(place.parent, len(content) + 4):
                with temporary.open("xb") as file:  # exclusively: fails if anything is there, a link too
                    file.write(content + _checksum(content))
                temporary.replace(place)
                self._used[place.parent.name] += len(content) + 4
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _place(self, path: Path, facts: os.stat_result, size: int, kind: str) -> Path:
        name = os.fsencode(os.path.abspath(path))
        key = hashlib.blake2b(name, digest_size=20, person=f"{DECODER} {size}{kind}".encode())
        # The time of the last change besides that of writing: a copy can have the latter of its original.
        key.update(f"\0{facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_size}".encode())
        digest = key.hexdigest()
        return self.folder / f"{int(digest[:4], 16) % SHARDS:02d}" / digest

    def _has_room(self, shard: Path, wanted: int) -> bool:
        share = self.limit // SHARDS
        if self._asked.get(shard.name, RECOUNT) >= RECOUNT:
            shard.mkdir(parents=True, exist_ok=True)
            self._used[shard.name], self._asked[shard.name] = _make_room(shard, share - wanted), 0
        self._asked[shard.name] += 1
        return self._used[shard.name] + wanted <= share


def _make_room(shard: Path, most: int) -> int:
    """Bytes in a shard, after dropping unused entries as far as needed, the longest unused first."""
    entries = []
    with os.scandir(shard) as found:
        for entry in found:
            try:
                facts = entry.stat()
                entries.append((facts.st_mtime, facts.st_size, entry.path))
            except OSError:  # another process has just dropped it
                continue
    used = sum(size for _, size, _ in entries)
    unused_since = time.time() - UNUSED_SECONDS
    for when, size, path in sorted(entries):
        if used <= most or when > unused_since:
            break
        Path(path).unlink(missing_ok=True)
        used -= size
    return used


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


Crop = Literal["whole", "center"]

GAP = 3  # times the target that a side may have before it is reduced by a whole factor, which is faster


class Whole(NamedTuple):
    """A whole image, squeezed to a square. The image of a square is its central square, bit by bit."""

    pixels: NDArray[np.uint8]  # (size, size, 3)
    aspect: float  # width / height of the image


def squeeze(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """All of an RGB image, each side resized on its own with an antialiased filter.   ->  (size, size, 3)

    By torch, which is faster than Pillow at this.
    """
    import torch
    import torch.nn.functional as F

    factors = tuple(max(1, side // (size * GAP)) for side in image.size)
    if factors != (1, 1):
        image = image.reduce(factors)  # type: ignore[arg-type]
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]  # channels of a pixel side by side
    squeezed = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    found: NDArray[np.uint8] = squeezed[0].permute(1, 2, 0).contiguous().numpy()
    return found


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
