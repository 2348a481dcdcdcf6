"""Few labels, an uncurated pool, a test set: the settings of features.py, and others for head_trials.py."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from feature_collections import LITE0, Array, Collection, Network, collection

LABELS = (1, 4, 25)  # per class
OUT = -1  # of no class


class Part(NamedTuple):
    """Some images of a collection."""

    collection: str
    classes: Sequence[int] | None = None  # positions among its sorted labels; None: all of them
    per_class: int | None = None  # training images, at most
    most: int | None = None  # training images of all classes together


class Task(NamedTuple):
    """In-class images, and what else is in the pool and in the test set."""

    inside: Part
    outside: tuple[Part, ...] = ()


class Data(NamedTuple):
    """A task as arrays; truth is a class, or -1 for out-of-class."""

    features: Array  # (n, d)
    views: Array | None  # (n, v, d)
    truth: Array  # (n,)
    test: Array  # (t, d)
    test_truth: Array  # (t,)
    classes: int

    def draw(self, labels: int, seed: int) -> Array:
        """Positions of so many labeled images per class."""
        random = np.random.default_rng(seed)
        chosen = [random.permutation(np.flatnonzero(self.truth == c))[:labels] for c in range(self.classes)]
        return np.concatenate(chosen)


CIFAR10 = Part("cifar10", range(10))
ANIMALS, VEHICLES = (2, 3, 4, 5, 6, 7), (0, 1, 8, 9)
# Shares of out-of-class images as in the paper: about 50 % with CIFAR-100, 67 % with Tiny-ImageNet and 60 %
# with SVHN.
TABLE: dict[str, Task] = {
    "CIFAR-10": Task(CIFAR10),
    "CIFAR-10 + CIFAR-100": Task(CIFAR10, (Part("cifar100"),)),
    "CIFAR-10 + Tiny-ImageNet": Task(CIFAR10._replace(per_class=208), (Part("tiny"),)),
    "CIFAR-10 + rebuilt SVHN": Task(CIFAR10._replace(per_class=200), (Part("svhn"),)),
    "CIFAR-10 animals + vehicles": Task(Part("cifar10", ANIMALS), (Part("cifar10", VEHICLES),)),
    "garments": Task(Part("garments", range(5)), (Part("garments", range(5, 10)),)),
    "digits 0-5 + 6-9": Task(Part("digits", range(6)), (Part("digits", range(6, 10)),)),
    "solar cells + X-rays, Tiny-ImageNet": Task(
        Part("solar", range(4)), (Part("xrays", most=1000), Part("tiny", most=1000))
    ),
    "X-rays + solar cells, Tiny-ImageNet": Task(
        Part("xrays", range(2)), (Part("solar", most=1000), Part("tiny", most=1000))
    ),
    "texts": Task(Part("texts", range(6)), (Part("texts", range(6, 12)),)),
}

_order = np.random.default_rng(5).permutation(100).tolist()
_hundred = Part("cifar100", _order[:20])
_tiny = np.random.default_rng(6).permutation(172).tolist()
TRIALS: dict[str, Task] = {
    "20 of CIFAR-100": Task(_hundred),
    "20 of CIFAR-100 + others": Task(_hundred, (Part("cifar100", _order[20:], most=1500),)),
    "20 of CIFAR-100 + SVHN": Task(_hundred, (Part("svhn", most=1500),)),
    "20 of Tiny-ImageNet + others": Task(Part("tiny", _tiny[:20]), (Part("tiny", _tiny[20:], most=1500),)),
    "SVHN + CIFAR-100": Task(Part("svhn", range(10)), (Part("cifar100", most=2000),)),
    "other texts": Task(Part("texts", range(12, 18)), (Part("texts", range(18, 24)),)),
}


def load(task: Task, data: Path | None, work: Path, network: Network = LITE0) -> Data:
    """Read its collections, which are computed where they are not there yet."""
    parts = [
        (part, collection(part.collection, data, work, network)) for part in (task.inside, *task.outside)
    ]
    wanted = [_classes(part, found) for part, found in parts]
    train = [
        _rows(found.labels, classes, part.per_class, part.most)
        for (part, found), classes in zip(parts, wanted, strict=True)
    ]
    test = [_rows(found.test_labels, classes) for (_, found), classes in zip(parts, wanted, strict=True)]
    views = [found.views for _, found in parts]
    return Data(
        _joined(found.features[rows] for (_, found), rows in zip(parts, train, strict=True)),
        None if views[0] is None else np.concatenate([v[rows] for v, rows in zip(views, train, strict=True)]),
        _truth(wanted[0], [found.labels[rows] for (_, found), rows in zip(parts, train, strict=True)]),
        _joined(found.test_features[rows] for (_, found), rows in zip(parts, test, strict=True)),
        _truth(wanted[0], [found.test_labels[rows] for (_, found), rows in zip(parts, test, strict=True)]),
        len(wanted[0]),
    )


def _classes(part: Part, found: Collection) -> Array:
    names = np.unique(found.labels)
    return names if part.classes is None else names[list(part.classes)]


def _rows(labels: Array, classes: Array, per_class: int | None = None, most: int | None = None) -> Array:
    rows = np.sort(np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in classes]))
    if most is not None and most < len(rows):
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:most])
    return rows


def _joined(parts: Iterable[Array]) -> Array:
    return np.concatenate(list(parts)).astype(np.float32)


def _truth(classes: Array, labels: list[Array]) -> Array:
    numbers = {label: number for number, label in enumerate(classes.tolist())}
    inside = np.array([numbers[label] for label in labels[0].tolist()])
    return np.concatenate([inside, *(np.full(len(part), OUT) for part in labels[1:])])
