"""The images that are looked at: opened by number, as thumbnails that are made once, never by a path."""

import hashlib
import io
import threading
from collections.abc import Sequence
from pathlib import Path

from PIL import ExifTags, Image

from ropaws.core.files import make_folder, refuse_link, write_atomically
from ropaws.pool.content import Encoded as InMemory
from ropaws.pool.content import (
    ImageRef,
    UnreadableError,
    image_size,
    one_line_errors,
    open_image,
    read_content,
)
from ropaws.pool.decoding import decode_whole
from ropaws.pool.remote import address_of

SIDE, FULL_SIDE = 160, 1024  # pixels of a thumbnail and of the large view, at most
LOSSLESS = 40  # pixels up to which an image is shown as it is, as a PNG


def open_shown(image: ImageRef) -> Image.Image:
    """An image as it is shown: upright, in RGB.

    Raises:
        UnreadableError: It has gone, or cannot be decoded any more.
    """
    return decode_whole(image, FULL_SIDE)


def shown_size(image: ImageRef) -> tuple[int, int]:
    """Width and height, upright. As open_shown."""
    with one_line_errors():
        content = read_content(image)
        width, height = image_size(content)
        with open_image(content, SIDE) as opened:
            lies = opened.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
    return (height, width) if lies else (width, height)


def version_of(image: ImageRef) -> str:
    """Another text when the image may have changed. As open_shown."""
    if isinstance(image, InMemory):
        return read_content(image).key.hex()
    place = Path(image if isinstance(image, Path) else image[0])
    if address_of(place):  # to ask a server each time would take too long
        return str(image)
    try:
        facts = place.stat()
    except OSError:
        raise UnreadableError("the file is not there any more") from None
    return f"{facts.st_mtime_ns} {facts.st_size}"


class Encoded:
    """An image as a browser gets it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.media_type = "image/png" if data.startswith(b"\x89PNG") else "image/jpeg"


def encode(image: Image.Image, side: int) -> Encoded:
    """At most so many pixels wide and high; decoded and encoded anew, so nothing else in a file gets out."""
    image = image.copy()
    image.thumbnail((side, side), reducing_gap=3.0)
    buffer = io.BytesIO()
    if max(image.size) <= LOSSLESS:
        image.save(buffer, "PNG")
    else:
        image.save(buffer, "JPEG", quality=88)
    return Encoded(buffer.getvalue())


class Thumbnails:
    """Small versions of images, kept in a folder.

    Args:
        images: The images.
        folder: Where they are kept; None keeps none.
    """

    def __init__(self, images: Sequence[ImageRef], folder: Path | None) -> None:
        self.images = images
        self.folder = folder
        self._making = threading.Lock()

    def get(self, number: int) -> Encoded:
        """Raises UnreadableError for an image that has gone, also if a thumbnail was made before."""
        image = self.images[number]
        version = version_of(image)
        key = f"{image}\0{version}\0{SIDE}"
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        place = None if self.folder is None else self.folder / digest[:2] / digest
        if place is not None and place.is_file() and not place.is_symlink():
            return Encoded(place.read_bytes())
        made = encode(open_shown(image), SIDE)
        if place is not None and version_of(image) == version:  # not replaced in the meantime
            self._keep(place, made.data)
        return made

    def _keep(self, place: Path, data: bytes) -> None:
        """A disk that is full costs the cache, not the page."""
        try:
            with self._making:
                refuse_link(place.parent.parent)
                make_folder(place.parent)
            write_atomically(place, lambda temporary: temporary.write_bytes(data))
        except OSError:
            self.folder = None
