"""Which images there are, and what is known of them: folders, tables, arrays, saved datasets."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ropaws.data.files.csv_cells import read_csv
from ropaws.data.files.decoding import ImageRef, is_image_file, walk_images
from ropaws.data.files.rows import list_arrays
from ropaws.data.files.saved_datasets import is_dataset, list_dataset
from ropaws.limits import PARSED, TABLE_FILE
from ropaws.runs.opening import ROW, check_regular, check_rows, read_regular

TABLES = (".csv", ".parquet")
PARQUET_ROWS = 256  # that are read at a time


class Listing(NamedTuple):
    """Images in order; the label of each, or None."""

    images: tuple[ImageRef, ...] = ()
    labels: tuple[str | None, ...] = ()


def list_labeled(source: Path) -> Listing:
    """A folder with a folder for each class, a table of path and label, an .npz, or a saved dataset."""
    listing = _list_rows(source)
    if listing is None:
        if source.suffix.lower() in TABLES:
            listing = read_table(source)
        elif source.is_dir():
            listing = _class_folders(source)
        else:
            raise FileNotFoundError(f"--labeled: {_missing(source)}")
    known = {label for label in listing.labels if label is not None}
    if not known:
        raise ValueError(f"--labeled: {source} has no label; every row's label is empty")
    _check_spelling(known, source)
    return listing


def list_unlabeled(source: Path) -> Listing:
    """A folder, walked to the bottom; an image; a table, .npz or dataset, whose labels are not looked at."""
    rows = _list_rows(source)
    images: tuple[ImageRef, ...]
    if rows is not None:
        images = rows.images
    elif source.suffix.lower() in TABLES:
        images = read_table(source, needs_label=False).images
    elif source.is_dir():
        images = tuple(walk_images(source))
    elif source.is_file() and is_image_file(source.name):
        images = (source,)
    else:
        raise FileNotFoundError(_missing(source))
    if not images:
        raise ValueError(f"{source} has no image; known are .jpg .png .webp .bmp .gif .tif")
    return Listing(images, (None,) * len(images))


def merge(listings: Sequence[Listing]) -> Listing:
    """One listing without repeats; an image that is labeled anywhere keeps its label."""
    label_of: dict[ImageRef, str | None] = {}
    for listing in listings:
        for image, label in zip(listing.images, listing.labels, strict=True):
            place = image.absolute() if isinstance(image, Path) else image
            if label_of.get(place) is None:
                label_of[place] = label
    return Listing(tuple(label_of), tuple(label_of.values()))


def _list_rows(source: Path) -> Listing | None:
    """Images that are not files; None for any other source."""
    if source.suffix.lower() == ".npz":
        rows, labels = list_arrays(source)
        return Listing(tuple(rows), tuple(labels))
    if source.is_dir() and is_dataset(source):
        dataset_rows, labels = list_dataset(source)
        return Listing(tuple(dataset_rows), tuple(labels))
    return None


def _missing(source: Path) -> str:
    if source.exists():
        return f"{source} is neither a folder nor a {', '.join(TABLES)} or .npz file"
    return f"no folder or table at {source}"


def _class_folders(source: Path) -> Listing:
    paths: list[Path] = []
    labels: list[str | None] = []
    with os.scandir(source) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise ValueError(f"--labeled: {source} has no folder in it; it needs one for each class")
    for name in folders:
        found = list(walk_images(source / name))
        if not found:
            raise ValueError(f"--labeled: class folder {source / name} has no image; fill it or remove it")
        paths += found
        labels += [name] * len(found)
    return Listing(tuple(paths), tuple(labels))


def _check_spelling(labels: Iterable[str], source: Path) -> None:
    seen: dict[str, str] = {}
    for label in sorted(labels):
        plain = " ".join(label.casefold().split())
        if plain in seen:
            raise ValueError(
                f"--labeled: {source} has the labels {seen[plain]!r} and {label!r}, which differ only by"
                " case or blanks; make them one, or tell them apart"
            )
        seen[plain] = label


def read_table(path: Path, *, needs_label: bool = True) -> Listing:
    """Rows of path and label. Paths are relative to the table's folder; an empty label is none."""
    try:
        check_regular(path, TABLE_FILE)
    except FileNotFoundError:
        raise FileNotFoundError(f"no table at {path}") from None
    rows: Iterable[Mapping[str, object]]
    wanted = ("path", "label") if needs_label else ("path",)
    if path.suffix.lower() == ".csv":
        check_rows(read_regular(path, TABLE_FILE), path)
        rows = read_csv(path)
    else:
        rows = _read_parquet(path, wanted)
    paths: list[Path] = []
    labels: list[str | None] = []
    for row in rows:
        for column in wanted:
            if column not in row:
                raise ValueError(
                    f"{path} has no column {column!r}; it has {', '.join(map(str, row)) or 'none'}"
                )
        paths.append(path.parent / str(row["path"]))
        labels.append(str(row["label"]).strip() or None if row.get("label") is not None else None)
    if not paths:
        raise ValueError(f"{path} has no rows")
    missing = [place for place in paths if not place.is_file()]
    if missing:
        raise ValueError(f"{path} names {len(missing)} files that are not there, the first is {missing[0]}")
    return Listing(tuple(paths), tuple(labels))


def _read_parquet(path: Path, wanted: Sequence[str]) -> Iterable[Mapping[str, object]]:
    """A few rows at a time: a small file can stand for many gigabytes."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: parquet tables need pyarrow; pip install 'ropaws[parquet]'") from None
    count = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in ("path", "label") if name in file.schema_arrow.names]
            if not set(wanted) <= set(columns):
                columns = file.schema_arrow.names  # for the error, which names them
            for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
                count += batch.nbytes + ROW * len(batch)
                PARSED.check(count, f"{path}, once read,")
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable table ({error!s:.200}); write it again") from None
