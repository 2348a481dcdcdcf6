"""The one way to write a file: whole or not at all, and never through a link.

A run folder may come from a stranger. A temporary file with a predictable name could be planted there as a
symbolic link to a file elsewhere; so temporaries are created exclusively, with random names.
"""

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ropaws.limits import JSON_FILE
from ropaws.runs.opening import check_parsed, read_regular

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
