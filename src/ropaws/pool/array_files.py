"""Images that are not files of their own: rows of an array in an .npz."""

import contextlib
import functools
import io
import math
import os
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ropaws.core.files import ARRAYS, PARSED, check_regular, open_regular
from ropaws.core.labels import class_name

IMAGE_ARRAYS, LABEL_ARRAYS = ("images", "train_images"), ("labels", "train_labels")
MOST_CLASSES = 100_000
UNPACKED = 10  # times its size that a large file may have in memory
ROW_BYTES = 250  # that Python takes for the name and label of a row
MAPPED = 1 << 26  # bytes of an array above which it is read where it is, a part at a time
LENGTHS, ENCRYPTED = 26, 1  # of a member of an archive: where the lengths of its header stand, a flag
HEADER = 1 << 14  # bytes in which the header of an .npy array must end; NumPy reads 10,000 at most
# Bytes that one byte of an archive can stand for; NumPy writes no other kinds of compression.
EXPANSION = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}


class ArrayRow(NamedTuple):
    """One image of an array (n, h, w[, 1 or 3]) of uint8."""

    file: Path
    array: str
    row: int

    def __str__(self) -> str:
        return f"{self.file}#{self.row}"

    def pixels(self) -> NDArray[np.uint8]:
        """(h, w) or (h, w, 3)"""
        image: NDArray[np.uint8] = load_arrays(self.file)[self.array][self.row]
        return image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image


def load_arrays(path: Path, *, without: str = "") -> dict[str, NDArray[Any]]:
    """All arrays of an .npz file; kept while it does not change, as rows are asked for one by one.

    without: the name of one that is left out, because it was mapped.
    """
    facts = _found(path)
    return _load_arrays(path, facts.st_mtime_ns, facts.st_size, without)


def array_names(path: Path) -> list[str]:
    """The arrays of an .npz file; none of them is read."""
    _found(path)
    with _opened(path) as archive:
        return [_name(member) for member in archive.infolist()]


def map_array(path: Path, name: str) -> NDArray[Any] | None:
    """An array of an .npz file as it is on disk; None if it is small, compressed or not there."""
    _found(path)
    with _opened(path) as archive:
        for member in archive.infolist():
            stored = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & ENCRYPTED
            if _name(member) == name and stored and member.file_size > MAPPED:
                with path.open("rb") as file:
                    file.seek(member.header_offset + LENGTHS)
                    before = LENGTHS + 4 + sum(struct.unpack("<HH", file.read(4)))
                return map_npy(path, member.header_offset + before, member.file_size)
    return None


def map_npy(path: Path, offset: int, length: int) -> NDArray[Any]:
    """An .npy array that begins at a byte of a file, memory-mapped to be read. Its header is not trusted.

    Raises:
        ValueError: It is not one, or claims more than its length.
    """
    with open_regular(path, None) as file:
        length = min(length, os.fstat(file.fileno()).st_size - offset)
        file.seek(offset)
        start = io.BytesIO(file.read(HEADER))
    shape, by_column, dtype = _checked_header(start, length)
    order: Literal["C", "F"] = "F" if by_column else "C"
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset + start.tell(), shape, order)


def _found(path: Path) -> os.stat_result:
    try:
        return check_regular(path, None)
    except FileNotFoundError:
        raise FileNotFoundError(f"no data file at {path}") from None


def _name(member: zipfile.ZipInfo) -> str:
    return member.filename.removesuffix(".npy")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive; whatever is wrong with it is one kind of error."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (ValueError, NotImplementedError, OSError, EOFError, struct.error, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a readable .npz file ({error}); write it again") from None


@functools.lru_cache(maxsize=8)
def _load_arrays(path: Path, _changed: int, length: int, without: str) -> dict[str, NDArray[Any]]:
    with _opened(path) as archive:
        members = archive.infolist()
        if sum(member.compress_size for member in members) > length:
            raise ValueError("its arrays are larger than the file")
        members = [member for member in members if not without or _name(member) != without]
        unpacked = sum(_most_bytes(member) for member in members)
        ARRAYS.check(unpacked, "it", most=max(ARRAYS.value, UNPACKED * length))
        return {_name(member): _read_array(archive, member) for member in members}


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """One array. Nothing in the file is executed, and its header is not trusted."""
    name = member.filename.removesuffix(".npy")
    try:
        with archive.open(member) as stream:
            _check_size(io.BytesIO(stream.read(HEADER)), member)
        with archive.open(member) as stream:
            array: NDArray[Any] = npy.read_array(stream, allow_pickle=False)
        if array.dtype.kind == "U" and array.nbytes:
            letters = np.ascontiguousarray(array).view(np.dtype("u4").newbyteorder(array.dtype.byteorder))
            if int(letters.max()) > sys.maxunicode:  # Python would fail on it when it becomes a text
                raise ValueError("its texts are damaged")
        return array
    except MemoryError:
        raise ValueError(f"array {name!r} does not fit into memory") from None
    except Exception as error:  # zipfile and NumPy raise nearly anything on damaged members
        raise ValueError(f"array {name!r}: {error!s:.200}") from None


def _most_bytes(member: zipfile.ZipInfo) -> int:
    """That a member can hold, whatever the directory of the archive says."""
    return min(member.file_size, EXPANSION.get(member.compress_type, 0) * member.compress_size)


def _check_size(start: io.BytesIO, member: zipfile.ZipInfo) -> None:
    """Raise an error if an array claims more bytes than its member can hold: NumPy would allocate them."""
    if member.compress_type not in EXPANSION:
        raise ValueError("compressed by another method than deflate")
    _checked_header(start, _most_bytes(member))


def _checked_header(start: io.BytesIO, length: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns come first, and type of an array of so many bytes; start stands behind it."""
    if not start.getvalue().startswith(npy.MAGIC_PREFIX):
        raise ValueError("not an .npy array")
    version = npy.read_magic(start)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"unknown .npy version {version}")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_column, dtype = read_header(start)
    if dtype.hasobject:
        raise ValueError("holds Python objects, which are never loaded")
    claimed = math.prod(shape) * dtype.itemsize
    held = length - start.tell()
    if min(shape, default=0) < 0 or claimed > held:
        raise ValueError(f"shape {shape} of {dtype} needs {claimed:,} bytes, but the file holds {held:,}")
    return shape, by_column, dtype


def class_names(arrays: Mapping[str, NDArray[Any]], path: Path) -> list[str] | None:
    """The array class_names; None if there is none."""
    if "class_names" not in arrays:
        return None
    names = arrays["class_names"]
    if names.ndim != 1 or len(names) > MOST_CLASSES:
        raise ValueError(
            f"{path}: class_names must be a list of at most {MOST_CLASSES:,} names, got shape {names.shape}"
        )
    return [class_name(str(name)) for name in names]


def list_arrays(path: Path) -> tuple[list[ArrayRow], list[str | None]]:
    """Rows of an .npz, and the label of each: its class name, or None for -1, an empty one, or no labels."""
    path = path.absolute()
    arrays = load_arrays(path)
    images = next((name for name in IMAGE_ARRAYS if name in arrays), None)
    if images is None:
        raise ValueError(f"{path} has no array 'images'; it has {', '.join(arrays) or 'nothing'}")
    check_images(arrays[images], f"{path}: {images}")
    count = len(arrays[images])
    check_row_count(count, path)
    rows = [ArrayRow(path, images, index) for index in range(count)]
    labels = next((arrays[name] for name in LABEL_ARRAYS if name in arrays), None)
    if labels is None:
        return rows, [None] * count
    if labels.shape != (count,):
        raise ValueError(f"{path}: labels must be one for each of {count} images, got {labels.shape}")
    names = class_names(arrays, path)
    return rows, [label_name(value, names, path) for value in labels.tolist()]


def check_row_count(count: int, path: Path) -> None:
    """Before there is a Python object for each row."""
    PARSED.check(ROW_BYTES * count, f"{path}: {count:,} rows: their list")


def check_images(array: NDArray[Any], name: str) -> None:
    if (
        array.dtype != np.uint8
        or array.ndim not in (3, 4)
        or (array.ndim == 4 and array.shape[3] not in (1, 3))
        or 0 in array.shape[1:]
    ):
        raise ValueError(
            f"{name} must be uint8 of shape (n, h, w) or (n, h, w, 1 or 3), got {array.dtype} {array.shape}"
        )


def label_name(value: object, names: list[str] | None, place: Path) -> str | None:
    """A class number (with names, if there are any) or a class name; -1, None and '' are no label."""
    if value is None or value == -1 or value == "":
        return None
    if isinstance(value, str):
        return class_name(value)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{place}: a label is a name, a class number from 0, or -1 for none, got {value!r}")
    if names is None:
        return str(value)
    if value >= len(names):
        raise ValueError(f"{place}: label {value}, but there are only {len(names)} class names")
    return names[value]
