"""Images behind an address that fsspec opens: buckets, web servers, and zip archives anywhere.

Nothing is copied: a pool is listed once, and an image is read when it is asked for. Credentials are fsspec's
business (its configuration, environment variables): an address that has some in it is refused.
"""

import functools
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeVar

from ropaws.core.files import IMAGE_FILE, TABLE_FILE, is_image_file, open_regular

T = TypeVar("T")

ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+")  # one letter is a drive
LOCAL = ("file", "local")
SECRET = re.compile(
    r"://[^/@]*:[^/@]*@"
    r"|[?&]([a-z_-]*(signature|token|secret|password|credential)|([a-z_-]*[_-])?(key|sig))=",
    re.I,
)
SYSTEM_FILES = re.compile(r"(^|/)(\.|__MACOSX/)")  # what systems put into folders and archives
PAUSES = (0.5, 2.0)  # seconds before a read that failed is tried again


class RemoteImage(NamedTuple):
    """One image behind an address."""

    address: str

    def __str__(self) -> str:
        return self.address

    def encoded(self) -> bytes:
        """The image as it is stored."""
        return _retried(lambda: _read(self.address, IMAGE_FILE.value))


def address_of(source: Path | str) -> str | None:
    """The address that a source is, also where a Path has taken two slashes for one; None for a local path.

    >>> address_of(Path("s3://bucket/photos")), address_of("photos/cats")
    ('s3://bucket/photos', None)
    """
    text = str(source)
    if not ADDRESS.match(text):
        return None
    return "::".join(map(_with_slashes, text.split("::")))


def _with_slashes(part: str) -> str:
    found = ADDRESS.match(part)
    if found is None:
        return part
    return f"{found[1]}:{'///' if found[1] in LOCAL else '//'}{part[found.end() :]}"


def source_name(source: Path) -> str:
    """A source as a person writes it."""
    return address_of(source) or str(source)


def absolute_source(source: Path) -> Path:
    """Name a source so that it is the same from any working directory."""
    return source if address_of(source) else source.absolute()


def checked_address(address: str) -> str:
    """The address, if it may be written into the files of a run.

    Raises:
        ValueError: It has a password or a signature in it.
    """
    if SECRET.search(address):
        shown = SECRET.split(address)[0]
        raise ValueError(
            f"{shown}...: an address must not have a password, token or signature in it, for it is written"
            " into the run; give credentials by fsspec's configuration or the environment"
        )
    return address


def inside_of(source: Path) -> str | None:
    """The address below which the images of a source are: its own, or the inside of a zip file anywhere."""
    address = address_of(source)
    if source.suffix.lower() == ".zip" and (address is not None or source.is_file()):
        return f"zip://::{checked_address(address or f'file://{source.absolute()}')}"
    return None if address is None else checked_address(address)


def list_remote(address: str) -> list[tuple[str, RemoteImage]]:
    """All images below an address, in order: the path of each below it, and the image.

    Raises:
        ValueError: It cannot be listed; the message says why.
    """
    if is_image_file(PurePosixPath(address).name):
        return [(PurePosixPath(address).name, RemoteImage(address))]
    system, root = _opened(address)
    outer = "".join(address.partition("::")[1:])
    try:
        found = _retried(lambda: sorted(system.find(root)))
    except Exception as error:  # every file system of fsspec has exceptions of its own
        raise ValueError(f"{address} cannot be listed ({_reason(error)})") from None
    images = []
    for place in filter(is_image_file, found):
        below = place[len(root) :].lstrip("/")
        if not SYSTEM_FILES.search(below):
            images.append((below, RemoteImage(f"{system.unstrip_protocol(place)}{outer}")))
    return images


@contextmanager
def table_copy(address: str) -> Iterator[Path]:
    """A remote table as a local file, for as long as it is read."""
    with one_line_reasons(address):
        data = _retried(lambda: _read(checked_address(address), TABLE_FILE.value))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / PurePosixPath(address).name
        copy.write_bytes(data)
        yield copy


@contextmanager
def open_source(path: Path) -> Iterator[IO[bytes]]:
    """A file here or behind an address, to read from any place in it."""
    address = address_of(path)
    if address is None:
        with open_regular(path, None) as file:
            yield file
        return
    system, place = _opened(checked_address(address))
    with _retried(lambda: system.open(place, "rb")) as file:
        yield file


@contextmanager
def one_line_reasons(address: str) -> Iterator[None]:
    """Whatever a file system raises in here is a ValueError of one line."""
    try:
        yield
    except Exception as error:  # every file system of fsspec has exceptions of its own
        raise ValueError(f"{address} cannot be read ({_reason(error)})") from None


def _read(address: str, most: int) -> bytes:
    system, place = _opened(address)
    with system.open(place, "rb") as file:
        data: bytes = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{address} is larger than {most:,} bytes, the limit for such a file")
    return data


def _opened(address: str) -> tuple[Any, str]:
    """The file system of an address, and the place in it."""
    inner, chained, outer = address.partition("::")
    scheme, _, place = inner.partition("://")
    system = _system(f"{scheme}://{chained}{outer}" if chained else f"{scheme}://{place.partition('/')[0]}/")
    return system, system._strip_protocol(inner)


@functools.lru_cache(maxsize=64)
def _system(root: str) -> Any:
    """One for all threads: fsspec would open another in each, and read the list of an archive again."""
    import fsspec  # slow to load, and most pools are local

    try:
        return fsspec.url_to_fs(root)[0]
    except (ImportError, ValueError) as error:  # a file system that is not installed, or not known
        raise ValueError(
            f"{root} cannot be opened ({_reason(error)}); pip install 'ropaws[remote]' brings"
            " s3, gs, hf and https"
        ) from None
    except Exception as error:
        raise ValueError(f"{root} cannot be opened ({_reason(error)})") from None


def _retried(work: Callable[[], T]) -> T:
    """Try again what a network may have failed at; what is not there or not allowed stays so."""
    for pause in PAUSES:
        try:
            return work()
        except (FileNotFoundError, PermissionError, ValueError):
            raise
        except Exception:  # every file system of fsspec has exceptions of its own
            time.sleep(pause)
    return work()


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__
