"""An image as it is stored, read once: its key is the digest of the very bytes that are decoded.

Whoever looks at an image goes through here, so the formats, the limits and the key are the same everywhere.
"""

import contextlib
import functools
import hashlib
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ropaws.core.files import IMAGE_FILE, PIXELS, check_regular, open_regular
from ropaws.pool.array_files import ArrayRow
from ropaws.pool.remote import RemoteImage
from ropaws.pool.shards import DatasetRow, ParquetRow, TarMember


class Encoded(NamedTuple):
    """An image in memory: a file, or its pixels."""

    name: str
    data: bytes | NDArray[np.uint8]  # pixels (h, w) or (h, w, 3)

    def __str__(self) -> str:
        return self.name


ImageRef = Path | ArrayRow | DatasetRow | TarMember | ParquetRow | RemoteImage | Encoded

# As Pillow names them: AVIF where it was built with it, HEIF with the extra `heic`. Pillow knows dozens
# more: some start programs (PostScript), some take memory by the gigabyte before anyone can ask for the size
# (ICO, FITS).
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "HEIF")
BRANDS = dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"), "HEIF")
BRANDS |= dict.fromkeys((b"avif", b"avis"), "AVIF")
REMEDY = "needs pip install 'ropaws[heic]'"
SIGNATURE = 16  # bytes from which Pillow's plug-ins recognize their files
DRAFTED = 3  # times as many pixels as others may an image have that is decoded at a smaller size
KEY_BYTES = 16


class Unreadable(NamedTuple):
    """An image file that could not be read."""

    path: str
    reason: str


class UnreadableError(Exception):
    """An image that cannot be decoded, and why."""


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Whatever goes wrong with an image in here is an UnreadableError of one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of odd metadata; the pixels are what counts
            yield
    except UnreadableError:
        raise
    except FileNotFoundError:
        raise UnreadableError("the file is not there any more") from None
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
        raise UnreadableError(str(error).splitlines()[0] if str(error) else type(error).__name__) from None


@dataclass(frozen=True)
class Content:
    """All that the pixels of an image are decoded from."""

    data: bytes | NDArray[np.uint8]  # an encoded image, or pixels (h, w) or (h, w, 3)
    facts: os.stat_result | None = None  # of a file, taken before it was read

    @functools.cached_property
    def key(self) -> bytes:
        """Key of the content, the same wherever it is stored.   KEY_BYTES"""
        if isinstance(self.data, bytes):
            return hashlib.blake2b(self.data, digest_size=KEY_BYTES, person=b"file").digest()
        state = hashlib.blake2b(f"{self.data.shape}".encode(), digest_size=KEY_BYTES, person=b"pixels")
        state.update(np.ascontiguousarray(self.data).data)
        return state.digest()


def read_content(image: ImageRef) -> Content:
    """Read an image whole.

    Raises:
        OSError: A file is not there, not a regular one, or was changed while it was read.
        ValueError: A file is too large, or a row is not there or not an image.
    """
    if isinstance(image, ArrayRow):
        return Content(image.pixels())
    if isinstance(image, DatasetRow | TarMember | ParquetRow | RemoteImage):
        return Content(image.encoded())
    if isinstance(image, Encoded):
        if isinstance(image.data, bytes):
            IMAGE_FILE.check(len(image.data), image.name)
        return Content(image.data)
    with open_regular(image, IMAGE_FILE) as file:
        before = os.fstat(file.fileno())
        data = file.read()
        after = os.fstat(file.fileno())
    if not len(data) == before.st_size == after.st_size or before.st_mtime_ns != after.st_mtime_ns:
        raise OSError(f"{image} was changed while it was read; try again when it is complete")
    return Content(data, before)


def content_key(image: ImageRef) -> bytes | None:
    """The key of an image; None if it could not be read whole. Such an image is in no cache."""
    try:
        return read_content(image).key
    except Exception:  # a file that is gone, a damaged row: it is listed when its pixels are read
        return None


def named_keys(names: Sequence[object], keys: NDArray[np.uint8]) -> list[str]:
    """What each image is called and what is in it, for people.   keys (n, KEY_BYTES)"""
    return [f"{name} (content {key.tobytes().hex()[:16]})" for name, key in zip(names, keys, strict=True)]


def open_image(content: Content, size: int | None = None) -> Image.Image:
    """Opened, not decoded yet; nothing of an absurd size.

    size: pixels per side that are wanted, where less than the whole image will do.

    Raises:
        UnreadableError: It is not an image of a format that is read.
        ValueError: It has too many pixels.
    """
    opened = _identified(content)
    what, pixels = f"an image of {opened.width} x {opened.height}", opened.width * opened.height
    most = PIXELS.value
    if size is not None and opened.draft("RGB", (size, size)) is not None:
        # A JPEG, which is decoded at the smallest of 1, 1/2, 1/4, 1/8 that still covers the target.
        PIXELS.check(opened.width * opened.height, f"{what}, decoded,")
        most *= DRAFTED
    PIXELS.check(pixels, what, most=most)
    return opened


def image_size(image: ImageRef | Content) -> tuple[int, int]:
    """Width and height as they are stored. Of a file the header alone is read.

    Raises:
        UnreadableError: It is not an image of a format that is read.
        OSError, ValueError: See read_content.
    """
    if isinstance(image, Path):
        check_regular(image, IMAGE_FILE)
        with _identified(image) as opened:
            return opened.size
    return _identified(image if isinstance(image, Content) else read_content(image)).size


@functools.cache
def formats_read() -> tuple[str, ...]:
    """List those of FORMATS that this Pillow has."""
    Image.init()  # registers its own plug-ins
    with contextlib.suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _identified(source: Content | Path) -> Image.Image:
    data = source.data if isinstance(source, Content) else source
    if isinstance(data, np.ndarray):
        return Image.fromarray(data)
    try:
        return Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=formats_read())
    except UnidentifiedImageError:
        raise UnreadableError(_refusal(_first_bytes(data))) from None


def _first_bytes(source: bytes | Path) -> bytes:
    if isinstance(source, bytes):
        return source[:SIGNATURE]
    with open_regular(source, IMAGE_FILE) as file:
        return file.read(SIGNATURE)


def _refusal(start: bytes) -> str:
    """What a file is that was not opened, by its first bytes, and what is opened."""
    read = formats_read()
    found = [name for name in Image.ID if _accepts(name, start)]
    damaged = next((name for name in found if name in read), None)
    if damaged is not None:
        return f"a damaged {damaged} file"
    brand = BRANDS.get(start[8:12]) if start[4:8] == b"ftyp" else None
    if brand is not None and brand not in read:
        return f"a file of format {brand}, which {REMEDY}"
    what = f"a file of format {found[0]}" if found else "not an image"
    return f"{what}; the formats that are read are {', '.join(read)}"


def remedies(reasons: Iterable[str]) -> str:
    """How many unreadable images need an extra that is not installed, as the end of a line about all."""
    count = sum(REMEDY in reason for reason in reasons)
    return f"; {count:,} of them {REMEDY.replace('needs', 'need') if count > 1 else REMEDY}" if count else ""


def _accepts(name: str, start: bytes) -> bool:
    """Does a file of this format begin so? Nothing of the plug-in runs but its comparison."""
    accept = Image.OPEN[name][1]
    with contextlib.suppress(Exception):  # some need more bytes than there are
        return accept is not None and accept(start) is True
    return False
