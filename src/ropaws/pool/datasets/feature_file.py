"""Features that a person brings, of any modality, in one .npz file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from ropaws.core.features import ArrayRows, FeatureRows, Features, moderate_rows, unreadable_rows
from ropaws.core.files import check_regular
from ropaws.core.labels import OUT_OF_CLASS, class_names_of, label_codes
from ropaws.pool.array_files import (
    MAPPED,
    array_names,
    check_row_count,
    class_names,
    label_name,
    load_arrays,
    map_array,
    map_npy,
)
from ropaws.pool.corpus import Corpus

FEATURES, VIEWS, LABELS, NAMES = "features", "views", "labels", "names"
TEST_FEATURES, TEST_LABELS = "test_features", "test_labels"


def read_features(path: Path) -> Corpus:
    """Arrays features (n, d) and labels (n,): names, or numbers; "" or -1 for unlabeled rows.

    views (n, v, d), names (n,), test_features (t, d) and test_labels (t,) may be left out.

    Raises:
        ValueError: An array is missing, has another shape, or is not finite; no row has a label.
    """
    arrays = load_arrays(path)
    for name in (FEATURES, LABELS):
        if name not in arrays:
            raise ValueError(f"{path} has no array {name!r}; it has {', '.join(arrays) or 'nothing'}")
    features = arrays[FEATURES]
    check_feature_array(features, f"{path}: {FEATURES}")
    count, dims = features.shape
    check_row_count(count, path)
    labels = _labels(arrays, LABELS, count, path)
    names = tuple(sorted(class_names_of(labels), key=_by_number))
    if len(names) < 2:
        what = f"the single class {names[0]!r}" if names else "no label at all"
        raise ValueError(f"{path}: {LABELS} has {what}; a classifier needs two classes or more")
    tests = arrays.get(TEST_FEATURES, features[:0])
    check_feature_array(tests, f"{path}: {TEST_FEATURES}", dims)
    truth = _labels(arrays, TEST_LABELS, len(tests), path) if TEST_FEATURES in arrays else []
    return Corpus(
        names,
        FeatureRows(feature_rows(features).center, _views(arrays, features.shape, path)),
        torch.tensor(label_codes(labels, names), dtype=torch.long),
        feature_rows(tests),
        torch.tensor(label_codes(truth, names, others=OUT_OF_CLASS), dtype=torch.long),
        _row_names(arrays, count, path),
    )


@dataclass(frozen=True)
class FeatureTable:
    """Rows of features to label, and their names."""

    features: Features
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)


class RowNames(Sequence[str]):
    """FILE#0, FILE#1 and so on, or nothing but "" without a file; none of them is held."""

    def __init__(self, path: Path | None, count: int) -> None:
        self.path = path
        self.rows = range(count)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[row] for row in self.rows[index]]
        return "" if self.path is None else f"{self.path}#{self.rows[index]}"


def read_feature_table(path: Path) -> FeatureTable:
    """An .npy array (n, d), or `features` (and `names`) of an .npz.

    A large array is not read into memory but mapped, unless it is compressed.

    Raises:
        ValueError: There is no such array, it has another shape, or is not finite.
    """
    if path.suffix.lower() == ".npy":
        arrays = {FEATURES: _read_npy(path)}
    elif (mapped := map_array(path, FEATURES)) is not None:
        arrays = {**load_arrays(path, without=FEATURES), FEATURES: mapped}
    else:
        arrays = load_arrays(path)
    if FEATURES not in arrays:
        raise ValueError(f"{path} has no array {FEATURES!r}; it has {', '.join(arrays) or 'nothing'}")
    check_feature_array(arrays[FEATURES], f"{path}: {FEATURES}")
    count = len(arrays[FEATURES])
    if NAMES in arrays:
        check_row_count(count, path)
    return feature_table_of(arrays[FEATURES], _row_names(arrays, count, path) or RowNames(path, count))


def feature_table_of(array: NDArray[Any], names: Sequence[str]) -> FeatureTable:
    """Rows of an array that has been checked; they are read when they are asked for."""
    return FeatureTable(ArrayRows(array, lambda rows: _moderate(rows).float()), names)


def _read_npy(path: Path) -> NDArray[Any]:
    length = check_regular(path, None).st_size
    try:
        mapped = map_npy(path, 0, length)
        return mapped if mapped.nbytes > MAPPED else np.array(mapped)
    except Exception as error:  # NumPy raises nearly anything on damaged headers
        raise ValueError(f"{path} is not a readable .npy file ({error!s:.200}); write it again") from None


def is_feature_file(path: Path) -> bool:
    """Does a file hold features, and not images: an .npy, or an .npz with that array?"""
    if path.suffix.lower() == ".npz":
        return FEATURES in array_names(path)
    return path.suffix.lower() == ".npy"


def check_feature_array(array: NDArray[Any], name: str, dims: int | None = None) -> None:
    """Raise an error unless this is (n, d) of finite floats, with the d that is asked for."""
    if array.ndim != 2 or array.dtype.kind != "f" or array.shape[1] == 0:
        raise ValueError(f"{name} must be (n, d) of floats, got {array.dtype} {array.shape}")
    if dims is not None and array.shape[1] != dims:
        raise ValueError(f"{name} must have {dims} dimensions as the others, got {array.shape[1]}")
    bad = unreadable_rows(array)
    if len(bad):
        raise ValueError(
            f"{name}: row {bad[0]} is not finite, of {len(bad)} such rows; repair or remove them"
        )


def feature_rows(array: NDArray[Any]) -> FeatureRows:
    """Rows in float32; those that it cannot hold are scaled."""
    return FeatureRows(_moderate(array).float())


def _moderate(array: NDArray[Any]) -> torch.Tensor:
    # torch knows no longer floats, and wants memory that it could write to.
    kind = array.dtype.newbyteorder("=") if array.itemsize <= 8 else np.dtype(np.float64)
    return moderate_rows(torch.from_numpy(np.require(array, kind, ["C", "W"])))


def _views(arrays: dict[str, NDArray[Any]], shape: Sequence[int], path: Path) -> torch.Tensor | None:
    if VIEWS not in arrays or arrays[VIEWS].shape[1:2] == (0,):
        return None
    views, (count, dims) = arrays[VIEWS], shape
    if views.ndim != 3 or (views.shape[0], views.shape[2]) != (count, dims) or views.dtype.kind != "f":
        raise ValueError(
            f"{path}: {VIEWS} must be ({count}, views, {dims}) of floats as {FEATURES}, got"
            f" {views.dtype} {views.shape}"
        )
    check_feature_array(views.reshape(count, -1), f"{path}: {VIEWS}")
    return _moderate(views)


def _labels(arrays: dict[str, NDArray[Any]], name: str, count: int, path: Path) -> list[str | None]:
    if name not in arrays or arrays[name].shape != (count,):
        found = arrays[name].shape if name in arrays else "none"
        raise ValueError(f"{path}: {name} must be one for each of {count} rows, got {found}")
    names = class_names(arrays, path)
    return [label_name(value, names, path) for value in arrays[name].tolist()]


def _row_names(arrays: dict[str, NDArray[Any]], count: int, path: Path) -> tuple[str, ...]:
    if NAMES not in arrays:
        return ()
    if arrays[NAMES].shape != (count,):
        raise ValueError(f"{path}: {NAMES} must be one for each of {count} rows, got {arrays[NAMES].shape}")
    return tuple(map(str, arrays[NAMES].tolist()))


def _by_number(name: str) -> tuple[int, str]:
    """Classes that are numbers stay in their order."""
    return (int(name), "") if name.isdecimal() else (-1, name)
