"""True labels of unlabeled images, for research: only evaluation may know them."""

import importlib.resources
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class PoolTruth(NamedTuple):
    class_names: tuple[str, ...]  # the in-classes first, then the others
    labels: Tensor  # (n,) of every image of the embedded pool


def embedded_truth() -> PoolTruth:
    """What the images of the embedded pool really are."""
    file = importlib.resources.files("ropaws.data.datasets") / "embedded/pool_truth.npz"
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        names = tuple(str(name) for name in arrays["class_names"])
        return PoolTruth(names, torch.from_numpy(arrays["labels"].astype(np.int64)))
