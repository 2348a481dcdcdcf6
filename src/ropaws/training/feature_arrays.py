"""Arrays that a person gives to the estimator: what is checked of them, and which rows are learned from."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, column_or_1d
from torch import Tensor

from ropaws.data.features import Features, principal_components, unit_mean
from ropaws.data.randomness import POOL_SAMPLE, generator
from ropaws.models.heads import main_directions
from ropaws.training import feature_head

UNLABELED = -1
BLOCK = 2048  # rows that are worked on at a time
LEARNED = 1 << 17  # unlabeled rows that are learned from, at most


def checked_labels(y: Any, X: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:  # noqa: N803
    """The labels, and which rows have one."""
    if y is None:
        raise ValueError("requires y to be passed, but the target y is None")
    y = column_or_1d(y, warn=True)
    check_consistent_length(X, y)
    if y.dtype.kind == "f" and np.isinf(y).any():
        raise ValueError("Input y contains infinity")
    if y.dtype.kind in "US" and (y == str(UNLABELED)).any():
        raise ValueError(
            "y has the text '-1'; to mark an unlabeled row among names use None, NaN, an empty text or the"
            " number -1 in an array of dtype object"
        )
    known = _known(y)
    if not known.any():
        raise ValueError(
            "y has no label: every entry is -1 (unlabeled) or missing; label a row of each class"
        )
    check_classification_targets(y[known])
    return y, known


def _known(y: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows have a label; one by one where they can be of any type."""
    if y.dtype.kind in "iuf":
        return np.asarray((y != UNLABELED) & (y == y))  # NaN is not equal to itself
    if y.dtype.kind == "U":
        return np.asarray(y != "")
    return np.array([not _is_missing(label) for label in y], bool)


def _is_missing(label: Any) -> bool:
    if isinstance(label, str):
        return label == ""
    return label is None or label != label or label == UNLABELED


def scaled_rows(rows: NDArray[Any]) -> Tensor:
    """Rows whose largest entry is 1 in size, in float32; only their direction counts. Zeros stay.

    (..., d)  ->  (..., d)
    """
    if rows.dtype == np.float16:
        rows = rows.astype(np.float32)
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    return torch.from_numpy((rows / np.where(largest > 0, largest, 1)).astype(np.float32))


class Projection(NamedTuple):
    """Unit rows around the mean, in their main directions."""

    mean: Tensor  # (d,)
    components: Tensor | None  # (e, d), or None for rows that stay as they are

    def __call__(self, rows: Tensor) -> Tensor:
        """(n, ..., d)  ->  (n, ..., e)"""
        return main_directions(rows, self.mean, self.components)


def projection(rows: Features, *, trained: bool) -> Projection:
    """To the main directions of rows (n, d), all of them where they are few.

    A head is trained by direction. Without one, all directions together are nothing but a turn.
    """
    if not trained and rows.shape[1] <= feature_head.DIMS:
        return Projection(unit_mean(rows).float(), None)
    mean, components = principal_components(rows, min(feature_head.DIMS, rows.shape[1]))
    return Projection(mean.float(), components.float())


def check_views(views: Any, X: NDArray[Any]) -> None:  # noqa: N803
    if views is None:
        return
    array = np.asarray(views)
    if array.ndim != 3 or (array.shape[0], array.shape[2]) != X.shape or array.shape[1] == 0:
        raise ValueError(
            f"views must be (n_samples, n_views, n_features) with those of X {X.shape}, got {array.shape}"
        )
    if not all(np.isfinite(array[start : start + BLOCK]).all() for start in range(0, len(array), BLOCK)):
        raise ValueError("views has values that are not finite; repair or remove those rows")


def learned_rows(known: NDArray[np.bool_], voters: int | None, seed: int) -> NDArray[np.int64] | None:
    """Labeled rows and a random sample of the others, ascending; None for all rows.

    The sample is never smaller than the number of voters; None lets all rows vote.   known (n,)  ->  (k,)
    """
    unlabeled = np.flatnonzero(~known)
    if voters is None or len(unlabeled) <= (most := max(LEARNED, voters)):
        return None
    order = torch.randperm(len(unlabeled), generator=generator(seed, POOL_SAMPLE))
    return np.sort(np.concatenate([np.flatnonzero(known), unlabeled[order[:most].numpy()]]))


def filled(count: int, parts: Iterable[Tensor], kind: type) -> NDArray[Any]:
    """Parts one below the other in an array that is made once: joining them would hold them twice."""
    found: NDArray[Any] = np.empty(0, kind)
    start = 0
    for part in parts:
        if start == 0:
            found = np.empty((count, *part.shape[1:]), kind)
        found[start : start + len(part)] = part.numpy()
        start += len(part)
    return found
