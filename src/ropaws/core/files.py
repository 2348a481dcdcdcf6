"""Files: read with limits, written whole or not at all, and locked while they are written.

Files travel between people, and a small one can ask for all memory. Each limit is far above what ordinary
data needs. Whoever needs more sets the environment variable that the message names; no file and no config can
raise a limit.
"""

import contextlib
import errno
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from filelock import BaseFileLock, FileLock, Timeout

MB = 1 << 20
GB = 1 << 30


@dataclass(frozen=True)
class Limit:
    """A number that can be raised by an environment variable."""

    variable: str
    default: int
    unit: str = "bytes"

    @property
    def value(self) -> int:
        """What the environment says, or the default.

        Raises:
            ValueError: The variable is not a whole number above 0.
        """
        text = os.environ.get(self.variable, "")
        if not text:
            return self.default
        if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) == 0:
            raise ValueError(f"{self.variable} must be a whole number of {self.unit}, got {text[:40]!r}")
        return int(text)

    def check(self, count: int, what: object, *, most: int | None = None) -> None:
        """Raise an error if there is more than the limit.

        Args:
            count: How much there is.
            what: What the message begins with, such as a path.
            most: Instead of the value, where a caller allows more or less.

        Raises:
            ValueError: There is more; the message says how to allow it.
        """
        most = self.value if most is None else most
        if count > most:
            raise ValueError(
                f"{what} has {count:,} {self.unit}, more than {most:,}; if you trust it, set {self.variable}"
            )


PIXELS = Limit("ROPAWS_MOST_PIXELS", 40_000_000, "pixels")  # of an image; of a JPEG three times as many
IMAGE_FILE = Limit("ROPAWS_MOST_IMAGE_BYTES", GB)
JSON_FILE = Limit("ROPAWS_MOST_JSON_BYTES", 256 * MB)
PARSED = Limit("ROPAWS_MOST_PARSED_BYTES", 800 * MB, "bytes in memory")  # of a JSON file or a table
TABLE_FILE = Limit("ROPAWS_MOST_TABLE_BYTES", 256 * MB)
TENSOR_FILE = Limit("ROPAWS_MOST_TENSOR_BYTES", 16 * GB)  # weights, checkpoints, embeddings
ARRAYS = Limit("ROPAWS_MOST_ARRAY_BYTES", 256 * MB, "bytes in memory")  # or ten times the size of the file
DATASET_FILE = Limit("ROPAWS_MOST_DATASET_BYTES", 4 * GB)  # an official file of a named dataset


COMMON = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
EXTENSIONS = frozenset((*COMMON, ".ppm", ".pgm", ".pbm", ".avif", ".heic", ".heif"))


def is_image_file(name: str) -> bool:
    """Does a file's name end as that of an image?"""
    return os.path.splitext(name)[1].lower() in EXTENSIONS


KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
# Bytes that Python takes for a part of a JSON file: a list, a dictionary, an item, a name with its value.
LIST, DICTIONARY, ITEM, PAIR = 88, 240, 40, 130
ROW = 400  # of a table, beside its text
HOLES = (
    100  # times as large as what it takes on disk: no file of data is, one that is made to fill memory may be
)


def check_regular(path: Path, limit: Limit | None, *, inside: Path | None = None) -> os.stat_result:
    """Check that a path leads to a regular file of an allowed size, before anything opens it.

    Args:
        path: The file.
        limit: Bytes that it may have; None for any number, where the reader takes a part at a time.
        inside: The run folder that the file is in. No link is followed below it.

    Returns:
        What the system says of the file.

    Raises:
        FileNotFoundError: There is nothing.
        OSError: It is a link inside a run folder, or not a regular file.
        ValueError: It is too large.
    """
    if inside is not None:
        refuse_links(path, inside)
    facts = path.stat()
    _check(facts, path, limit)
    return facts


def open_regular(path: Path, limit: Limit | None, *, inside: Path | None = None) -> BufferedReader:
    """Open such a file to read bytes; arguments and errors as for check_regular."""
    check_regular(path, limit, inside=inside)  # first: opening some devices has an effect
    # Without waiting for the other end of a pipe that has taken the file's place in the meantime.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    file = open(descriptor, "rb")  # noqa: SIM115 - the caller closes it
    try:
        _check(os.fstat(descriptor), path, limit)
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: Path, limit: Limit, *, inside: Path | None = None) -> bytes:
    """All bytes of such a file; arguments and errors as for check_regular."""
    with open_regular(path, limit, inside=inside) as file:
        return file.read()


def refuse_links(path: Path, inside: Path) -> None:
    """Raise an error if a part of the path below a folder is a symbolic link."""
    place = inside
    for part in path.relative_to(inside).parts if path.is_relative_to(inside) else ():
        place = place / part
        if place.is_symlink():
            raise OSError(
                f"{place} is a symbolic link; ropaws follows none inside a run folder: put the file there"
            )


def check_parsed(content: bytes, path: Path) -> None:
    """Check how much memory the values of a JSON file could take, before it is parsed."""
    wide = 4 if b"\\u" in content or not content.isascii() else 1  # bytes of a character in memory
    count = (1 + 2 * wide) * len(content)
    for sign, size in ((b"[", LIST), (b"{", DICTIONARY), (b",", ITEM), (b":", PAIR)):
        count += size * content.count(sign)
    PARSED.check(count, f"{path}, once read,")


def check_rows(content: bytes, path: Path) -> None:
    """Check the rows of a text table, like check_parsed."""
    rows = max(content.count(b"\n"), content.count(b"\r"))
    PARSED.check(4 * len(content) + ROW * rows + PAIR * content.count(b","), f"{path}, once read,")


def _check(facts: os.stat_result, path: Path, limit: Limit | None) -> None:
    if not stat.S_ISREG(facts.st_mode):
        kind = KINDS.get(stat.S_IFMT(facts.st_mode), "not a regular file")
        raise OSError(f"{path} is {kind}; ropaws reads regular files only")
    if limit is not None:
        limit.check(facts.st_size, path)
    on_disk = 512 * getattr(facts, "st_blocks", 0)  # 0 where the system does not say
    if 0 < on_disk * HOLES < facts.st_size:
        raise OSError(
            f"{path} is {facts.st_size:,} bytes long, but only {on_disk:,} are there; write it again"
        )


FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EROFS)  # of a disk that takes no more


@contextlib.contextmanager
def replacing(path: Path, *, keep_old: Path | None = None) -> Iterator[Path]:
    """A new file beside the target, which takes the target's place when the block ends without an error.

    Args:
        path: The target. A symbolic link there is an error: it is neither followed nor replaced.
        keep_old: Where the file that is replaced goes, instead of being lost.

    Yields:
        The path to write to; the file is there and empty.

    Raises:
        OSError: The file cannot be written, or a link is in its place.
    """
    refuse_link(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb"):  # exclusively: fails if anything is there, a link too
            mode = temporary.stat().st_mode  # as the user's umask has it; some writers make private files
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        if keep_old is not None and path.exists():
            refuse_link(keep_old)
            path.replace(keep_old)
        temporary.replace(path)
    except OSError as error:
        if error.errno in FULL and error.filename is None:  # which file it was is not said
            raise OSError(f"{path} could not be written ({error.strerror})") from None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call write with a new file beside the target, then put that file in the target's place."""
    with replacing(path) as temporary:
        write(temporary)


def refuse_link(path: Path) -> None:
    """Raise an error if the path is a symbolic link: what is written there would land elsewhere."""
    if path.is_symlink():
        raise OSError(f"{path} is a symbolic link; ropaws does not write through links: remove it first")


def write_text(path: Path, text: str, *, errors: str = "strict") -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8", errors=errors))


def write_json(path: Path, value: object) -> None:
    # Plain ASCII: file names that are not UTF-8 can be written and come back as they were.
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path, *, inside: Path | None = None) -> Any:
    """The value in a JSON file.

    Args:
        path: The file.
        inside: The run folder that it is in: no link is followed there.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It is not a regular file.
        ValueError: It is not valid JSON, or too large.
    """
    try:
        content = read_regular(path, JSON_FILE, inside=inside)
    except FileNotFoundError:
        raise FileNotFoundError(f"no file at {path}") from None
    check_parsed(content, path)
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, too many digits, nested too deep
        raise ValueError(f"{path} is not valid JSON ({error}); restore it or write it again") from None


def make_folder(path: Path) -> None:
    """Create a folder inside a run folder; a link in its place is an error."""
    refuse_link(path)
    path.mkdir(parents=True, exist_ok=True)


def make_cache_folder(path: Path, *, setting: str, root: Path) -> None:
    """Create the folder of a cache, below the root that the setting names; an error names both."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{setting}: {root} cannot be a folder ({error.strerror}); name another") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"{setting}: {root} cannot be written to; name another folder")


def check_out_folder(folder: Path, *, option: str = "--out") -> None:
    """Check that the file that an option names can be written into its folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{option}: no folder {folder}; create it first")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{option}: {folder} cannot be written to; choose another place")


# A lock is the operating system's, by filelock, on a small file in which we note the process that has it. It
# ends with the process, however that ends: a lock file that was left behind locks nothing. Unlike filelock,
# which leaves its files in place, we remove ours at the end, so that folders and tables are free of them.
LOCK = ".lock"
MOST_NOTE = 4096  # bytes of a note that are read
PATIENCE = 0.2  # seconds; a lock file that its last owner is removing right now is not taken for a lock
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system, such as some network drives
_guard = threading.Lock()  # no thread enters while another removes the file


class Owner(NamedTuple):
    """Who has a lock."""

    process: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host!r} since {self.since!r}"


class LockedError(OSError):
    """Another process writes there."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time is in such a block for a folder, which is created if it is not there.

    Blocks of one process may overlap. A folder that was created and is still empty at the end is removed.

    Args:
        folder: A run folder, or that of a benchmark.

    Raises:
        LockedError: Another process writes there; the message says which.
        OSError: The folder cannot be written.
    """
    created = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder / LOCK, folder):
            yield
    finally:
        with contextlib.suppress(OSError):  # something is in it
            for place in created:
                place.rmdir()


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Lock one file, such as a table, that is written together with others beside it."""
    with _locked(path.with_name(f".{path.name}{LOCK}"), path):
        yield


@contextlib.contextmanager
def _locked(file: Path, target: Path) -> Iterator[None]:
    # One lock for all blocks of this process that are inside.
    lock = FileLock(file, is_singleton=True, thread_local=False, on_acquired=_write_note)
    with _guard:
        _take(lock, file, target)
    try:
        yield
    finally:
        with _guard:
            if lock.lock_counter == 1:
                _remove(file)  # before the lock ends: whoever waits sees that it is gone
            lock.release()


def _take(lock: BaseFileLock, file: Path, target: Path) -> None:
    refuse_link(file)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(file.lstat().st_mode):
            raise OSError(f"{file} is not a regular file; remove it")
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        owner = _owner(file) or "another process"
        raise LockedError(
            f"{target} is being written by {owner}; wait until it has ended, or choose another place"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _remove(file: Path) -> None:
    """Remove our lock file; where the folder was moved in the meantime, another may have taken its place."""
    owner = _owner(file)
    if owner and (owner.process, owner.host) == (os.getpid(), socket.gethostname()):
        with contextlib.suppress(OSError):
            file.unlink()


def _write_note(descriptor: int) -> None:
    owner = Owner(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S"))
    with contextlib.suppress(OSError):  # a full disk has no room for the note; the lock holds without it
        os.truncate(descriptor, 0)
        os.write(descriptor, json.dumps(owner._asdict()).encode())


def _owner(file: Path) -> Owner | None:
    """Which process has the lock, as far as its file says."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        with open_regular(file, None) as content:
            note = json.loads(content.read(MOST_NOTE))
        return Owner(int(note["process"]), str(note["host"])[:100], str(note["since"])[:19])
    return None
