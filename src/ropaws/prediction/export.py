"""Predictions on disk: tables, and images sorted into folders."""

import csv
import filecmp
import itertools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ropaws.data.datasets.feature_file import FeatureTable
from ropaws.data.files.decoding import ImageRef
from ropaws.prediction.predict import Prediction, Predictor, Unreadable, predict_files
from ropaws.runs.atomic import replacing, write_json
from ropaws.training.progress import watch_files

OUT_OF_CLASS = "out-of-class"
PARQUET_ROWS = 10_000  # rows that are held before they are written


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
    """Predict, write the table and its facts, and sort the files if asked. One batch is held at a time."""
    named = images.names if isinstance(images, FeatureTable) else images
    rows_of_files = [image for image in named if not isinstance(image, Path)]
    if settings.sort_into is not None and rows_of_files:
        raise ValueError(f"--copy-to and --move-to sort files; {rows_of_files[0]} is not a file of its own")
    counts: Counter[str] = Counter()
    unreadable: list[Unreadable] = []
    sorter = None if settings.sort_into is None else Sorter(settings.sort_into, move=settings.move)

    def rows() -> Iterator[dict[str, Any]]:
        for prediction in _watched(predict_files(predictor, images), len(images), console):
            if isinstance(prediction, Unreadable):
                unreadable.append(prediction)
                continue
            counts[OUT_OF_CLASS if prediction.out_of_class else prediction.label] += 1
            row = columns(prediction, predictor.run.class_names, settings.top)
            yield row if sorter is None else row | {"sorted_to": str(sorter.plan(prediction))}

    write_labels(settings.out, rows())
    summary = Summary(dict(sorted(counts.items())), unreadable)
    write_json(settings.out.with_name(settings.out.name + ".json"), _facts(predictor, summary))
    # Last: the table is written before any file is moved.
    if sorter is not None:
        sorter.carry_out()
    return summary


def _watched(
    found: Iterable[Prediction | Unreadable | None], total: int, console: Console
) -> Iterator[Prediction | Unreadable]:
    """With a progress bar that counts each image once."""
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


def columns(prediction: Prediction, class_names: Sequence[str], top: int | None) -> dict[str, Any]:
    """A row: the fields, then the probability of each class, or of the most likely ones."""
    row: dict[str, Any] = {
        "path": prediction.path,
        "label": prediction.label,
        "confidence": round(prediction.confidence, 6),
        "in_domain": round(prediction.in_domain, 6),
        "out_of_class": prediction.out_of_class,
        "nearest": prediction.nearest,
        "similarity": round(prediction.similarity, 6),
    }
    ranked = sorted(zip(prediction.probabilities, class_names, strict=True), key=lambda pair: -pair[0])
    if top is None:
        named = zip(class_names, prediction.probabilities, strict=True)
        return row | {f"p({name})": round(value, 6) for name, value in named}
    for place, (value, name) in enumerate(ranked[:top], start=1):
        row |= {f"top{place}": name, f"p{place}": round(value, 6)}
    return row


def write_labels(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows one by one. Returns their number."""
    writers: dict[str, Callable[[Path, Iterable[dict[str, Any]]], int]] = {
        ".csv": _write_csv, ".jsonl": _write_jsonl, ".parquet": _write_parquet,
    }  # fmt: skip
    with replacing(path) as temporary:
        return writers[path.suffix.lower()](temporary, rows)


def check_target(path: Path) -> None:
    if path.suffix.lower() not in (".csv", ".jsonl", ".parquet"):
        raise ValueError(f"--out must end in .csv, .jsonl or .parquet, got {path.name}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out: no folder {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"--out: {path.parent} cannot be written to; choose another place")


def _write_csv(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    count = 0
    # Names that are not UTF-8 are written as they are on disk.
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow(row)
            count += 1
    return count


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            count += 1
    return count


def _write_parquet(path: Path, rows: Iterable[dict[str, Any]]) -> int:
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
            writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
            count += len(part)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:  # no image could be read: an empty table, not a file that no one can open
        pyarrow.parquet.write_table(pyarrow.table({}), path)
    return count


def _as_text(value: Any) -> Any:
    return (
        value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if isinstance(value, str)
        else value
    )


class Sorter:
    """Puts images into the folder of their class, or of none. A name that is taken gets a number."""

    def __init__(self, target: Path, *, move: bool) -> None:
        self._target = target
        self._move = move
        self._plans: dict[Path, Path] = {}  # place: image

    def plan(self, prediction: Prediction) -> Path:
        """Where the image will go; nothing is touched yet."""
        folder = OUT_OF_CLASS if prediction.out_of_class else folder_name(prediction.label)
        source = Path(prediction.path)
        place = self._target / folder / source.name
        number = 1
        while self._is_taken(place, source):
            number += 1
            place = place.with_name(f"{source.stem} ({number}){source.suffix}")
        self._plans[place] = source
        return place

    def _is_taken(self, place: Path, source: Path) -> bool:
        """By another image: a copy of this one from an earlier call is left as it is."""
        if place in self._plans:
            return True
        return place.exists() and (self._move or not filecmp.cmp(place, source, shallow=False))

    def carry_out(self) -> None:
        for place, source in self._plans.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            if self._move:
                shutil.move(source, place)
            elif not place.exists():
                shutil.copy2(source, place)


def folder_name(label: str) -> str:
    """A label as one folder's name: it can lead neither up nor elsewhere."""
    name = re.sub(r"[/\\\0]", "_", label).strip()
    return f"_{name}" if name in ("", ".", "..", OUT_OF_CLASS) else name
