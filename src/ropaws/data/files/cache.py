"""Decoded images on disk, so that the next epoch or the next run need not decode them again."""

import contextlib
import hashlib
import os
import secrets
import time
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ropaws.limits import IMAGE_FILE
from ropaws.runs.opening import read_regular

DECODER = 1  # part of every key: raise it when read_square gives other pixels
SHARDS = 64  # folders; each has its share of the limit and is counted on its own
RECOUNT = 32  # times that a shard is asked for room before it is counted again: others write to it too
UNUSED_SECONDS = 24 * 3600  # entries that were not used for so long make room for new ones


class SquareCache:
    """Squares by file and size; any number of processes and runs may share a folder.

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
        place = self._place(path, size)
        try:
            content = read_regular(place, IMAGE_FILE)
            os.utime(place)  # used just now
        except (OSError, ValueError):
            return None
        pixels, checksum = content[:-4], content[-4:]
        if len(pixels) != size * size * 3 or checksum != _checksum(pixels):
            return None
        return np.frombuffer(pixels, np.uint8).reshape(size, size, 3)

    def put(self, path: Path, size: int, square: NDArray[np.uint8]) -> None:
        """Keep a square, if there is room. A disk that refuses costs the cache, not the run."""
        place = self._place(path, size)
        pixels = square.tobytes()
        # Not by runs.atomic, which waits for the disk: a torn entry is recognized by its checksum.
        temporary = place.with_name(f".{place.name}.{secrets.token_hex(8)}.part")
        try:
            if self._has_room(place.parent, len(pixels) + 4):
                with temporary.open("xb") as file:  # exclusively: fails if anything is there, a link too
                    file.write(pixels + _checksum(pixels))
                temporary.replace(place)
                self._used[place.parent.name] += len(pixels) + 4
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _place(self, path: Path, size: int) -> Path:
        try:
            facts = path.stat()
            stamp = f"{facts.st_mtime_ns} {facts.st_size}"
        except OSError:
            stamp = "missing"
        name = os.fsencode(os.path.abspath(path))
        key = hashlib.blake2b(name, digest_size=20, person=f"{DECODER} {size}".encode())
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


def _checksum(pixels: bytes) -> bytes:
    return zlib.crc32(pixels).to_bytes(4, "little")
