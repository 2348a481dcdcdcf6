"""Uncurated mixes of the literature by name: known classes, and what else is in the pool."""

import importlib.resources
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropaws.pool.corpus import Corpus, keep_classes, thin_out
from ropaws.pool.datasets.archives import CIFAR10_CLASSES

ANIMALS = tuple(CIFAR10_CLASSES[i] for i in (2, 3, 4, 5, 6, 7))  # bird cat deer dog frog horse


@dataclass(frozen=True)
class Mix:
    """How a pool is combined from named datasets."""

    about: str
    source: str
    extra: tuple[str, ...] = ()  # joins without its labels
    known: tuple[str, ...] | tuple[int, ...] | int | None = None
    """Known classes: by name, by number, the first ones, or all."""
    in_class: int | None = None  # images of known classes to keep
    out_of_class: int | None = None  # out-of-class images to keep

    def keep_known(self, corpus: Corpus) -> Corpus:
        """Keep the labels of known classes; the images of the other classes lose theirs."""
        if self.known is None:
            return corpus
        known = range(self.known) if isinstance(self.known, int) else self.known
        names = [corpus.class_names[c] if isinstance(c, int) else c for c in known]
        return keep_classes(corpus, names)

    def thin_out(self, corpus: Corpus) -> Corpus:
        """Keep as many images of all that has joined as the mix has."""
        if self.in_class is None or self.out_of_class is None:
            return corpus
        return thin_out(corpus, in_class=self.in_class, out_of_class=self.out_of_class)


def _paper(source: str, extra: str) -> Mix:
    return Mix(f"RoPAWS: all of {source}, and all of {extra} as out-of-class", source, (extra,))


def _opencos(source: str, extra: str) -> Mix:
    about = f"OpenCoS: 10,000 images of {source} and 40,000 of {extra} as out-of-class"
    return Mix(about, source, (extra,), in_class=10_000, out_of_class=40_000)


def _control(times: int) -> Mix:
    """The in-class part stays as it is; only the number of out-of-class images differs."""
    about = f"control: 10,000 images of cifar10, and {times} times as many of cifar100 as out-of-class"
    return Mix(about, "cifar10", ("cifar100",), in_class=10_000, out_of_class=10_000 * times)


def _by_superclass(known: int) -> Mix:
    """CIFAR-100 by its superclasses: related classes are all known, or all out-of-class."""
    classes = tuple(fine for fine, coarse in enumerate(SUPERCLASSES) if coarse < known)
    about = (
        f"IOMatch: {len(classes)} classes of cifar100 known (superclasses 0 to {known - 1}), the others out"
    )
    return Mix(about, "cifar100", known=classes)


# The superclass of each of CIFAR-100's classes.
SUPERCLASSES = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15, 3, 15,
    0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18,
    17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8,
    19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)  # fmt: skip
PAIRS = [
    ("cifar10", "cifar100"), ("cifar10", "tiny-imagenet"), ("cifar10", "svhn"),
    ("cifar100", "svhn"), ("cifar100", "tiny-imagenet"),
]  # fmt: skip

MIXES: dict[str, Mix] = {
    **{f"{source}+{extra}": _paper(source, extra) for source, extra in PAIRS},
    **{f"opencos:{source}+{extra}": _opencos(source, extra) for source, extra in PAIRS},
    **{f"control-{times}x": _control(times) for times in (0, 1, 2, 4)},
    **{
        f"iomatch:cifar100-{share}-{100 - share}": _by_superclass(known)
        for share, known in ((20, 4), (50, 10), (80, 16))
    },
    "cifar10-animals": Mix(
        "OpenMatch: the 6 animals of cifar10 known, the 4 vehicles out-of-class", "cifar10", known=ANIMALS
    ),
    "cifar100-50": Mix(
        "the first 50 classes of cifar100 known, the other 50 out-of-class", "cifar100", known=50
    ),
}


class PoolTruth(NamedTuple):
    class_names: tuple[str, ...]  # the in-classes first, then the others
    labels: Tensor  # (n,) of every image of the embedded pool


def embedded_truth() -> PoolTruth:
    """What the images of the embedded pool really are."""
    file = importlib.resources.files("ropaws.pool.datasets") / "embedded/pool_truth.npz"
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        names = tuple(str(name) for name in arrays["class_names"])
        return PoolTruth(names, torch.from_numpy(arrays["labels"].astype(np.int64)))
