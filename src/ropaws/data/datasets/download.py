"""Official files from their hosts, with a checksum, and unpacked."""

import hashlib
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ropaws.runs.atomic import replacing

PIECE = 1 << 20
TIMEOUT = 20.0  # seconds without an answer


class Remote(NamedTuple):
    """A file on its official host."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


# Passes pieces through, showing progress: watch(pieces, title, number of pieces).
Watch = Callable[[Iterable[bytes], str, int], Iterable[bytes]]


def fetch(remote: Remote, folder: Path, watch: Watch) -> Path:
    """The file in the folder, downloaded if it is not there; a wrong checksum is an error."""
    path = folder / remote.name
    if path.is_file():
        _check(path, remote, origin=path, remedy="remove it")
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        with urllib.request.urlopen(remote.url, timeout=TIMEOUT) as answer, temporary.open("wb") as file:
            pieces = -(-int(answer.headers.get("Content-Length", 0)) // PIECE)
            for piece in watch(_pieces(answer.read), f"Downloading {remote.name} (MB)", pieces):
                file.write(piece)
        _check(temporary, remote, origin=remote.url, remedy="try again later")
    return path


def _pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while piece := read(PIECE):
        yield piece


def _check(path: Path, remote: Remote, *, origin: Path | str, remedy: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != remote.md5:
        raise ValueError(
            f"{origin} is not the official {remote.name}: its MD5 is {found}, not {remote.md5}; {remedy}"
        )


def is_archive(name: str) -> bool:
    return name.endswith((".tar.gz", ".zip"))


def unpack(path: Path, folder: Path) -> None:
    """Unpack an archive beside and move it in whole: a folder that is there is complete.

    Nothing is written outside the folder: tarfile's data filter and zipfile drop .. and absolute paths.
    """
    if not is_archive(path.name):
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as beside:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(beside)
        else:
            with tarfile.open(path) as bundle:
                bundle.extractall(beside, filter="data")
        for entry in Path(beside).iterdir():
            entry.replace(folder / entry.name)
