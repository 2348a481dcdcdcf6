"""Which images there are, and what is known of them: folders, tables, exports, arrays, saved datasets."""

import codecs
import csv
import functools
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from ropaws.core.files import PARSED, ROW, TABLE_FILE, check_regular, check_rows, is_image_file, read_regular
from ropaws.core.labels import OUT_OF_CLASS_NAME, class_name, is_verdict
from ropaws.pool.array_files import list_arrays
from ropaws.pool.content import ImageRef
from ropaws.pool.decoding import decode_whole, walk_images
from ropaws.pool.neighbor_formats import read_label_export
from ropaws.pool.remote import (
    RemoteImage,
    address_of,
    checked_address,
    inside_of,
    list_remote,
    source_name,
    table_copy,
)
from ropaws.pool.shards import is_dataset, is_shard, join, list_dataset, list_shard

# What a spreadsheet takes for the beginning of a formula, or skips before one; full-width forms too.
_BEGINS = r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]"
_FORMULA = re.compile(f"'*{_BEGINS}")
_MARKED = re.compile(f"'+{_BEGINS}")


def as_cell(value: Any) -> Any:
    """A text as it is written; numbers stay as they are."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def from_cell(text: str) -> str:
    """The text that as_cell was given."""
    return text[1:] if _MARKED.match(text) else text


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows one by one; the columns are those of the first. Returns their number."""
    count = 0
    # Names that are not UTF-8 are written as they are on disk.
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        for row in rows:
            if count == 0:
                writer.writerow([as_cell(name) for name in row])
            writer.writerow([as_cell(value) for value in row.values()])
            count += 1
    return count


def read_csv(path: Path) -> Iterator[dict[str, str | None]]:
    """Rows of a table with a head. A row that is too short has None, what is too long is left out.

    Raises:
        ValueError: The file is not such a table.
    """
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        try:
            for row in csv.DictReader(file, delimiter=separator(path)):
                yield {
                    from_cell(name): None if value is None else from_cell(value)
                    for name, value in row.items()
                    if name is not None
                }
        except csv.Error as error:  # such as a field of more than 131,072 characters
            raise ValueError(f"{path} is not a readable table ({error}); write it again") from None


def separator(path: Path) -> str:
    """What separates the columns of a text table: the comma, semicolon or tab that its head has most of.

    Raises:
        ValueError: The file is UTF-16, as some spreadsheets write it.
    """
    with path.open("rb") as file:
        head = file.readline(HEAD)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path} is UTF-16; save it as CSV in UTF-8")
    return max(SEPARATORS, key=lambda character: head.count(character.encode()))


TABLES = (".csv", ".tsv", ".parquet", ".json")  # the last: labels that other tools have exported
SEPARATORS = (",", ";", "\t")
HEAD = 1 << 16  # bytes of a table's first line that are looked at
# Columns by the names that other tools give them; the first is ours, and wins.
COLUMNS = {
    "path": ("path", "filename", "file_name", "filepath", "file_path", "image", "image_path"),
    "label": ("label", "class", "category", "target"),
}
PARQUET_ROWS = 256  # that are read at a time
# The column of tables that `predict` and `explore` write, and what both write into it.
OUTSIDE, YES, NO = "out_of_class", ("true", "yes", "1"), ("", "false", "no", "0")
NO_IMAGE = "has no image; known are .jpg .png .webp .bmp .gif .tif .ppm .avif .heic"
Sources = Path | str | Sequence[Path | str]


@dataclass(frozen=True)
class Pool:
    """Images in order, and the label of each, or None: folders, tables, arrays and saved datasets alike.

    Nothing is decoded until an image is asked for.

    >>> import numpy as np, ropaws, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> np.savez(folder / "own.npz", images=np.zeros((3, 8, 6), np.uint8), labels=["cat", "", "dog"])
    >>> pool = ropaws.Pool.open(labeled=folder / "own.npz")
    >>> len(pool), pool.labels, pool.image(0).size
    (3, ('cat', None, 'dog'), (6, 8))
    >>> ropaws.Pool.open(folder / "own.npz").labels
    (None, None, None)
    """

    images: tuple[ImageRef, ...] = ()  # where each is stored
    labels: tuple[str | None, ...] = ()
    notes: tuple[str, ...] = ()  # a line for each thing that was left out

    @classmethod
    def open(
        cls,
        unlabeled: Sources = (),
        *,
        labeled: Sources = (),
        test: Sources = (),
        out_of_class: Sources = (),
        prefix: str = "--",
        may_be_empty: bool = False,
    ) -> "Pool":
        """List all images of some sources: labeled ones first, each once, also where sources overlap.

        Args:
            unlabeled: Folders, searched recursively, images, tables of paths, .npz files, saved datasets;
                labels in them are not looked at.
            labeled: Folders with a folder for each class, tables of path and label, .npz files or datasets.
                The label out-of-class is no class: the image belongs to none.
            test: As labeled.
            out_of_class: As unlabeled; these images belong to no class.
            prefix: Of the names of these arguments in errors: "--" for options, "data." for settings.
            may_be_empty: A class folder without an image is a note, and no error.

        Raises:
            FileNotFoundError: A source is not there.
            ValueError: A source has no image or no label, or an image has two labels.
        """
        return merge(
            [
                *(
                    list_labeled(source, name=f"{prefix}labeled", may_be_empty=may_be_empty)
                    for source in _paths(labeled)
                ),
                *(
                    list_tests(source, name=f"{prefix}test", may_be_empty=may_be_empty)
                    for source in _paths(test)
                ),
                *(list_outside(source, f"{prefix}out-of-class") for source in _paths(out_of_class)),
                *(list_unlabeled(source) for source in _paths(unlabeled)),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The path of each image; a row of an array or a dataset has the path of that and its number."""
        return tuple(map(str, self.images))

    def image(self, index: int) -> Image.Image:
        """Decode an image whole, upright, in RGB.

        Raises:
            UnreadableError: It cannot be decoded, or is not there any more.
        """
        return decode_whole(self.images[index])

    @property
    def are_files(self) -> bool:
        """Is every image a file of its own, here or behind an address?"""
        return all(isinstance(image, Path | RemoteImage) for image in self.images)


def _paths(sources: Sources) -> list[Path]:
    return [Path(source) for source in ([sources] if isinstance(sources, Path | str) else sources)]


def list_labeled(source: Path, *, name: str = "--labeled", may_be_empty: bool = False) -> Pool:
    """A folder with a folder for each class, a table of path and label, an .npz, or a saved dataset.

    name: the option or setting that the source comes from, for errors
    may_be_empty: a class folder without an image is a note, and no error
    """
    pool = list_tests(source, name=name, may_be_empty=may_be_empty)
    if not set(pool.labels) - {None, OUT_OF_CLASS_NAME}:
        raise ValueError(f"{name}: {source} has no label of a class; all its labels are {OUT_OF_CLASS_NAME}")
    return pool


def list_tests(source: Path, *, name: str = "--test", may_be_empty: bool = False) -> Pool:
    """List test images like list_labeled; no class needs to be there."""
    pool = _list_rows(source)
    if pool is None:
        if source.suffix.lower() in TABLES:
            pool = read_table(source)
        elif source.is_dir():
            pool = _class_folders(source, name, may_be_empty)
        else:
            raise FileNotFoundError(f"{name}: {_missing(source)}")
    known = {label for label in pool.labels if label is not None}
    if not known:
        raise ValueError(f"{name}: {source_name(source)} has no label; {_without_label(source)}")
    _check_spelling(known, f"{name}: {source}")
    if not any(map(is_verdict, known)):
        return pool
    labels = (OUT_OF_CLASS_NAME if label and is_verdict(label) else label for label in pool.labels)
    return replace(pool, labels=tuple(labels))


def _without_label(source: Path) -> str:
    if inside_of(source) and source.suffix.lower() not in TABLES:
        return "its images need a folder for each class"
    return "every row's label is empty"


def list_outside(source: Path, name: str) -> Pool:
    """Images that belong to no class, as list_unlabeled; name: the option, for errors."""
    try:
        pool = list_unlabeled(source)
    except (OSError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    return replace(pool, labels=(OUT_OF_CLASS_NAME,) * len(pool))


def list_unlabeled(source: Path) -> Pool:
    """A folder, walked to the bottom; an image; a table, .npz or dataset, whose labels are not looked at."""
    rows = _list_rows(source)
    images: tuple[ImageRef, ...]
    notes: tuple[str, ...] = ()
    if rows is not None:
        images, notes = rows.images, rows.notes
    elif source.suffix.lower() in TABLES:
        table = read_table(source, needs_label=False)
        images, notes = table.images, table.notes
    elif source.is_dir():
        images = tuple(walk_images(source))
    elif source.is_file() and is_image_file(source.name):
        images = (source,)
    else:
        raise FileNotFoundError(_missing(source))
    if not images:
        raise ValueError(f"{source} {NO_IMAGE}")
    return Pool(images, (None,) * len(images), notes)


def merge(pools: Sequence[Pool]) -> Pool:
    """One pool in which each image is once, also where a link or `..` leads to it again.

    An image that is labeled anywhere keeps its label.

    Raises:
        ValueError: An image has two labels.
    """
    places, notes = _RealPlaces(), [note for pool in pools for note in pool.notes]
    first: dict[Hashable, ImageRef] = {}
    label_of: dict[Hashable, str | None] = {}
    count, example = 0, ""  # of images that another path has led to
    for pool in pools:
        for image, label in zip(pool.images, pool.labels, strict=True):
            image = image.absolute() if isinstance(image, Path) else image
            place = places.of(image)
            known = first.setdefault(place, image)
            also = "" if known == image else f" (the same image as {known})"
            known_label = label_of.setdefault(place, label)
            if known_label is None:
                label_of[place] = label
            elif label not in (None, known_label):
                raise ValueError(f"{image} has two labels, {known_label!r} and {label!r}{also}; remove one")
            if also:
                count, example = count + 1, example or f"{image}{also}"
    if count:
        notes.append(f"{count:,} images were named twice, by a link or ..; each counts once: {example}")
    return Pool(tuple(first.values()), tuple(label_of.values()), tuple(notes))


class _RealPlaces:
    """Where images really are. Folders are looked up once: a pool has far fewer of them than images."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}

    def of(self, image: ImageRef) -> Hashable:
        """Equal for two images if and only if they are one."""
        if not isinstance(image, Path):
            file = str(image[0])
            return (file if address_of(file) else self._real(file), *image[1:])
        folder, name = os.path.split(image)
        return os.path.realpath(image) if os.path.islink(image) else os.path.join(self._real(folder), name)

    def _real(self, folder: str) -> str:
        if folder not in self.folders:
            self.folders[folder] = os.path.realpath(folder)
        return self.folders[folder]


def _list_rows(source: Path) -> Pool | None:
    """Images that are not files; None for any other source."""
    if shards := _shards(source):
        images, shard_labels, notes = join(list_shard(shard) for shard in shards)
        return Pool(tuple(images), tuple(shard_labels), tuple(notes))
    if source.suffix.lower() == ".npz":
        rows, labels = list_arrays(source)
        return Pool(tuple(rows), tuple(labels))
    if source.is_dir() and is_dataset(source):
        dataset_rows, labels = list_dataset(source)
        return Pool(tuple(dataset_rows), tuple(labels))
    address = inside_of(source)
    if address is None or source.suffix.lower() in TABLES:
        return None
    return _list_remote(address)


def _list_remote(address: str) -> Pool:
    """Images below an address; the folder that one is in is its label, where it is in one.

    A folder that all are in, as archives have it, is not looked at.
    """
    found = list_remote(address)
    if not found:
        raise ValueError(f"{address} {NO_IMAGE}")
    folders = [below.split("/")[:-1] for below, _ in found]
    depth = 0
    while len(folders[0]) > depth and len({tuple(parts[: depth + 1]) for parts in folders}) == 1:
        depth += 1
    labels = (class_name(parts[depth]) if len(parts) > depth else None for parts in folders)
    return Pool(tuple(image for _, image in found), tuple(labels))


def _shards(source: Path) -> list[Path]:
    """The shards of a source: itself, or all that is in a folder, if that is shards alone."""
    if source.is_file() or address_of(source):
        return [source] if is_shard(source) else []
    if not source.is_dir():
        return []
    inside: list[Path] = []
    with os.scandir(source) as entries:
        for entry in entries:
            if not entry.name.lower().endswith((".tar", ".parquet")):
                return []
            inside.append(Path(entry.path))
    return sorted(inside) if all(map(is_shard, inside)) else []


def _missing(source: Path) -> str:
    if source.exists():
        return f"{source} is neither a folder nor a {', '.join(TABLES)} or .npz file"
    return f"no folder or table at {source}"


def _class_folders(source: Path, option: str, may_be_empty: bool) -> Pool:
    paths: list[Path] = []
    labels: list[str | None] = []
    notes: list[str] = []
    with os.scandir(source) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise ValueError(f"{option}: {source} has no folder in it; it needs one for each class")
    for name in folders:
        found = list(walk_images(source / name))
        if not found:
            notes.append(f"{option}: class folder {source / name} has no image; fill it or remove it")
        paths += found
        labels += [class_name(name)] * len(found)
    if notes and not (paths and may_be_empty):
        raise ValueError(notes[0])
    return Pool(tuple(paths), tuple(labels), tuple(notes))


def _check_spelling(labels: Iterable[str], place: str) -> None:
    seen: dict[str, str] = {}
    for label in sorted(labels):
        plain = " ".join(label.casefold().split())
        if plain in seen:
            raise ValueError(
                f"{place} has the labels {seen[plain]!r} and {label!r}, which differ only by case or blanks;"
                " make them one, or tell them apart"
            )
        seen[plain] = label


def read_table(path: Path, *, needs_label: bool = True) -> Pool:
    """Rows of path and label. Paths are relative to the table's folder; an empty label is none. A row
    that is marked as out-of-class has that as its label, whatever else it has.
    """
    address = address_of(path)
    if address is None:
        try:
            check_regular(path, TABLE_FILE)
        except FileNotFoundError:
            raise FileNotFoundError(f"no table at {path}") from None
        return _table_of(path, path.parent, path, needs_label)
    with table_copy(address) as copy:
        return _table_of(copy, address.rpartition("/")[0], address, needs_label)


def _table_of(path: Path, folder: Path | str, shown: Path | str, needs_label: bool) -> Pool:
    """folder: what paths are relative to; shown: the table as a person knows it."""
    rows: Iterable[Mapping[str, object]]
    wanted = ("path", "label") if needs_label else ("path",)
    if path.suffix.lower() == ".json":
        rows = read_label_export(path, folder)
    elif path.suffix.lower() != ".parquet":
        check_rows(read_regular(path, TABLE_FILE), path)
        rows = read_csv(path)
    else:
        rows = read_parquet(path, (OUTSIDE, *COLUMNS["path"], *COLUMNS["label"]))
    paths: list[Path | RemoteImage] = []
    labels: list[str | None] = []
    outside = 0
    found: dict[str, str] = {}
    for row in rows:
        found = found or _find_columns(row, wanted, shown)
        paths.append(_place(str(row[found["path"]]), folder))
        cell = row[found["label"]] if needs_label else None
        label = "" if cell is None else class_name(str(cell).strip())
        if needs_label and _is_outside(row.get(OUTSIDE), shown):
            outside, label = outside + 1, OUT_OF_CLASS_NAME
        labels.append(label or None)
    if not paths:
        raise ValueError(f"{shown} has no rows")
    missing = [place for place in paths if isinstance(place, Path) and not place.is_file()]
    if missing:
        raise ValueError(f"{shown} names {len(missing)} files that are not there, the first is {missing[0]}")
    notes = [f"{shown}: column {own!r} is read as {ours}" for ours, own in found.items() if own != ours]
    if outside:
        notes.append(f"{shown}: {outside:,} rows are marked as {OUTSIDE}: they belong to no class")
    return Pool(tuple(paths), tuple(labels), tuple(notes))


def _place(cell: str, folder: Path | str) -> Path | RemoteImage:
    """What a cell names: an address, or a path below the folder of its table."""
    if "://" in cell:
        return RemoteImage(checked_address(cell))
    return folder / cell if isinstance(folder, Path) else RemoteImage(f"{folder}/{cell}")


def _find_columns(row: Mapping[str, object], wanted: Iterable[str], path: Path | str) -> dict[str, str]:
    """The column of a table for each that is wanted, by our name for it or one that other tools use."""
    found = {}
    for ours in wanted:
        names = [name for name in row if name.strip().casefold() in COLUMNS[ours]]
        if ours in row:
            names = [ours]
        if len(names) > 1:
            raise ValueError(
                f"{path} has several columns that may be the {ours}: {', '.join(names)}; name one {ours!r}"
            )
        if not names:
            raise ValueError(
                f"{path} has no column {ours!r} (nor {', '.join(COLUMNS[ours][1:])});"
                f" it has {', '.join(map(str, row)) or 'none'}"
            )
        found[ours] = names[0]
    return found


def _is_outside(value: object, path: Path | str) -> bool:
    text = "" if value is None else str(value).strip().casefold()
    if text not in (*YES, *NO):
        raise ValueError(f"{path}: {OUTSIDE} must be True or False, yes or empty, got {value!r:.80}")
    return text in YES


def read_parquet(path: Path, wanted: Sequence[str] | None) -> Iterator[Mapping[str, object]]:
    """A few rows at a time: a small file can stand for many gigabytes.

    wanted: columns in small letters; others are not read, unless none of these is there. None for all
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: parquet tables need pyarrow; pip install 'ropaws[parquet]'") from None
    count = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if wanted is None or name.strip().casefold() in wanted]
            columns = columns or names  # for the error, which names them
            for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
                count += batch.nbytes + ROW * len(batch)
                PARSED.check(count, f"{path}, once read,")
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable table ({error!s:.200}); write it again") from None
