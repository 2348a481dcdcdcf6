"""One writer at a time: a folder that is being written is locked, and so is a file with others beside it.

The lock is the operating system's, on a small file that names the process that has it. It ends with the
process, however that ends: a lock file that was left behind locks nothing.
"""

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ropaws.runs.atomic import refuse_link

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
MOST_NOTE = 4096  # bytes of a note that are read


class _Held(NamedTuple):
    blocks: int  # blocks of this process that are inside
    descriptor: int | None  # None where the system has no such locks


_held: dict[str, _Held] = {}  # by lock file
_guard = threading.Lock()


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
    """The same for one file, such as a table, which is written together with others beside it."""
    with _locked(path.with_name(f".{path.name}{LOCK}"), path):
        yield


@contextlib.contextmanager
def _locked(file: Path, target: Path) -> Iterator[None]:
    key = os.path.realpath(file)
    with _guard:
        if key not in _held:
            _held[key] = _Held(0, _take(file, target))
        _held[key] = _held[key]._replace(blocks=_held[key].blocks + 1)
    try:
        yield
    finally:
        with _guard:
            held = _held.pop(key)
            if held.blocks > 1:
                _held[key] = held._replace(blocks=held.blocks - 1)
            elif held.descriptor is not None:
                _release(file, held.descriptor)


def _take(file: Path, target: Path) -> int | None:
    """The descriptor that holds the lock; None where the system has no such locks."""
    if fcntl is None:
        return None
    while True:
        refuse_link(file)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(file, flags, 0o644)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{file} is not a regular file; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner(descriptor)
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise LockedError(
                    f"{target} is being written by {owner}; wait until it has ended, or choose another place"
                ) from None
            return None  # a file system without locks, such as some network drives
        if _is_still_there(file, descriptor):
            break
        os.close(descriptor)  # its last owner has removed it in the meantime: it locks nothing
    with contextlib.suppress(OSError):  # a full disk has no room for the note; the lock holds without it
        _write_note(descriptor)
    return descriptor


def _write_note(descriptor: int) -> None:
    os.truncate(descriptor, 0)
    note = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.write(descriptor, json.dumps(note).encode())


def _is_still_there(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release(file: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the folder may have been moved or removed
        if _is_still_there(file, descriptor):
            file.unlink()  # before the lock ends: whoever waits sees that it is gone
    os.close(descriptor)


def _owner(descriptor: int) -> str:
    """Which process has the lock, as far as it says."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        note = json.loads(os.pread(descriptor, MOST_NOTE, 0))
        return (
            f"process {int(note['process'])} on {str(note['host'])[:100]!r} since {str(note['since'])[:19]!r}"
        )
    return "another process"
