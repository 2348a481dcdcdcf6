"""Decoded images on disk, so that the next epoch or the next run need not decode them again."""

import contextlib
import hashlib
import os
import secrets
import struct
import time
import zlib
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ropaws.core.files import IMAGE_FILE, read_regular
from ropaws.pool.content import KEY_BYTES

Wanted = Literal["center", "whole", "both"]

DECODER = 2  # part of every key: raise it when read_image gives other pixels
WHOLE = "whole"  # part of the key of a whole image
KINDS = {"center": ("",), "whole": (WHOLE,), "both": ("", WHOLE)}  # entries by what is wanted
TAIL = struct.Struct(f"<d{KEY_BYTES}s")  # after the pixels: aspect, key of what they were decoded from
SHARDS = 64  # folders; each has its share of the limit and is counted on its own
RECOUNT = 32  # times that a shard is asked for room before it is counted again: others write to it too
UNUSED_SECONDS = 24 * 3600  # entries that were not used for so long make room for new ones
SETTLED = 2.0  # seconds in which a file can be changed twice and have the same time: clocks of disks are slow


class Found(NamedTuple):
    """What was read of an image."""

    square: NDArray[np.uint8]  # (size, size, 3) the central square, or the whole image if that was wanted
    key: bytes  # of the content that the pixels were decoded from
    whole: NDArray[np.uint8] | None = None  # (size, size, 3) where both were wanted
    aspect: float = 1.0  # of the whole image, where it was wanted


class SquareCache:
    """Squares by file, size and kind; any number of processes and runs may share a folder.

    A changed file has another key, as its times and its length are part of it. Entries are written beside and
    renamed, and carry a checksum: a torn or foreign one is decoded anew. When the limit is reached,
    entries that were not used for a day go; if there are none, nothing is added. (Dropping the oldest
    instead would drop, in a set that is larger than the cache, every entry before it is used again.)

    Args:
        folder: Where entries are.
        limit: Bytes of all of them at most.
        settled: Seconds since its last change after which a file is kept.
    """

    def __init__(self, folder: Path, limit: int, settled: float = SETTLED) -> None:
        self.folder = folder
        self.limit = limit
        self.settled = settled
        self._used: dict[str, int] = {}  # bytes in a shard, as last counted
        self._asked: dict[str, int] = {}  # times that room was asked for since then

    def get(self, path: Path, size: int, wanted: Wanted) -> Found | None:
        """What was kept of an image; None unless all that is wanted is there."""
        try:
            facts = path.stat()
        except OSError:
            return None
        entries = [self._read(self._place(path, facts, size, kind), size) for kind in KINDS[wanted]]
        first, last = entries[0], entries[-1]
        if first is None or last is None or first.key != last.key:
            return None
        return first if wanted != "both" else first._replace(whole=last.square, aspect=last.aspect)

    def put(self, path: Path, facts: os.stat_result, size: int, wanted: Wanted, found: Found) -> None:
        """Keep what was found in a file, if there is room. A disk that refuses costs the cache, not the run.

        facts: of the file, taken before it was read: if it has changed since, they fit it no more.
        """
        if facts.st_ctime > time.time() - self.settled:
            return
        for kind, pixels in zip(KINDS[wanted], (found.square, found.whole), strict=False):
            assert pixels is not None
            tail = TAIL.pack(found.aspect if kind == WHOLE else 1.0, found.key)
            self._write(self._place(path, facts, size, kind), pixels.tobytes() + tail)

    def _read(self, place: Path, size: int) -> Found | None:
        try:
            content = read_regular(place, IMAGE_FILE)
            os.utime(place)  # used just now
        except (OSError, ValueError):
            return None
        content, checksum = content[:-4], content[-4:]
        if len(content) != size * size * 3 + TAIL.size or checksum != _checksum(content):
            return None
        aspect, key = TAIL.unpack(content[-TAIL.size :])
        pixels = np.frombuffer(content, np.uint8, size * size * 3).reshape(size, size, 3)
        return Found(pixels, key, aspect=aspect)

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

    def _place(self, path: Path, facts: os.stat_result, size: int, kind: str) -> Path:
        name = os.fsencode(os.path.abspath(path))
        key = hashlib.blake2b(name, digest_size=20, person=f"{DECODER} {size}{kind}".encode())
        # The time of the last change besides that of writing: a copy can have the latter of its original.
        key.update(f"\0{facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_size}".encode())
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


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")
