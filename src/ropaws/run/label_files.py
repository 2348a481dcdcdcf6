"""Predictions on disk: a table, its facts, and images sorted into folders."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ropaws.core.files import replacing, write_json
from ropaws.core.labels import OUT_OF_CLASS_NAME
from ropaws.core.locks import locked
from ropaws.core.terminal import watch_files
from ropaws.pool.content import ImageRef, Unreadable
from ropaws.pool.datasets.feature_file import FeatureTable
from ropaws.pool.listing import read_csv, write_csv
from ropaws.run.predict import Prediction, Predictor, predict_files
from ropaws.run.sorting import Sorter

Row = dict[str, Any]

FIELDS = (
    *("path", "label", "nearest_class", "confidence", "in_domain", "out_of_class"),
    *("nearest", "similarity"),
)
SORTED_TO = "sorted_to"  # with --copy-to or --move-to: where the image went
TEXTS = ("path", "label", "nearest_class", "nearest", SORTED_TO)  # and the names of the most likely classes
PARQUET_ROWS = 10_000  # rows that are held before they are written


def columns(prediction: Prediction, class_names: Sequence[str], top: int | None) -> Row:
    """A row: the fields, then the probability of each class, or of the most likely ones."""
    values = (
        prediction.path,
        prediction.label,
        prediction.nearest_class,
        None if prediction.confidence is None else round(prediction.confidence, 6),
        round(prediction.in_domain, 6),
        prediction.out_of_class,
        prediction.nearest,
        round(prediction.similarity, 6),
    )
    likely: list[Any] = [round(value, 6) for value in prediction.probabilities]
    if top is not None:
        ranked = sorted(zip(prediction.probabilities, class_names, strict=True), key=lambda pair: -pair[0])
        likely = [cell for value, name in ranked[:top] for cell in (name, round(value, 6))]
    return dict(zip(column_names(class_names, top), (*values, *likely), strict=True))


def column_names(class_names: Sequence[str], top: int | None) -> list[str]:
    if top is None:
        return [*FIELDS, *(f"p({name})" for name in class_names)]
    places = range(1, min(top, len(class_names)) + 1)
    return [*FIELDS, *(name for place in places for name in (f"top{place}", f"p{place}"))]


def check_target(path: Path) -> None:
    if path.suffix.lower() not in (".csv", ".jsonl", ".parquet"):
        raise ValueError(f"--out must end in .csv, .jsonl or .parquet, got {path.name}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out: no folder {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"--out: {path.parent} cannot be written to; choose another place")


def write_labels(path: Path, rows: Iterable[Row]) -> int:
    """Write rows one by one. Returns their number."""
    writers: dict[str, Callable[[Path, Iterable[Row]], int]] = {
        ".csv": write_csv, ".jsonl": _write_jsonl, ".parquet": _write_parquet,
    }  # fmt: skip
    with replacing(path) as temporary:
        return writers[path.suffix.lower()](temporary, rows)


def rows_of_moved(path: Path, names: Sequence[str]) -> Iterator[Row]:
    """Rows of an earlier table whose images were moved away: no later call can predict them again.

    Args:
        path: The table; it need not exist, or be one of ours.
        names: The columns of the table that takes its place.

    Yields:
        Rows of images that are no longer where they were.

    Raises:
        ValueError: Such rows have other columns, or cannot be read.
    """
    if not path.is_file():
        return
    readers: dict[str, Callable[[Path], Iterator[Row]]] = {
        ".csv": _read_csv, ".jsonl": _read_jsonl, ".parquet": _read_parquet,
    }  # fmt: skip
    for row in readers[path.suffix.lower()](path):
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


def _write_jsonl(path: Path, rows: Iterable[Row]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            count += 1
    return count


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


def _write_parquet(path: Path, rows: Iterable[Row]) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError("--out: parquet needs pyarrow; pip install 'ropaws[parquet]'") from None
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


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError("--out: parquet needs pyarrow; pip install 'ropaws[parquet]'") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for part in file.iter_batches(PARQUET_ROWS):
                yield from part.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"--out: {path} is not a readable table ({error!s:.200}); choose another name"
        ) from None


def _as_text(value: Any) -> Any:
    return (
        value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if isinstance(value, str)
        else value
    )


@dataclass(frozen=True)
class PredictSettings:
    """What to write, and where."""

    out: Path
    top: int | None = None
    sort_into: Path | None = None
    move: bool = False


@dataclass(frozen=True)
class Summary:
    """What was written."""

    counts: dict[str, int]  # images by label, out-of-class ones apart
    unreadable: list[Unreadable]

    @property
    def labeled(self) -> int:
        return sum(self.counts.values())


def label_files(
    predictor: Predictor,
    images: Sequence[ImageRef] | FeatureTable,
    settings: PredictSettings,
    console: Console,
) -> Summary:
    """Predict, write the table and its facts, and sort the files if asked. One batch is held at a time.

    Where images are moved, the rows of those that an earlier call has moved stay in the table.
    """
    if settings.sort_into is None:
        return _label(predictor, images, settings, None, console)
    with locked(settings.sort_into):
        sorter = _sorter(predictor, images, settings.sort_into, move=settings.move)
        return _label(predictor, images, settings, sorter, console)


def _label(
    predictor: Predictor,
    images: Sequence[ImageRef] | FeatureTable,
    settings: PredictSettings,
    sorter: Sorter | None,
    console: Console,
) -> Summary:
    counts: Counter[str] = Counter()
    unreadable: list[Unreadable] = []

    def rows() -> Iterator[Row]:
        yield from _moved_before(predictor, settings)
        for prediction in _watched(predict_files(predictor, images), len(images), console):
            if isinstance(prediction, Unreadable):
                unreadable.append(prediction)
                continue
            row = columns(prediction, predictor.run.class_names, settings.top)
            if sorter is not None:
                row[SORTED_TO] = str(sorter.plan(Path(prediction.path), prediction.label or None))
            yield row

    def counted() -> Iterator[Row]:
        for row in rows():
            counts[OUT_OF_CLASS_NAME if row["out_of_class"] else row["label"]] += 1
            yield row

    write_labels(settings.out, counted())
    summary = Summary(dict(sorted(counts.items())), unreadable)
    write_json(settings.out.with_name(settings.out.name + ".json"), _facts(predictor, summary))
    # Last: the table is written before any file is moved.
    if sorter is not None:
        sorter.carry_out()
    return summary


def _sorter(
    predictor: Predictor, images: Sequence[ImageRef] | FeatureTable, target: Path, *, move: bool
) -> Sorter:
    named = images.names if isinstance(images, FeatureTable) else images
    files = [image for image in named if isinstance(image, Path)]
    if len(files) < len(named):
        row = next(image for image in named if not isinstance(image, Path))
        raise ValueError(f"--copy-to and --move-to sort files; {row} is not a file of its own")
    return Sorter(target, predictor.run.class_names, files, move=move)


def _moved_before(predictor: Predictor, settings: PredictSettings) -> Iterator[Row]:
    if settings.move:
        names = [*column_names(predictor.run.class_names, settings.top), SORTED_TO]
        yield from rows_of_moved(settings.out, names)


def _watched(
    found: Iterable[Prediction | Unreadable | None], total: int, console: Console
) -> Iterator[Prediction | Unreadable]:
    """Show a progress bar that counts each image once."""
    rest = iter(found)
    for item in watch_files(console)(itertools.islice(rest, total), "Labeling images", total):
        if item is not None:
            yield item
    yield from (item for item in rest if item is not None)


def _facts(predictor: Predictor, summary: Summary) -> dict[str, Any]:
    return {
        "class_names": list(predictor.run.class_names),
        "threshold": predictor.last_threshold,
        "propagate": predictor.propagate,
        "images": summary.counts,
        "unreadable": [[path, reason] for path, reason in summary.unreadable],
    }
