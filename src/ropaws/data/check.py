"""Problems in a person's images, found before training."""

import functools
import hashlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ropaws.data.files.decoding import ImageRef, in_workers, open_image, read_square
from ropaws.data.files.listing import Listing, list_labeled, list_unlabeled, merge
from ropaws.data.near_copies import THUMB, Groups, Look, near_copies

SMALLEST = 16  # pixels; a shorter side than this shows little
IMBALANCE = 10  # times as many labels in the largest class as in the smallest


@dataclass(frozen=True)
class Findings:
    """Counts, and lists of what deserves a look."""

    classes: dict[str, int]  # labeled images by class
    unlabeled: int
    test: dict[str, int]
    typical_side: float
    unreadable: list[tuple[str, str]]
    too_small: list[str]
    duplicates: list[list[str]]  # groups of training images with the same pixels
    lookalikes: list[list[str]]  # groups of training images, some of them labeled, that are nearly the same
    conflicts: list[list[str]]  # groups of copies and near copies with different labels
    test_in_train: list[tuple[str, str]]  # test image, the same or much the same in the training set

    def warnings(self) -> list[str]:
        """One line for each kind of problem."""
        fewest, most = min(self.classes.values()), max(self.classes.values())
        lone = [name for name, count in self.classes.items() if count == 1]
        lines = {
            f"{len(self.unreadable)} images cannot be read": self.unreadable,
            f"{len(self.too_small)} images are smaller than {SMALLEST} px": self.too_small,
            f"{_groups(self.duplicates)} are the same": self.duplicates,
            f"{_groups(self.lookalikes)} are nearly the same": self.lookalikes,
            f"{_groups(self.conflicts)} are copies with different labels": self.conflicts,
            f"{len(self.test_in_train)} test images are in the training set too": self.test_in_train,
            f"classes with a single label: {', '.join(lone)}": lone,
            f"the largest class has {most} labels, the smallest {fewest}": most >= IMBALANCE * fewest,
        }
        return [line for line, found in lines.items() if found]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "warnings": self.warnings()}


def _groups(groups: Sequence[Sequence[str]]) -> str:
    return f"{len(groups):,} groups of images ({sum(map(len, groups)):,} in all)"


Watch = Callable[[Iterable[Look], str, int], Iterable[Look]]


def check_data(
    labeled: Path,
    unlabeled: Sequence[Path],
    test: Path | None,
    *,
    watch: Watch = lambda items, _title, _total: items,
) -> Findings:
    """Look at every image once, in worker processes."""
    train = merge([list_labeled(labeled), *(list_unlabeled(source) for source in unlabeled)])
    tests = Listing((), ()) if test is None else list_labeled(test)
    look = functools.partial(in_workers, look_at)
    looks = list(watch(look(train.images), "Looking at images", len(train.images)))
    test_looks = list(watch(look(tests.images), "Looking at test images", len(tests.images)))
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, seen in enumerate(looks):
        if seen.mark:
            groups[seen.mark].append(index)
    twins = [group for group in groups.values() if len(group) > 1]
    near, conflicting = _near_groups(looks, train.labels)
    different = [group for group in twins if _differ(group, train.labels)]
    leaks = _first_alike(test_looks, looks)
    leaks |= {row: groups[seen.mark][0] for row, seen in enumerate(test_looks) if seen.mark in groups}
    everything = [*looks, *test_looks]
    return Findings(
        classes=dict(sorted(Counter(label for label in train.labels if label is not None).items())),
        unlabeled=train.labels.count(None),
        test=dict(sorted(Counter(label for label in tests.labels if label is not None).items())),
        typical_side=statistics.median([look.side for look in everything if look.side] or [0]),
        unreadable=[(look.path, look.reason) for look in everything if look.reason],
        too_small=[look.path for look in everything if 0 < look.side < SMALLEST],
        duplicates=[[looks[i].path for i in group] for group in twins],
        lookalikes=[[looks[i].path for i in group] for group in near],
        conflicts=[[looks[i].path for i in group] for group in (*different, *conflicting)],
        test_in_train=[(test_looks[i].path, looks[j].path) for i, j in sorted(leaks.items())],
    )


def _differ(group: Sequence[int], labels: Sequence[str | None]) -> bool:
    return len({labels[i] for i in group} - {None}) > 1


def _near_groups(
    looks: Sequence[Look], labels: Sequence[str | None]
) -> tuple[list[list[int]], list[list[int]]]:
    """Groups of near copies of labeled images; and groups of those that differ in label from a near copy."""
    known = np.array([index for index, label in enumerate(labels) if label is not None])
    number = {label: place for place, label in enumerate(dict.fromkeys(labels))}
    label_of = np.array([-1 if label is None else number[label] for label in labels])
    near, conflicting = Groups(len(looks)), Groups(len(looks))
    for tile in near_copies([looks[index] for index in known], looks):
        rows = known[tile.rows]
        near.join(rows, tile.columns, tile.alike)
        both = (label_of[tile.columns] >= 0) & (label_of[rows, None] != label_of[tile.columns])
        conflicting.join(rows, tile.columns, tile.alike & both)
    return near.listed(), conflicting.listed()


def _first_alike(some: Sequence[Look], others: Sequence[Look]) -> dict[int, int]:
    """Of each image that has a near copy among others, the first of these."""
    found: dict[int, int] = {}
    for tile in near_copies(some, others):
        for row in np.flatnonzero(tile.alike.any(axis=1)).tolist():
            found.setdefault(int(tile.rows[row]), int(tile.columns[tile.alike[row].argmax()]))
    return found


def look_at(image: ImageRef) -> Look:
    """Size, a mark of the decoded pixels (copies in any lossless format have the same), and a thumbnail."""
    try:
        with open_image(image) as opened:
            side = min(opened.size)
        square = read_square(image, 4 * THUMB)
    except Exception as error:  # Pillow raises nearly anything on damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Look(str(image), 0, "", b"", reason)
    mark = hashlib.blake2b(square.tobytes(), digest_size=16).hexdigest()
    gray = square.reshape(THUMB, 4, THUMB, 4, 3).mean(axis=(1, 3, 4)).round().astype(np.uint8)
    return Look(str(image), side, mark, gray.tobytes(), "")
