"""A corpus in one .npz file."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropaws.core.labels import OUT_OF_CLASS, UNLABELED, refuse_verdict
from ropaws.pool.array_files import MOST_CLASSES, check_images, check_row_count, class_names, load_arrays
from ropaws.pool.corpus import Corpus


def read_npz(path: Path) -> Corpus:
    """Arrays train_images (n, h, w[, channels]) uint8 and train_labels (n,), -1 where unknown;
    test_images, test_labels (-1: out-of-class) and class_names may be left out.
    """
    arrays = load_arrays(path)
    for name in ("train_images", "train_labels"):
        if name not in arrays:
            raise ValueError(f"{path} has no array {name!r}; it has {', '.join(arrays) or 'nothing'}")
    train_images = _to_images(arrays["train_images"], f"{path}: train_images")
    test_images = train_images[:0]
    if "test_images" in arrays:
        test_images = _to_images(arrays["test_images"], f"{path}: test_images")
    if test_images.shape[1] != train_images.shape[1]:
        channels = f"{train_images.shape[1]} and {test_images.shape[1]}"
        raise ValueError(f"{path}: train_images and test_images must have the same channels, got {channels}")
    check_row_count(len(train_images) + len(test_images), path)
    train_labels = _to_labels(arrays["train_labels"], len(train_images), f"{path}: train_labels")
    test_labels = _to_labels(
        arrays.get("test_labels", np.zeros(0, np.int64)), len(test_images), f"{path}: test_labels"
    )
    classes = 1 + max(int(part.max()) if len(part) else UNLABELED for part in (train_labels, test_labels))
    if classes > MOST_CLASSES:
        raise ValueError(f"{path}: labels must be below {MOST_CLASSES:,}, got {classes - 1:,}")
    names = class_names(arrays, path)
    if names is None:
        names = [str(number) for number in range(classes)]
    if len(names) < classes:
        raise ValueError(f"{path}: class_names has {len(names)} names, but labels go up to {classes - 1}")
    refuse_verdict(names, path)
    truth = torch.where(test_labels == UNLABELED, OUT_OF_CLASS, test_labels)
    return Corpus(tuple(names), train_images, train_labels, test_images, truth)


def _to_images(array: NDArray[Any], name: str) -> Tensor:
    check_images(array, name)
    images = torch.from_numpy(array)
    return images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()


def _to_labels(array: NDArray[Any], count: int, name: str) -> Tensor:
    if array.shape != (count,) or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} must be whole numbers, one for each of {count} images, got {array.dtype} {array.shape}"
        )
    labels = torch.from_numpy(array.astype(np.int64))
    if len(labels) and int(labels.min()) < UNLABELED:
        raise ValueError(f"{name} must be at least {UNLABELED} (unknown), got {int(labels.min())}")
    return labels
