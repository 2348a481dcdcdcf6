"""The one way to open a file that others may have made: a regular file, of a size that is allowed.

A pipe or a device in the place of a file would let a reader wait forever, or read without end. A link in a
run folder could make a page show what is elsewhere on the disk: inside a run folder no link is followed.
"""

import os
import stat
from io import BufferedReader
from pathlib import Path

from ropaws.limits import PARSED, Limit

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
    """The same for the rows of a text table."""
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
