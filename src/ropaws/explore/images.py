"""The images that are looked at: opened by number, as thumbnails that are made once, never by a path."""

import functools
import hashlib
import io
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image

from ropaws.core.files import make_folder, refuse_link, write_atomically
from ropaws.pool.content import (
    ImageRef,
    UnreadableError,
    image_size,
    one_line_errors,
    open_image,
    read_content,
)
from ropaws.pool.corpus import Images
from ropaws.pool.decoding import decode_whole
from ropaws.pool.remote import RemoteImage

SIDE, FULL_SIDE = 160, 1024  # pixels of a thumbnail and of the large view, at most
LOSSLESS = 40  # pixels up to which an image is shown as it is, as a PNG


class ShownImages(ABC):
    """Images by number, each with a name that stays the same from one start to the next."""

    names: tuple[str, ...]

    @functools.cached_property
    def folded(self) -> list[str]:
        """The names without capital letters, to search in."""
        return [name.casefold() for name in self.names]

    @functools.cached_property
    def rank(self) -> NDArray[np.int64]:
        """The place of each image among all, by name.   (n,)"""
        rank = np.empty(len(self), np.int64)
        rank[sorted(range(len(self)), key=self.names.__getitem__)] = np.arange(len(self))
        return rank

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def open(self, number: int) -> Image.Image:
        """Upright, in RGB.

        Raises:
            UnreadableError: It has gone, or cannot be decoded any more.
        """

    def size(self, number: int) -> tuple[int, int]:
        """Width and height, upright. As open."""
        return self.open(number).size

    @abstractmethod
    def version(self, number: int) -> str:
        """Another text when the image may have changed."""

    def path(self, number: int) -> Path | None:
        """The file, where the image is one."""
        return None


class ListedImages(ShownImages):
    """Files, rows of arrays, rows of saved datasets."""

    def __init__(self, images: Sequence[ImageRef]) -> None:
        self.images = tuple(images)
        self.names = tuple(map(str, images))

    def open(self, number: int) -> Image.Image:
        return decode_whole(self.images[number], FULL_SIDE)

    def size(self, number: int) -> tuple[int, int]:
        with one_line_errors():
            content = read_content(self.images[number])
            width, height = image_size(content)
            with open_image(content, SIDE) as opened:
                lies = opened.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
        return (height, width) if lies else (width, height)

    def version(self, number: int) -> str:
        image = self.images[number]
        if isinstance(image, RemoteImage):
            return image.address
        try:
            facts = Path(image if isinstance(image, Path) else image[0]).stat()
        except OSError:
            raise UnreadableError("the file is not there any more") from None
        return f"{facts.st_mtime_ns} {facts.st_size}"

    def path(self, number: int) -> Path | None:
        image = self.images[number]
        return image if isinstance(image, Path) else None


class ArrayImages(ShownImages):
    """Images of a corpus that are not files.

    Args:
        images: (n, channels, h, w) uint8.
        made_from: A digest of them.
    """

    def __init__(self, images: Images, made_from: str) -> None:
        self.images = images
        self.names = tuple(str(number) for number in range(len(images)))
        self.made_from = made_from

    def open(self, number: int) -> Image.Image:
        pixels = self.images[torch.tensor([number])][0].permute(1, 2, 0).numpy()
        return Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).convert("RGB")

    def version(self, number: int) -> str:
        return self.made_from


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

    def __init__(self, images: ShownImages, folder: Path | None) -> None:
        self.images = images
        self.folder = folder
        self._making = threading.Lock()

    def get(self, number: int) -> Encoded:
        """Raises UnreadableError for an image that has gone, also if a thumbnail was made before."""
        version = self.images.version(number)
        key = f"{self.images.names[number]}\0{version}\0{SIDE}"
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        place = None if self.folder is None else self.folder / digest[:2] / digest
        if place is not None and place.is_file() and not place.is_symlink():
            return Encoded(place.read_bytes())
        made = encode(self.images.open(number), SIDE)
        if place is not None and self.images.version(number) == version:  # not replaced in the meantime
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
