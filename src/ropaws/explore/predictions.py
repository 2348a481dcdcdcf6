"""Predictions of someone else's model, to look at and to choose labels by."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ropaws.classify.in_class_share import BORDER
from ropaws.core.files import TABLE_FILE, check_regular
from ropaws.core.labels import OUT_OF_CLASS_NAME, class_name, is_verdict
from ropaws.explore.pool import RunOutputs
from ropaws.pool.array_files import load_arrays
from ropaws.pool.listing import COLUMNS, read_csv, read_parquet

OPTION = "--probabilities"
KINDS = (".csv", ".tsv", ".parquet", ".npz")
ARRAYS = (("names", "paths"), ("probs", "probabilities"), ("classes", "class_names"))
IN_DOMAIN, CONFIDENCE = "in_domain", "confidence"
OTHERS = (
    IN_DOMAIN,
    CONFIDENCE,
    "out_of_class",
    "nearest",
    "nearest_class",
    "similarity",
    "sorted_to",
    "error",
)
WITHIN = 0.02  # of 1 is the sum of a row


class Predictions(NamedTuple):
    """What a file says of the images."""

    class_names: tuple[str, ...]
    outputs: RunOutputs
    missing: int  # images that the file does not name: every class is as likely there


class _Said(NamedTuple):
    """As the file has it."""

    classes: tuple[str, ...]
    names: list[str]
    probs: NDArray[np.float32]  # (m, c)
    in_domain: NDArray[np.float32]  # (m,)


def read_predictions(path: Path, images: Sequence[str], labeled: Sequence[str] = ()) -> Predictions:
    """Class probabilities of images, from a table or an .npz file.

    A table has a column for each class, `p(NAME)` or just the name, or the columns label and confidence. An
    .npz has names (n,), classes (c,) and probs (n, c). Both may have in_domain.

    Args:
        path: The file.
        images: The names of the images that are shown.
        labeled: Classes that images have as labels. The file gives those that it does not know probability 0.

    Raises:
        FileNotFoundError: It is not there.
        ValueError: It has no probabilities, or names none of the images.
    """
    if path.suffix.lower() not in KINDS:
        raise ValueError(f"{OPTION} must end in {', '.join(KINDS)}, got {path.name}")
    if not path.is_file():
        raise FileNotFoundError(f"{OPTION}: no file at {path}")
    said = _arrays(path) if path.suffix.lower() == ".npz" else _table(path)
    _check(said, path)
    return _matched(_with_classes(said, labeled), images, path)


def _with_classes(said: _Said, labeled: Sequence[str]) -> _Said:
    more = tuple(name for name in labeled if name not in said.classes)
    none = np.zeros((len(said.probs), len(more)), np.float32)
    return said._replace(classes=said.classes + more, probs=np.concatenate([said.probs, none], axis=1))


def _check(said: _Said, path: Path) -> None:
    if len(said.classes) < 2 or len(set(said.classes)) < len(said.classes):
        raise ValueError(
            f"{OPTION}: {path} needs two or more classes, got {', '.join(said.classes) or 'none'}"
        )
    if any(map(is_verdict, said.classes)):
        raise ValueError(f"{OPTION}: {path} has a class {OUT_OF_CLASS_NAME}; give 1 minus it as in_domain")
    sums = said.probs.sum(axis=1)
    inside = (said.in_domain >= 0) & (said.in_domain <= 1)
    good = (said.probs >= 0).all(axis=1) & (abs(sums - 1) <= WITHIN) & inside
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise ValueError(
            f"{OPTION}: {path}, {said.names[row]}: probabilities must be from 0 to 1 and sum to 1, and"
            f" in_domain be from 0 to 1; the sum is {sums[row]:.4g}. Name columns of classes p(NAME)"
        )


def _matched(said: _Said, images: Sequence[str], path: Path) -> Predictions:
    """By path, relative to the file's folder or not, else by the name of the file where only one has it."""
    rows: dict[str, int] = {}
    for row, name in enumerate(said.names):
        rows.setdefault(name, row)
        rows.setdefault(str(path.parent.absolute() / name), row)
    last = Counter(map(_last, images))
    by_last = {_last(name): row for row, name in enumerate(said.names)}
    unique = Counter(map(_last, said.names))
    found = np.full(len(images), -1)
    for number, image in enumerate(images):
        short = _last(image)
        alone = last[short] == 1 and unique[short] == 1
        found[number] = rows.get(image, by_last[short] if alone else -1)
    known = found >= 0
    if not known.any():
        raise ValueError(
            f"{OPTION}: {path} names none of the images; its first is {said.names[0]}, the pool's {images[0]}"
        )
    probs = np.full((len(images), len(said.classes)), 1 / len(said.classes), np.float32)
    in_domain = np.ones(len(images), np.float32)
    probs[known], in_domain[known] = said.probs[found[known]], said.in_domain[found[known]]
    outputs = RunOutputs(probs, in_domain, BORDER, source=path.name)
    return Predictions(said.classes, outputs, int((~known).sum()))


def _last(name: str) -> str:
    return name.replace("#", "/").rsplit("/", 1)[-1]


def _arrays(path: Path) -> _Said:
    arrays = load_arrays(path)
    names, probs, classes = (
        next((arrays[name] for name in known if name in arrays), None) for known in ARRAYS
    )
    if names is None or probs is None or classes is None:
        raise ValueError(
            f"{OPTION}: {path} needs names (n,), probs (n, c) and classes (c,); it has {', '.join(arrays)}"
        )
    if probs.shape != (len(names), len(classes)):
        raise ValueError(
            f"{OPTION}: {path}: probs of its names and classes must be ({len(names)}, {len(classes)}),"
            f" got {probs.shape}"
        )
    in_domain = arrays.get(IN_DOMAIN, np.ones(len(names)))
    return _Said(
        tuple(class_name(str(name)) for name in classes.tolist()),
        [str(name) for name in names.tolist()],
        probs.astype(np.float32),
        in_domain.reshape(len(names)).astype(np.float32),
    )


def _table(path: Path) -> _Said:
    check_regular(path, TABLE_FILE)
    is_parquet = path.suffix.lower() == ".parquet"
    rows: Iterator[Mapping[str, Any]] = iter(read_parquet(path, None) if is_parquet else read_csv(path))
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{OPTION}: {path} has no rows")
    places, labels = ([name for name in COLUMNS[ours] if name in first] for ours in ("path", "label"))
    if not places:
        raise ValueError(f"{OPTION}: {path} has no column path; it has {', '.join(first)}")
    marked = [name for name in first if name.startswith("p(") and name.endswith(")")]
    by_label = not marked and bool(labels) and CONFIDENCE in first
    taken = {places[0], *COLUMNS["label"], *OTHERS}
    columns = marked or ([CONFIDENCE] if by_label else [name for name in first if name not in taken])
    names, values, inside, said = [], [], [], []
    for row in itertools.chain([first], rows):
        names.append(str(row[places[0]]))
        inside.append(row.get(IN_DOMAIN, 1.0))
        values.append([row[name] for name in columns])
        said.append(row[labels[0]] if by_label else None)
    probs, in_domain = _numbers(values, path), _numbers(inside, path)
    if by_label:
        return _of_labels(names, said, probs[:, 0], in_domain)
    classes = (name[2:-1] if marked else name for name in columns)
    return _Said(tuple(map(class_name, classes)), names, probs, in_domain)


def _of_labels(
    names: list[str], labels: Sequence[Any], confidence: NDArray[np.float32], in_domain: NDArray[np.float32]
) -> _Said:
    """A label and its confidence: the other classes share the rest. Without a label all are as likely."""
    classes = sorted({class_name(str(label)) for label in labels if label})
    number = {name: place for place, name in enumerate(classes)}
    probs = np.full((len(labels), len(classes)), 1 / max(1, len(classes)), np.float32)
    for row, label in enumerate(labels):
        if label:
            probs[row] = (1 - confidence[row]) / max(1, len(classes) - 1)
            probs[row, number[class_name(str(label))]] = confidence[row]
    return _Said(tuple(classes), names, probs, in_domain)


def _numbers(values: Sequence[Any], path: Path) -> NDArray[np.float32]:
    try:
        return np.array(values, np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{OPTION}: {path} has what is no probability ({error!s:.80}); name columns of classes p(NAME)"
        ) from None
