"""Decoded images on disk, so that the next epoch or the next run need not decode them again."""

import contextlib
import hashlib
import os
import secrets
import struct
import time
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ropaws.data.files.whole import Whole
from ropaws.limits import IMAGE_FILE
from ropaws.runs.opening import read_regular

DECODER = 1  # part of every key: raise it when read_square or read_whole give other pixels
WHOLE = "whole"  # part of the key of a whole image
ASPECT = struct.Struct("<d")  # after its pixels
SHARDS = 64  # folders; each has its share of the limit and is counted on its own
RECOUNT = 32  # times that a shard is asked for room before it is counted again: others write to it too
UNUSED_SECONDS = 24 * 3600  # entries that were not used for so long make room for new ones


class SquareCache:
    """Squares by file, size and kind; any number of processes and runs may share a folder.

    A changed file has another key, as time and length are part of it. Entries are written beside and
    renamed, and carry a checksum: a torn or foreign one is decoded anew. When the limit is reached,
    entries that were not used for a day go; if there are none, nothing is added. (Dropping the oldest
    instead would drop, in a set that is larger than the cache, every entry before it is used again.)
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._used: dict[str, int] = {}  # bytes in a shard, as last counted
        self._asked: dict[str, int] = {}  # times that room was asked for since then

    def get(self, path: Path, size: int) -> NDArray[np.uint8] | None:
        """The central square of an image."""
        content = self._read(self._place(path, size), size * size * 3)
        return None if content is None else _as_pixels(content, size)

    def put(self, path: Path, size: int, square: NDArray[np.uint8]) -> None:
        """Keep a central square, if there is room. A disk that refuses costs the cache, not the run."""
        self._write(self._place(path, size), square.tobytes())

    def get_whole(self, path: Path, size: int) -> Whole | None:
        """The whole image, squeezed to a square."""
        content = self._read(self._place(path, size, WHOLE), size * size * 3 + ASPECT.size)
        if content is None:
            return None
        pixels, aspect = content[: -ASPECT.size], content[-ASPECT.size :]
        return Whole(_as_pixels(pixels, size), *ASPECT.unpack(aspect))

    def put_whole(self, path: Path, size: int, whole: Whole) -> None:
        """As put."""
        self._write(self._place(path, size, WHOLE), whole.pixels.tobytes() + ASPECT.pack(whole.aspect))

    def _read(self, place: Path, length: int) -> bytes | None:
        try:
            content = read_regular(place, IMAGE_FILE)
            os.utime(place)  # used just now
        except (OSError, ValueError):
            return None
        content, checksum = content[:-4], content[-4:]
        return content if len(content) == length and checksum == _checksum(content) else None

    def _write(self, place: Path, content: bytes) -> None:
        # Not by runs.atomic, which waits for the disk: a torn entry is recognized by its checksum.
        temporary = place.with_name(f".{place.name}.{secrets.token_hex(8)}.part")
        try:
            if self._has_room(place.parent, len(content) + 4):
                with temporary.open("xb") as file:  # exclusively: fails if anything is there, a link too
                    file.write(content + _checksum(content))
                temporary.replace(place)
                self._used[place.parent.name] += len(content) + 4
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _place(self, path: Path, size: int, kind: str = "") -> Path:
        try:
            facts = path.stat()
            stamp = f"{facts.st_mtime_ns} {facts.st_size}"
        except OSError:
            stamp = "missing"
        name = os.fsencode(os.path.abspath(path))
        key = hashlib.blake2b(name, digest_size=20, person=f"{DECODER} {size}{kind}".encode())
        key.update(f"\0{stamp}".encode())
        digest = key.hexdigest()
        return self.folder / f"{int(digest[:4], 16) % SHARDS:02d}" / digest

    def _has_room(self, shard: Path, wanted: int) -> bool:
        share = self.limit // SHARDS
        if self._asked.get(shard.name, RECOUNT) >= RECOUNT:
            shard.mkdir(parents=True, exist_ok=True)
            self._used[shard.name], self._asked[shard.name] = _make_room(shard, share - wanted), 0
        self._asked[shard.name] += 1
        return self._used[shard.name] + wanted <= share


def _make_room(shard: Path, most: int) -> int:
    """Bytes in a shard, after dropping unused entries as far as needed, the longest unused first."""
    entries = []
    with os.scandir(shard) as found:
        for entry in found:
            try:
                facts = entry.stat()
                entries.append((facts.st_mtime, facts.st_size, entry.path))
            except OSError:  # another process has just dropped it
                continue
    used = sum(size for _, size, _ in entries)
    unused_since = time.time() - UNUSED_SECONDS
    for when, size, path in sorted(entries):
        if used <= most or when > unused_since:
            break
        Path(path).unlink(missing_ok=True)
        used -= size
    return used


def _as_pixels(content: bytes, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(content, np.uint8).reshape(size, size, 3)


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")
