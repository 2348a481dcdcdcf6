"""Predictions on disk: a table, its facts, and images sorted into folders."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ropaws.core.files import check_out_folder, locked, write_json
from ropaws.core.labels import OUT_OF_CLASS_NAME
from ropaws.core.terminal import watch_files
from ropaws.insight.neighbors import NEEDS_FAISS, PoolMap, can_search, pool_map
from ropaws.pool.content import ImageRef, Unreadable
from ropaws.pool.datasets.feature_file import FeatureTable
from ropaws.run.output_formats import (
    FIELDS,
    OTHER_TOOLS,
    SORTED_TO,
    FormatName,
    Output,
    Row,
    format_of,
    labeling_config,
    rows_of_moved,
    write_labels,
)
from ropaws.run.predict import HeldRows, Prediction, Predictor, predict_files
from ropaws.run.sorting import Sorter


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


@dataclass(frozen=True)
class PredictSettings:
    """What to write, and where.

    Raises:
        ValueError: The format is another one than that of the file, or cannot be combined with an option.
        OSError: Nothing can be written there.
    """

    out: Path
    format: FormatName | None = None  # None: by the ending of the file
    top: int | None = None
    with_map: bool = True  # in parquet
    sort_into: Path | None = None
    move: bool = False

    def __post_init__(self) -> None:
        if self.kind in OTHER_TOOLS and self.top is not None:
            raise ValueError(f"--top chooses columns of a table; --format {self.kind} has none: leave it out")
        if self.kind in OTHER_TOOLS and self.move:
            raise ValueError(
                f"--format {self.kind} names images where they are, and --move-to takes them away;"
                " use --copy-to, or write a table"
            )
        check_out_folder(self.out.parent)

    @property
    def kind(self) -> FormatName:
        """The format that is written."""
        return format_of(self.out, self.format)


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
    if settings.kind in OTHER_TOOLS:
        _files(images, f"--format {settings.kind} names files; write a table")
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

    with contextlib.closing(HeldRows()) as held:
        output = Output(settings.kind, predictor.run.class_names)
        if settings.kind == "parquet" and settings.with_map:
            predictor.held = held
            output = replace(output, placed=lambda: _placed(held, console))
        write_labels(settings.out, counted(), output)
    summary = Summary(dict(sorted(counts.items())), unreadable)
    facts = _facts(predictor, summary)
    if settings.kind == "label-studio":
        facts["labeling_config"] = labeling_config(predictor.run.class_names)
    write_json(settings.out.with_name(settings.out.name + ".json"), facts)
    # Last: the table is written before any file is moved.
    if sorter is not None:
        sorter.carry_out()
    return summary


def _placed(held: HeldRows, console: Console) -> PoolMap:
    points = held.rows()
    console.print(f"Placing {len(points):,} images on the map", highlight=False)
    if not can_search(len(points)):
        console.print(f"No column neighbors: {NEEDS_FAISS}", highlight=False, markup=False)
    placed = pool_map(points)
    if placed.neighbors is not None and placed.neighbors.recall < 1:
        console.print(
            f"neighbors: an index finds {placed.neighbors.recall:.0%} of the true ones", highlight=False
        )
    return placed


def _sorter(
    predictor: Predictor, images: Sequence[ImageRef] | FeatureTable, target: Path, *, move: bool
) -> Sorter:
    files = _files(images, "--copy-to and --move-to sort files")
    return Sorter(target, predictor.run.class_names, files, move=move)


def _files(images: Sequence[ImageRef] | FeatureTable, rule: str) -> list[Path]:
    named = images.names if isinstance(images, FeatureTable) else images
    files = [image for image in named if isinstance(image, Path)]
    if len(files) < len(named):
        row = next(image for image in named if not isinstance(image, Path))
        raise ValueError(f"{rule}; {row} is not a file of its own")
    return files


def _moved_before(predictor: Predictor, settings: PredictSettings) -> Iterator[Row]:
    if settings.move:
        names = [*column_names(predictor.run.class_names, settings.top), SORTED_TO]
        yield from rows_of_moved(settings.out, names, settings.kind)


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
