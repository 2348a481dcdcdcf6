"""Pools to choose labels from: those of the table of suggest.py, and others on which the choice was tuned."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from feature_tasks import CIFAR10, TRIALS, Data, Part, Task, load
from torch import Tensor

from ropaws.core.features import FeatureRows, main_directions, principal_components

DIMS = 128  # main directions of the features, once for all


class Setting(NamedTuple):
    """A task, and how many rows of it a draw has."""

    task: Task
    inside: int
    outside: int = 0
    merged: tuple[int, ...] = ()  # the class that each in-class class of the task becomes part of


_MIX = (Part("cifar100", most=3000), Part("tiny", most=3000), Part("svhn", most=3000))
TABLE: dict[str, Setting] = {
    "garments, 50 %": Setting(
        Task(Part("garments", range(5)), (Part("garments", range(5, 10)),)), inside=500, outside=500
    ),
    "CIFAR-10, 0 %": Setting(Task(CIFAR10), inside=1000),
    "CIFAR-10, 50 %": Setting(Task(CIFAR10, _MIX), inside=600, outside=600),
    "CIFAR-10, 80 %": Setting(Task(CIFAR10, _MIX), inside=300, outside=1200),
}

# Superclass of each class of CIFAR-100, as its authors group them.
_SUPER = np.array(
    [4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11,
     6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5,
     5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17,
     10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13,
     16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13]
)  # fmt: skip
_ten_super = np.random.default_rng(7).permutation(20)[:10].tolist()
_fine = [c for c in range(100) if _SUPER[c] in _ten_super]
_super_task = Task(
    Part("cifar100", _fine),
    (
        Part("cifar100", [c for c in range(100) if c not in _fine], most=2000),
        Part("tiny", most=2000),
        Part("svhn", most=1500),
    ),
)
_super = Setting(_super_task, 1000, 0, tuple(_ten_super.index(_SUPER[c]) for c in _fine))
_order = np.random.default_rng(5).permutation(100).tolist()
_ten, _others = _order[:10], _order[10:]
TUNING: dict[str, Setting] = {
    "10 of CIFAR-100, 0 %": Setting(Task(Part("cifar100", _ten)), inside=450),
    "10 of CIFAR-100 + others, 50 %": Setting(
        Task(Part("cifar100", _ten), (Part("cifar100", _others),)), inside=450, outside=450
    ),
    "10 of CIFAR-100 + others and SVHN, 80 %": Setting(
        Task(Part("cifar100", _ten), (Part("cifar100", _others, most=2000), Part("svhn", most=1000))),
        inside=450,
        outside=1800,
    ),
    "texts, 0 %": Setting(Task(Part("texts", range(12, 18))), inside=1800),
    "texts, 50 %": Setting(TRIALS["other texts"], inside=1000, outside=1000),
    "texts, 80 %": Setting(TRIALS["other texts"], inside=400, outside=1600),
    "10 superclasses, 0 %": _super,
    "10 superclasses, 50 %": _super._replace(inside=600, outside=600),
    "10 superclasses, 80 %": _super._replace(inside=300, outside=1200),
    "digits, 40 %": Setting(
        Task(Part("digits", range(6)), (Part("digits", range(6, 10)),)), inside=480, outside=320
    ),
}


class Draw(NamedTuple):
    """A pool, and test rows of the classes; truth is a class, -1 for none."""

    points: Tensor  # (n, d)
    truth: Tensor  # (n,)
    test: Tensor  # (t, d)
    test_truth: Tensor  # (t,)
    classes: int


class Source(NamedTuple):
    """The data of a setting, in main directions."""

    setting: Setting
    data: Data
    points: Tensor  # (n, d)
    test: Tensor  # (t, d)

    def draw(self, seed: int) -> Draw:
        """A pool by chance; the test rows are the same in all draws."""
        random = np.random.default_rng(seed)
        inside, outside = (np.flatnonzero((self.data.truth >= 0) == within) for within in (True, False))
        rows = np.concatenate(
            [
                random.permutation(inside)[: self.setting.inside],
                random.permutation(outside)[: self.setting.outside],
            ]
        )
        known = self.data.test_truth >= 0
        return Draw(
            self.points[rows],
            torch.from_numpy(self.data.truth[rows]),
            self.test[torch.from_numpy(known)],
            torch.from_numpy(self.data.test_truth[known]),
            self.data.classes,
        )


def source(setting: Setting, data: Path | None, work: Path) -> Source:
    """Read its collections, which are computed where they are not there yet."""
    found = _merged(load(setting.task, data, work), setting.merged)
    rows = torch.from_numpy(found.features)
    mean, components = principal_components(FeatureRows(rows), min(DIMS, rows.shape[1]))
    mean, components = mean.float(), components.float()
    points, test = (
        F.normalize(main_directions(part, mean, components), dim=1)
        for part in (rows, torch.from_numpy(found.test))
    )
    return Source(setting, found, points, test)


def _merged(data: Data, classes: tuple[int, ...]) -> Data:
    if not classes:
        return data
    numbers = np.array([*classes, -1])  # the last is that of -1
    return data._replace(
        truth=numbers[data.truth], test_truth=numbers[data.test_truth], classes=len(set(classes))
    )
