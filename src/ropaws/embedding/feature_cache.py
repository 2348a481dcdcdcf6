"""Features on disk by the content of their images, so that a later run need not compute them again.

A folder for each backbone with its views holds immutable segments. A segment has up to 512 images and is
written whole or not at all: a kill loses one at most, and any number of processes and runs may write at once.
"""

import contextlib
import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ropaws.core.files import (
    TENSOR_FILE,
    check_regular,
    make_cache_folder,
    open_regular,
    refuse_link,
    replacing,
)
from ropaws.pool.content import KEY_BYTES as KEY

SEGMENT = 512  # images
MANY_NEW = 64  # segments that are looked through apart until all are sorted anew
MOST_HEADER = 1 << 16  # bytes; ours have a few hundred
STALE_SECONDS = 24 * 3600  # age at which a temporary file was left by a process that is gone
SUFFIX = ".safetensors"
OWN_FOLDER = re.compile(r"[0-9a-f]{32}")
OWN_FILE = re.compile(r"[0-9a-f]{32}\.safetensors|\.[0-9a-f]{32}\.safetensors\.[0-9a-f]{16}\.tmp")
Where = NDArray[np.int64]  # (n, 2) segment and row of each image; -1 where it is missing


def default_folder() -> Path:
    """$ROPAWS_CACHE; else $XDG_CACHE_HOME/ropaws/features, or the same below ~/.cache."""
    if chosen := os.environ.get("ROPAWS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ropaws" / "features"


def is_feature_cache(folder: Path) -> bool:
    """Has an earlier run kept features there?"""
    try:
        with os.scandir(folder) as entries:
            return any(
                OWN_FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False) for entry in entries
            )
    except OSError:
        return False


class CacheSize(NamedTuple):
    """What a cache holds."""

    networks: int  # with their views
    files: int
    size: int  # bytes


def cache_size(root: Path) -> CacheSize:
    """Count what this cache has written below a folder."""
    found = [(path, size) for _, size, path in _files(root)]
    return CacheSize(len({path.parent for path, _ in found}), len(found), sum(size for _, size in found))


def clear_cache(root: Path) -> CacheSize:
    """Remove what this cache has written below a folder, and nothing else. Returns what was removed."""
    removed = cache_size(root)
    for _, _, path in list(_files(root)):
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are still in it
            path.parent.rmdir()
    return removed


class Segment(NamedTuple):
    """A file of the cache, opened."""

    path: Path
    keys: NDArray[np.uint8]  # (m, KEY)
    rows: NDArray[np.float16]  # (m, views + 1, d), memory-mapped
    checksum: str  # of the rows


class _Index(NamedTuple):
    """Where the keys of some segments are."""

    keys: NDArray[np.bytes_]  # (k,) sorted
    where: Where  # (k, 2)
    stop: int  # number of the first segment after them

    @classmethod
    def of(cls, segments: Sequence[Segment], start: int) -> "_Index":
        """Index the segments from number start on."""
        parts = segments[start:]  # a copy: other threads may add some meanwhile
        stop = start + len(parts)
        if not any(len(segment.keys) for segment in parts):
            return cls(np.empty(0, f"S{KEY}"), np.empty((0, 2), np.int64), stop)
        keys = _as_text(np.concatenate([segment.keys for segment in parts]))
        lengths = [len(segment.keys) for segment in parts]
        number = np.repeat(np.arange(start, stop), lengths)
        row = np.concatenate([np.arange(length) for length in lengths])
        order = np.argsort(keys, kind="stable")
        return cls(keys[order], np.stack([number, row], axis=1)[order], stop)

    def find(self, keys: NDArray[np.uint8]) -> Where:
        """keys (n, KEY)  ->  (n, 2)"""
        where = np.full((len(keys), 2), -1, np.int64)
        if len(self.keys) and len(keys):
            wanted = _as_text(keys)
            place = np.searchsorted(self.keys, wanted).clip(max=len(self.keys) - 1)
            found = self.keys[place] == wanted
            where[found] = self.where[place[found]]
        return where


class FeatureStore:
    """The segments of one backbone with its views.

    Args:
        root: Folder of the cache.
        made_from: Digest of backbone and views; names the folder inside.
        shape: Views of an image (the center view and random ones) and features of each.
        limit: Bytes of the whole cache at most.
        warn: Takes a line about a file that was dropped.

    Raises:
        ValueError: The folder cannot be written.
    """

    def __init__(
        self, root: Path, made_from: str, shape: tuple[int, int], limit: float, warn: Callable[[str], object]
    ) -> None:
        self.root = root
        self.folder = root / made_from
        self.made_from = made_from
        self.shape = shape
        self.limit = limit
        self.warn = warn
        self.segments: list[Segment] = []
        self._known: set[str] = set()  # names of their files
        self._index = _Index.of([], 0)
        self._others: dict[str, FeatureStore] = {}  # see with_same_start
        self._sound: set[int] = set()  # segments whose rows were checked
        refuse_link(self.folder)  # damaged files in it are removed: they must not be someone else's
        make_cache_folder(self.folder, setting="data.feature_cache", root=root)

    def with_same_start(self, length: int) -> "Iterator[FeatureStore]":
        """Other stores in this cache whose names begin alike, with any number of views."""
        for folder in sorted(self.root.glob(f"{self.made_from[:length]}*")):
            if folder.name == self.made_from or not OWN_FOLDER.fullmatch(folder.name):
                continue
            if folder.name not in self._others and (views := _views_of(folder)) is not None:
                shape = (views, self.shape[1])
                self._others[folder.name] = FeatureStore(self.root, folder.name, shape, self.limit, self.warn)
            if folder.name in self._others:
                yield self._others[folder.name]

    def find(self, keys: NDArray[np.uint8]) -> Where:
        """Where the features of images are. Segments that others have written since are found too.

        keys (n, KEY)  ->  (n, 2)
        """
        self._scan()
        while True:
            where = self._look_up(keys)
            used = set(np.unique(where[:, 0]).tolist()) - {-1} - self._sound
            damaged = {number for number in used if not self._rows_are_sound(number)}
            self._sound |= used - damaged
            if not damaged:
                return where

    def write(self, keys: NDArray[np.uint8], rows: NDArray[np.float16]) -> None:
        """Add a segment.   keys (m, KEY), rows (m, views + 1, d)"""
        name = hashlib.blake2b(keys.tobytes(), digest_size=16).hexdigest()
        metadata = {"keys": _checksum(keys), "rows": _checksum(rows), "made_from": self.made_from}
        path = self.folder / f"{name}{SUFFIX}"
        try:
            with replacing(path) as temporary:
                save_file({"keys": keys, "rows": rows}, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{path} could not be written ({error})") from None

    def check_room(self, images: int) -> None:
        """Raise an error if the images of this run alone are more than the cache may hold."""
        each = self._bytes_each
        if images * each > self.limit:
            need, room = images * each / 2**30, self.limit / 2**30
            raise ValueError(
                f"the features of {images:,} images in {self.shape[0]} views each take {need:.1f} GB, more"
                f" than data.cache_gb={room:g}; raise it, or lower model.frozen_views"
            )

    def make_room(self, missing: int) -> None:
        """Drop the segments that were not used for longest, until the missing images fit too."""
        each = self._bytes_each
        files = sorted(_files(self.root))
        used = sum(size for _, size, _ in files)
        for when, size, path in files:
            temporary = path.suffix != SUFFIX
            stale = temporary and when < time.time() - STALE_SECONDS
            own = path.parent == self.folder and path.name in self._known
            full = not (temporary or own) and used + missing * each > self.limit
            if stale or full:
                path.unlink(missing_ok=True)
                used -= size

    @property
    def _bytes_each(self) -> int:
        """Of an image."""
        return KEY + 2 * self.shape[0] * self.shape[1]

    def _scan(self) -> None:
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in entries]
        for name in sorted(names):
            if name in self._known or name.startswith(".") or not name.endswith(SUFFIX):
                continue
            path = self.folder / name
            try:
                self.segments.append(_open(path, self.shape, self.made_from))
                self._known.add(name)
            except FileNotFoundError:  # another process has just dropped it
                continue
            except Exception as error:  # whatever a damaged header leads to
                self._drop(path, error)

    def _look_up(self, keys: NDArray[np.uint8]) -> Where:
        """In the index of most segments, and in one of the newest, so that it is seldom made anew."""
        if len(self.segments) > MANY_NEW + self._index.stop:
            self._index = _Index.of(self.segments, 0)
        where = self._index.find(keys)
        missing = where[:, 0] < 0
        if len(self.segments) > self._index.stop and missing.any():
            where[missing] = _Index.of(self.segments, self._index.stop).find(keys[missing])
        return where

    def _rows_are_sound(self, number: int) -> bool:
        segment = self.segments[number]
        if _checksum(segment.rows) != segment.checksum:
            self._drop(segment.path, "its checksum is wrong")
            self.segments[number] = segment._replace(keys=segment.keys[:0])  # the numbers of the others stay
            self._index = _Index.of(self.segments, 0)
            return False
        with contextlib.suppress(OSError):
            os.utime(segment.path)  # used just now
        return True

    def _drop(self, path: Path, reason: object) -> None:
        self._known.discard(path.name)  # a new one takes its name
        self.warn(f"{path} cannot be used ({reason}); its features are computed again")
        with contextlib.suppress(OSError):
            path.unlink()


def _views_of(folder: Path) -> int | None:
    """The number of views that the first sound segment in a folder says it has."""
    for path in sorted(folder.glob(f"[!.]*{SUFFIX}")):
        with contextlib.suppress(Exception):  # whatever a damaged header leads to
            return int(_header(path)[0]["rows"]["shape"][1])
    return None


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """What a segment says of itself, where its content starts, and how long the file is."""
    length = check_regular(path, TENSOR_FILE, inside=path.parent.parent).st_size
    with open_regular(path, TENSOR_FILE) as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= MOST_HEADER:
            raise ValueError("it has no header")
        return json.loads(file.read(size)), 8 + size, length


def _open(path: Path, shape: tuple[int, int], made_from: str) -> Segment:
    """Nothing of the file is trusted: its header must describe exactly what a segment holds."""
    header, start, length = _header(path)
    metadata = header["__metadata__"]
    if metadata["made_from"] != made_from:
        raise ValueError("it was made by another backbone, or of other views")
    count = header["keys"]["shape"][0]
    wanted = {"keys": ("U8", [count, KEY]), "rows": ("F16", [count, *shape])}
    offsets = {}
    for name, (kind, dims) in wanted.items():
        entry = header[name]
        first, last = entry["data_offsets"]
        bytes_each = {"U8": 1, "F16": 2}[kind]
        if [entry["dtype"], entry["shape"]] != [kind, dims] or last - first != bytes_each * np.prod(dims):
            raise ValueError(f"{name} are {entry['dtype']} {entry['shape']}, not {kind} {dims}")
        if first < 0 or start + last > length or not count:
            raise ValueError("it is cut short")
        offsets[name] = start + first
    keys: NDArray[np.uint8] = np.fromfile(path, np.uint8, count * KEY, offset=offsets["keys"])
    keys = keys.reshape(count, KEY)
    if _checksum(keys) != metadata["keys"]:
        raise ValueError("the checksum of its keys is wrong")
    rows = np.memmap(path, np.float16, "r", offsets["rows"], (count, *shape))
    return Segment(path, keys, rows, metadata["rows"])


def _files(root: Path) -> Iterable[tuple[float, int, Path]]:
    """Time, size and path of what this cache has written below a folder, and of nothing else there."""
    for path in root.glob("*/*"):
        if not OWN_FOLDER.fullmatch(path.parent.name) or not OWN_FILE.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # another process has just dropped it
            facts = path.stat()
            yield facts.st_mtime, facts.st_size, path


def _as_text(keys: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """Rows of bytes as single values, which can be sorted."""
    return np.ascontiguousarray(keys).view(f"S{KEY}")[:, 0]


def _checksum(values: NDArray[Any]) -> str:
    return f"{zlib.crc32(np.ascontiguousarray(values).data):08x}"
