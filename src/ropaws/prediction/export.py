"""Predictions on disk: a table, its facts, and images sorted into folders."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ropaws.data.datasets.feature_file import FeatureTable
from ropaws.data.files.decoding import ImageRef
from ropaws.prediction.class_folders import OUT_OF_CLASS
from ropaws.prediction.label_tables import SORTED_TO, Row, column_names, columns, rows_of_moved, write_labels
from ropaws.prediction.predict import Prediction, Predictor, Unreadable, predict_files
from ropaws.prediction.sorting import Sorter
from ropaws.runs.atomic import write_json
from ropaws.runs.lock import locked
from ropaws.training.progress import watch_files


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
                label = None if prediction.out_of_class else prediction.label
                row[SORTED_TO] = str(sorter.plan(Path(prediction.path), label))
            yield row

    def counted() -> Iterator[Row]:
        for row in rows():
            counts[OUT_OF_CLASS if row["out_of_class"] else row["label"]] += 1
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
