"""Problems in a person's images, found before training."""

import functools
import hashlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ropaws.data.files.decoding import ImageRef, in_workers, open_image, read_square
from ropaws.data.files.listing import Listing, list_labeled, list_unlabeled, merge

SMALLEST = 16  # pixels; a shorter side than this shows little
IMBALANCE = 10  # times as many labels in the largest class as in the smallest
# Images whose thumbnails correlate like this, with the same brightness, are taken for copies of one
# another, in another size or quality. Flat ones have no structure to compare.
ALIKE, SAME_BRIGHTNESS, FLAT = 0.99, 10.0, 4.0
THUMB = 16  # pixels per side
BLOCK = 2048


class Look(NamedTuple):
    """What one image is like."""

    path: str
    side: int  # shorter side in pixels; 0 if it cannot be read
    mark: str  # equal for images with the same pixels
    thumb: bytes  # THUMB x THUMB gray pixels
    reason: str  # why it cannot be read


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
    lookalikes: list[tuple[str, str]]  # labeled image, another one of the training set that is much like it
    conflicts: list[list[str]]  # copies and lookalikes with different labels
    test_in_train: list[tuple[str, str]]  # test image, the same or much the same in the training set

    def warnings(self) -> list[str]:
        """One line for each kind of problem."""
        fewest, most = min(self.classes.values()), max(self.classes.values())
        lone = [name for name, count in self.classes.items() if count == 1]
        lines = {
            f"{len(self.unreadable)} images cannot be read": self.unreadable,
            f"{len(self.too_small)} images are smaller than {SMALLEST} px": self.too_small,
            f"{len(self.duplicates)} groups of images are the same": self.duplicates,
            f"{len(self.lookalikes)} labeled images have a near copy": self.lookalikes,
            f"{len(self.conflicts)} groups of copies have different labels": self.conflicts,
            f"{len(self.test_in_train)} test images are in the training set too": self.test_in_train,
            f"classes with a single label: {', '.join(lone)}": lone,
            f"the largest class has {most} labels, the smallest {fewest}": most >= IMBALANCE * fewest,
        }
        return [line for line, found in lines.items() if found]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "warnings": self.warnings()}


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
    known = [index for index, label in enumerate(train.labels) if label is not None]
    alike = [
        (known[row], column)
        for row, column in near_copies([looks[i] for i in known], looks)
        if known[row] != column
        and not (train.labels[column] is not None and column < known[row])  # each pair once
    ]
    conflicting = [group for group in [*twins, *map(list, alike)] if _differ(group, train.labels)]
    leaks = {row: groups[seen.mark][0] for row, seen in enumerate(test_looks) if seen.mark in groups}
    leaks = dict(near_copies(test_looks, looks)) | leaks
    everything = [*looks, *test_looks]
    return Findings(
        classes=dict(sorted(Counter(label for label in train.labels if label is not None).items())),
        unlabeled=train.labels.count(None),
        test=dict(sorted(Counter(label for label in tests.labels if label is not None).items())),
        typical_side=statistics.median([look.side for look in everything if look.side] or [0]),
        unreadable=[(look.path, look.reason) for look in everything if look.reason],
        too_small=[look.path for look in everything if 0 < look.side < SMALLEST],
        duplicates=[[looks[i].path for i in group] for group in twins],
        lookalikes=[(looks[i].path, looks[j].path) for i, j in alike],
        conflicts=[[looks[i].path for i in group] for group in conflicting],
        test_in_train=[(test_looks[i].path, looks[j].path) for i, j in sorted(leaks.items())],
    )


def _differ(group: Sequence[int], labels: Sequence[str | None]) -> bool:
    return len({labels[i] for i in group} - {None}) > 1


def near_copies(some: Sequence[Look], others: Sequence[Look]) -> list[tuple[int, int]]:
    """Positions of images and of others that are much like them, but do not have the very same pixels."""
    rows, columns = _structure(some), _structure(others)
    found = []
    for start in range(0, len(some), BLOCK):
        part = slice(start, start + BLOCK)
        alike = rows.pattern[part] @ columns.pattern.T > ALIKE
        alike &= abs(rows.brightness[part, None] - columns.brightness) < SAME_BRIGHTNESS
        pairs = np.argwhere(alike) + np.array([start, 0])
        found += [(i, j) for i, j in pairs.tolist() if some[i].mark != others[j].mark]
    return found


class _Structure(NamedTuple):
    pattern: NDArray[np.float32]  # (n, THUMB^2) unit rows, or zero for flat images
    brightness: NDArray[np.float32]  # (n,)


def _structure(looks: Sequence[Look]) -> _Structure:
    empty = bytes(THUMB * THUMB)
    pixels = np.frombuffer(b"".join(look.thumb or empty for look in looks), np.uint8)
    thumbs = pixels.reshape(len(looks), THUMB * THUMB).astype(np.float32)
    brightness = thumbs.mean(axis=1)
    thumbs -= brightness[:, None]
    length = np.linalg.norm(thumbs, axis=1, keepdims=True)
    thumbs /= np.where(length < FLAT * THUMB, np.inf, length)  # FLAT is a standard deviation
    return _Structure(thumbs, brightness)


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
