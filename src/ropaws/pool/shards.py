"""Images inside larger files: WebDataset's tar shards, parquet files, saved datasets of Hugging Face.

Nothing is unpacked. A member of a shard is where its bytes are; links and names in an archive lead nowhere.
An image column of a saved dataset can hold bytes, or a path or an address that the datasets library would
open: a file of the person who reads it, or a server of the person who wrote it. Here only bytes count, and
nothing outside its folder is opened.
"""

import contextlib
import functools
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ropaws.core.files import IMAGE_FILE, JSON_FILE, PARSED, check_regular, is_image_file, read_json
from ropaws.core.labels import class_name
from ropaws.pool.array_files import label_name
from ropaws.pool.remote import absolute_source, address_of, open_source, source_name

LABEL_FILE = 4096  # bytes of a .cls member that are looked at
LABELS = ("label", "class", "category", "target")  # in the .json member of a sample, and columns of parquet


class TarMember(NamedTuple):
    """One image of a tar shard."""

    file: Path
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{source_name(self.file)}#{self.name}"

    def encoded(self) -> bytes:
        """The image as it is stored."""
        return _bytes_at(self.file, self.name, self.offset, self.size)


class ParquetRow(NamedTuple):
    """One image of a parquet file."""

    file: Path
    column: str
    row: int

    def __str__(self) -> str:
        return f"{source_name(self.file)}#{self.row}"

    def encoded(self) -> bytes:
        """The image as it is stored."""
        start, values = _row_group(self.file, self.column, self.row)
        value = values[self.row - start].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise ValueError("the row has no image bytes")
        return content


class Listed(NamedTuple):
    """What a shard holds."""

    images: Sequence[TarMember | ParquetRow]
    labels: list[str | None]
    notes: list[str]


def is_shard(path: Path) -> bool:
    """Does a file hold many images: a tar file, or a parquet file with image bytes?"""
    ending = path.suffix.lower()
    return ending == ".tar" or (ending == ".parquet" and _is_there(path) and image_column(path) is not None)


def list_shard(path: Path) -> Listed:
    """See list_tar and list_parquet."""
    column = None if path.suffix.lower() == ".tar" else image_column(path)
    return list_tar(path) if column is None else list_parquet(path, column)


def list_tar(path: Path) -> Listed:
    """The images of a tar shard in its order. A sample's label is its member .cls, or a field of its .json.

    Raises:
        ValueError: It is not an uncompressed tar file.
    """
    path = absolute_source(path)
    images: dict[str, TarMember] = {}
    labels: dict[str, str] = {}
    left_out = {"links or devices": 0, "images whose key stands twice": 0}
    notes = []
    try:
        for member in _members(path):
            key, _, ending = member.name.rpartition("/")[2].partition(".")
            key = f"{PurePosixPath(member.name).parent}/{key}"
            if not member.isreg():
                left_out["links or devices"] += not member.isdir()
            elif is_image_file(member.name):
                if key in images:
                    left_out["images whose key stands twice"] += 1
                images.setdefault(key, TarMember(path, member.name, member.offset_data, member.size))
            elif ending in ("cls", "json"):
                labels.update(_label_of(path, key, ending, member))
    except tarfile.ReadError as error:
        if not images:
            raise ValueError(
                f"{path} is not an uncompressed tar file ({error}); write it without compression"
            ) from None
        notes.append(f"{path} is damaged after {len(images):,} images ({error}); the rest is left out")
    notes += [f"{path}: {count:,} {what} were left out" for what, count in left_out.items() if count]
    return Listed(list(images.values()), [labels.get(key) for key in images], notes)


def _members(path: Path) -> Iterator[tarfile.TarInfo]:
    with open_source(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
        while (member := archive.next()) is not None:
            yield member
            archive.members = []  # type: ignore[attr-defined]  # the library would keep millions of them


def _label_of(path: Path, key: str, ending: str, member: tarfile.TarInfo) -> dict[str, str]:
    """The label of a sample, if this member says it."""
    most = LABEL_FILE if ending == "cls" else JSON_FILE.value
    if member.size > most:
        return {}
    text = _bytes_at(path, member.name, member.offset_data, member.size).decode("utf-8", "replace").strip()
    found: Any = text
    if ending == "json":
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(text)
            found = next((fields[name] for name in LABELS if name in fields), None)
        if not isinstance(found, str | int) or found == text:
            return {}
    return {key: class_name(str(found))} if str(found).strip() else {}


def _bytes_at(path: Path, name: str, offset: int, size: int) -> bytes:
    """A member that was listed, if it is still there: its own header stands right before it."""
    IMAGE_FILE.check(size, path)
    with open_source(path) as file:
        file.seek(offset - tarfile.BLOCKSIZE)
        head, data = file.read(tarfile.BLOCKSIZE), file.read(size)
    try:
        info = tarfile.TarInfo.frombuf(head, tarfile.ENCODING, "surrogateescape")
        same = info.size == size and (info.name == name or len(name) >= tarfile.LENGTH_NAME)
    except tarfile.HeaderError:
        same = False
    if not same:
        raise OSError(f"{path} was changed after it was listed; try again when it is complete")
    if len(data) < size:
        raise OSError(f"{path} ends in the middle of an image; copy it again")
    return data


def image_column(path: Path) -> str | None:
    """The column of image bytes of a parquet file, as Hugging Face writes it; None for a table of paths."""
    pyarrow = _pyarrow(path)
    try:
        with open_source(path) as file:
            schema = pyarrow.parquet.read_schema(file)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable table ({error!s:.200}); write it again") from None
    for field in schema:
        kind = field.type
        if pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            return str(field.name)
        if field.name in ("bytes", "image") and pyarrow.types.is_binary(kind):
            return str(field.name)
    return None


def list_parquet(path: Path, column: str) -> Listed:
    """The images of a parquet file in its order, with its labels. Bytes are read when they are asked for."""
    path = absolute_source(path)
    with _parquet(path) as file:
        count = file.metadata.num_rows
        label = next((name for name in LABELS if name in file.schema_arrow.names), None)
        values = [] if label is None else file.read(columns=[label]).column(label).to_pylist()
        names = _class_names(file.schema_arrow.metadata or {}, label)
    images = [ParquetRow(path, column, row) for row in range(count)]
    return Listed(images, [label_name(value, names, path) for value in values or [None] * count], [])


def _class_names(metadata: Mapping[bytes, bytes], label: str | None) -> list[str] | None:
    """What the numbers of a label column stand for, where Hugging Face has noted it."""
    with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return list(map(class_name, names))
    return None


@functools.lru_cache(maxsize=64)
def _starts(path: Path, _modified: int) -> tuple[int, ...]:
    """The first row of each row group, and the number of rows."""
    with _parquet(path) as file:
        counts = [file.metadata.row_group(k).num_rows for k in range(file.metadata.num_row_groups)]
    return tuple(sum(counts[:k]) for k in range(len(counts) + 1))


def _row_group(path: Path, column: str, row: int) -> tuple[int, Any]:
    """The row group of a row: its first row, and the column. Rows are asked for in order, so one is kept."""
    modified = 0 if address_of(path) else check_regular(path, None).st_mtime_ns
    starts = _starts(path, modified)
    group = next(k for k in reversed(range(len(starts) - 1)) if starts[k] <= row)
    return starts[group], _read_group(path, modified, column, group)


@functools.lru_cache(maxsize=1)
def _read_group(path: Path, _modified: int, column: str, group: int) -> Any:
    with _parquet(path) as file:
        PARSED.check(file.metadata.row_group(group).total_byte_size, f"row group {group} of {path}")
        return file.read_row_group(group, columns=[column]).column(column).combine_chunks()


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    with open_source(path) as stream, _pyarrow(path).parquet.ParquetFile(stream) as file:
        yield file


def _is_there(path: Path) -> bool:
    return address_of(path) is not None or path.is_file()


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: parquet files need pyarrow; pip install 'ropaws[parquet]'") from None
    return pyarrow


def join(parts: Iterable[Listed]) -> Listed:
    """Several shards as one."""
    together = list(parts)
    return Listed(
        [image for part in together for image in part.images],
        [label for part in together for label in part.labels],
        [note for part in together for note in part.notes],
    )


STATE = "state.json"


class DatasetRow(NamedTuple):
    """One image of a saved dataset."""

    folder: Path
    column: str
    row: int

    def __str__(self) -> str:
        return f"{self.folder}#{self.row}"

    def encoded(self) -> bytes:
        """The image as it is stored, such as a JPEG."""
        value = _undecoded(self.folder, self.column)[self.row][self.column]
        content = value.get("bytes") if isinstance(value, dict) else None
        if not isinstance(content, bytes):
            place = value.get("path") if isinstance(value, dict) else None
            raise ValueError(
                f"the image is not in the dataset, which names {place!r} instead; save it again, with its"
                " images embedded"
            )
        return content


def is_dataset(folder: Path) -> bool:
    """Was this folder written by save_to_disk of Hugging Face datasets?"""
    return (folder / STATE).is_file() or (folder / "dataset_dict.json").is_file()


@functools.lru_cache(maxsize=8)
def load_dataset(folder: Path) -> Any:
    """The dataset; its columns are decoded when they are asked for, which only _undecoded may do.

    Raises:
        ValueError: It cannot be read, or names files outside its folder.
    """
    if not (folder / STATE).is_file():
        splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise ValueError(f"{folder} holds several splits; name one of them: {folder}/... ({splits})")
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{folder}: saved datasets need pip install 'ropaws[huggingface]'") from None
    _check_files(folder)
    try:
        return datasets.load_from_disk(str(folder)).with_format(None)
    except Exception as error:  # the library raises nearly anything on damaged files
        raise ValueError(
            f"{folder} is not a readable saved dataset ({error!s:.200}); save it again"
        ) from None


def _check_files(folder: Path) -> None:
    """Raise an error unless the dataset is made of files in its own folder."""
    if "::" in str(folder):  # the library would take it for a chain of addresses
        raise ValueError(f"{folder}: the path of a saved dataset must not contain '::'; rename the folder")
    state = read_json(folder / STATE)
    parts = state.get("_data_files") if isinstance(state, dict) else None
    listed = parts if isinstance(parts, list) else [None]
    names = [part["filename"] for part in listed if isinstance(part, dict) and "filename" in part]
    if len(names) < len(listed) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{folder / STATE} does not list the files of a saved dataset; save it again")
    for name in names:
        place = folder / name
        if Path(name).name != name or place.resolve().parent != folder.resolve() or not place.is_file():
            raise ValueError(
                f"{folder / STATE} names {name!r}, which is not a file of that folder; save it again"
            )


@functools.lru_cache(maxsize=8)
def _undecoded(folder: Path, column: str) -> Any:
    """The image column alone, as it is stored."""
    import datasets

    alone = load_dataset(folder).select_columns([column])
    return alone.cast_column(column, datasets.Image(decode=False))


def list_dataset(folder: Path) -> tuple[list[DatasetRow], list[str | None]]:
    """Rows of a saved dataset; the image column and the label column are found by their types."""
    folder = folder.absolute()
    dataset = load_dataset(folder)
    kinds = {name: type(feature).__name__ for name, feature in dataset.features.items()}
    image = next((name for name, kind in kinds.items() if kind == "Image"), None)
    if image is None:
        raise ValueError(f"{folder} has no column of images; it has {', '.join(kinds) or 'none'}")
    rows = [DatasetRow(folder, image, index) for index in range(len(dataset))]
    label = next(
        (n for n, kind in kinds.items() if kind == "ClassLabel"), "label" if "label" in kinds else None
    )
    if label is None:
        return rows, [None] * len(rows)
    if kinds[label] not in ("ClassLabel", "Value"):
        raise ValueError(f"{folder}: column {label!r} must be class numbers or names, got {kinds[label]}")
    names = list(map(class_name, dataset.features[label].names)) if kinds[label] == "ClassLabel" else None
    return rows, [label_name(value, names, folder) for value in dataset[label]]
