"""One writer at a time: a folder that is being written is locked, and so is a file with others beside it.

filelock takes the operating system's lock on a small file, in which we note the process that has it. The lock
ends with the process, however that ends: a lock file that was left behind locks nothing. Unlike filelock,
which leaves its files in place, we remove ours at the end, so that folders and tables are free of them.
"""

import contextlib
import errno
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from filelock import BaseFileLock, FileLock, Timeout

from ropaws.core.files import open_regular, refuse_link

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
