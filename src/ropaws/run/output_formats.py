"""Rows of predictions as files: tables, and what Label Studio, FiftyOne and COCO readers open.

All writers take rows one by one. What they write is read back as labels (pool/neighbor_formats.py).
"""

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from ropaws.core.files import replacing
from ropaws.insight.neighbors import PoolMap
from ropaws.pool.content import UnreadableError, image_size
from ropaws.pool.listing import read_csv, write_csv

Row = dict[str, Any]
FormatName = Literal["csv", "parquet", "jsonl", "label-studio", "fiftyone", "coco"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
OTHER_TOOLS = ("label-studio", "fiftyone", "coco")  # they name files, and have a label, not all columns
ENDING = {"csv": ".csv", "parquet": ".parquet", "jsonl": ".jsonl"} | dict.fromkeys(OTHER_TOOLS, ".json")

FIELDS = (
    *("path", "label", "nearest_class", "confidence", "in_domain", "out_of_class"),
    *("nearest", "similarity"),
)
ANSWERED = "answered"  # of explore: the label is one of the person
SORTED_TO = "sorted_to"  # with --copy-to or --move-to: where the image went
TEXTS = ("path", "label", "nearest_class", "nearest", SORTED_TO)  # and the names of the most likely classes
PLACE = ("x", "y", "neighbors")  # of the map, in parquet
PARQUET_ROWS = 10_000  # rows that are held before they are written
NEEDS_PYARROW = "--out: parquet needs pyarrow; pip install 'ropaws[parquet]'"
# How Label Studio names the image, and the choice of a class, in its labeling interface.
IMAGE, CHOICE = "image", "choice"
LOCAL_FILES = "/data/local-files/?d="  # then a path below the document root, which is / unless it is set


def format_of(out: Path, chosen: FormatName | None) -> FormatName:
    """The format to write: the one that was chosen, or else the one that the name of the file says.

    Raises:
        ValueError: The name says nothing, or another format.
    """
    ending = out.suffix.lower()
    if chosen is not None:
        if ending != ENDING[chosen]:
            raise ValueError(f"--out must end in {ENDING[chosen]} for --format {chosen}, got {out.name}")
        return chosen
    if ending == ".json":
        raise ValueError(
            f"--out {out.name}: several tools read .json; add --format {' or '.join(OTHER_TOOLS)}"
        )
    named = next((name for name, end in ENDING.items() if end == ending), None)
    if named is None:
        raise ValueError(f"--out must end in .csv, .jsonl or .parquet, got {out.name}")
    return named  # type: ignore[return-value]


@dataclass(frozen=True)
class Output:
    """What is written besides the rows themselves."""

    format: FormatName
    class_names: Sequence[str] = ()
    placed: Callable[[], PoolMap] | None = None  # of parquet: the map, asked for when all rows are known


def write_labels(path: Path, rows: Iterable[Row], output: Output) -> int:
    """Write rows one by one. Returns their number."""
    writers: dict[str, Callable[[Path, Iterable[Row]], int]] = {
        "csv": write_csv,
        "jsonl": _write_jsonl,
        "parquet": _write_parquet,
        "label-studio": _write_label_studio,
        "fiftyone": lambda place, given: _write_fiftyone(place, given, output.class_names),
        "coco": lambda place, given: _write_coco(place, given, output.class_names),
    }
    with replacing(path) as temporary:
        count = writers[output.format](temporary, rows)
        if output.placed is not None and count:
            _add_map(temporary, output.placed())
        return count


# Tables


def _write_jsonl(path: Path, rows: Iterable[Row]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            count += 1
    return count


def _write_parquet(path: Path, rows: Iterable[Row]) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(NEEDS_PYARROW) from None
    count = 0
    texts = ({name: _as_text(value) for name, value in row.items()} for row in rows)
    writer = None
    try:
        while part := list(itertools.islice(texts, PARQUET_ROWS)):
            table = pyarrow.Table.from_pylist(part, None if writer is None else writer.schema)
            if writer is None:  # a column without any value yet, such as confidence where no row has a label
                number, fields = pyarrow.float64(), table.schema
                empty = [pyarrow.types.is_null(field.type) for field in fields]
                fixed = [
                    field.with_type(number) if e else field for field, e in zip(fields, empty, strict=True)
                ]
                table = table.cast(pyarrow.schema(fixed))
            writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
            count += len(part)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:  # no image could be read: an empty table, not a file that no one can open
        pyarrow.parquet.write_table(pyarrow.table({}), path)
    return count


def _add_map(path: Path, placed: PoolMap) -> None:
    """Write a parquet table anew, with x, y and neighbors; rows before those of the map have none of them.

    neighbors is what `embedding-atlas --neighbors` reads: numbers of rows, from 0 on, and cosine distances.
    """
    import pyarrow.parquet

    other = path.with_name(f"{path.name}.map")
    try:
        with contextlib.ExitStack() as stack:
            table = stack.enter_context(pyarrow.parquet.ParquetFile(path))
            before, start, writer = table.metadata.num_rows - len(placed.plane), 0, None
            for batch in table.iter_batches(PARQUET_ROWS):
                whole = pyarrow.Table.from_batches([batch])
                for name, column in _place_columns(placed, before, start, start + len(batch)).items():
                    whole = whole.append_column(name, column)
                if writer is None:
                    writer = stack.enter_context(pyarrow.parquet.ParquetWriter(other, whole.schema))
                writer.write_table(whole)
                start += len(batch)
        other.replace(path)
    finally:
        other.unlink(missing_ok=True)


def _place_columns(placed: PoolMap, before: int, start: int, stop: int) -> dict[str, Any]:
    """Columns of some rows of a table that has other rows before those of the map."""
    import pyarrow

    empty = [None] * max(0, min(before, stop) - start)
    part = slice(max(0, start - before), max(0, stop - before))
    x, y = placed.plane[part].T.tolist()
    number = pyarrow.float32()
    columns = {"x": pyarrow.array(empty + x, number), "y": pyarrow.array(empty + y, number)}
    if placed.neighbors is None:
        return columns
    ids = (placed.neighbors.position[part] + before).tolist()
    distances = (1 - placed.neighbors.similarity[part]).clamp_min(0).tolist()
    found = [{"ids": i, "distances": d} for i, d in zip(ids, distances, strict=True)]
    kind = pyarrow.struct({"ids": pyarrow.list_(pyarrow.int64()), "distances": pyarrow.list_(number)})
    return columns | {"neighbors": pyarrow.array(empty + found, kind)}


def _as_text(value: Any) -> Any:
    return (
        value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if isinstance(value, str)
        else value
    )


# What other tools open


def _write_list(file: IO[str], values: Iterable[str]) -> int:
    """Items of a list or a dictionary, already JSON, a line each. Returns their number."""
    count = 0
    for value in values:
        file.write(",\n" if count else "\n")
        file.write(value)
        count += 1
    return count


def _write_label_studio(path: Path, rows: Iterable[Row]) -> int:
    """Tasks of Label Studio. A label of a person is an annotation, one of a classifier a prediction."""
    with path.open("w", encoding="utf-8") as file:
        file.write("[")
        count = _write_list(file, (json.dumps(_task(row)) for row in rows))
        file.write("\n]\n")
    return count


def _task(row: Row) -> Row:
    data = {name: row[name] for name in FIELDS if name in row and name != "label"}
    value = {"choices": [row["label"]]}
    result = [{"from_name": CHOICE, "to_name": IMAGE, "type": "choices", "value": value}]
    task = {"data": {IMAGE: LOCAL_FILES + quote(os.fsencode(row["path"].lstrip("/")))} | data}
    if row.get(ANSWERED):
        return task | {"annotations": [{"result": result if row["label"] else []}]}
    said = {"model_version": "ropaws", "score": row["confidence"], "result": result}
    return task | {"predictions": [said] if row["label"] else []}


def labeling_config(class_names: Iterable[str]) -> str:
    """The labeling interface of a Label Studio project that shows such tasks."""
    choices = "".join(f"<Choice value={quoteattr(name)}/>" for name in class_names)
    return (
        f'<View><Image name="{IMAGE}" value="${IMAGE}"/>'
        f'<Choices name="{CHOICE}" toName="{IMAGE}">{choices}</Choices></View>'
    )


def _write_fiftyone(path: Path, rows: Iterable[Row], class_names: Sequence[str]) -> int:
    """labels.json of a FiftyOneImageClassificationDataset; the images stay where they are."""
    number = {name: place for place, name in enumerate(class_names)}

    def items() -> Iterator[str]:
        for row in rows:
            facts = {"in_domain": row["in_domain"], "nearest_class": row["nearest_class"]}
            said = {"label": number.get(row["label"]), "confidence": row["confidence"], "attributes": facts}
            yield f"{json.dumps(row['path'])}: {json.dumps(said if row['label'] else None)}"

    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"classes": {json.dumps(list(class_names))},\n"labels": {{')
        count = _write_list(file, items())
        file.write("\n}}\n")
    return count


def _write_coco(path: Path, rows: Iterable[Row], class_names: Sequence[str]) -> int:
    """COCO's lists of images, annotations and categories; an image without a label has no annotation."""
    number = {name: place for place, name in enumerate(class_names, start=1)}
    with path.open("w", encoding="utf-8") as file, tempfile.TemporaryFile("w+", encoding="utf-8") as later:

        def images() -> Iterator[str]:
            for place, row in enumerate(rows, start=1):
                if row["label"]:
                    said = {
                        "image_id": place,
                        "category_id": number[row["label"]],
                        "score": row["confidence"],
                    }
                    later.write(json.dumps({"id": place} | said) + "\n")
                facts = {name: row[name] for name in ("in_domain", "out_of_class", "nearest_class")}
                yield json.dumps({"id": place, "file_name": row["path"]} | _size(row["path"]) | facts)

        file.write('{"info": {"description": "labels of ropaws"},\n"images": [')
        count = _write_list(file, images())
        file.write('\n],\n"annotations": [')
        later.seek(0)
        _write_list(file, (line.rstrip("\n") for line in later))
        file.write('\n],\n"categories": [')
        _write_list(file, (json.dumps({"id": place, "name": name}) for name, place in number.items()))
        file.write("\n]}\n")
    return count


def _size(path: str) -> dict[str, int]:
    """Width and height; nothing of a file that is not there any more."""
    with contextlib.suppress(OSError, ValueError, UnreadableError):
        return dict(zip(("width", "height"), image_size(Path(path)), strict=True))
    return {}


# Rows of an earlier table


def rows_of_moved(path: Path, names: Sequence[str], kind: FormatName) -> Iterator[Row]:
    """Rows of an earlier table whose images were moved away: no later call can predict them again.

    Args:
        path: The table; it need not exist, or be one of ours.
        names: The columns of the table that takes its place.
        kind: Its format, a table.

    Yields:
        Rows of images that are no longer where they were.

    Raises:
        ValueError: Such rows have other columns, or cannot be read.
    """
    if not path.is_file():
        return
    readers = {"csv": _read_csv, "jsonl": _read_jsonl, "parquet": _read_parquet}
    for row in readers[kind](path):
        if SORTED_TO not in row:
            return  # no image was moved
        if not isinstance(row.get("path"), str) or not isinstance(row.get("label"), str):
            raise ValueError(f"--out: {path} has rows without path or label; choose another name")
        if os.path.lexists(row["path"]):
            continue
        if list(row) != list(names):
            raise ValueError(
                f"--out: {path} has rows of images that were moved, with other columns; choose another name"
            )
        yield row


def _read_csv(path: Path) -> Iterator[Row]:
    for number, row in enumerate(read_csv(path), start=1):
        if SORTED_TO not in row:
            return
        try:
            yield {name: _typed(name, value) for name, value in row.items()}
        except (TypeError, ValueError):
            message = f"--out: row {number} of {path} is not one of predictions; choose another name"
            raise ValueError(message) from None


def _typed(name: str, text: str | None) -> Any:
    """A cell as it was before it was written."""
    if text is None:
        raise TypeError
    if name in TEXTS or name.startswith("top"):
        return text
    if name == "confidence" and not text:
        return None
    return text == "True" if name == "out_of_class" else float(text)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"--out: line {number} of {path} is not a prediction; choose another name")
            yield row


def _read_parquet(path: Path) -> Iterator[Row]:
    """Without their places: the map is one of other images."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(NEEDS_PYARROW) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if name not in PLACE]
            for part in file.iter_batches(PARQUET_ROWS, columns=names):
                yield from part.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"--out: {path} is not a readable table ({error!s:.200}); choose another name"
        ) from None
