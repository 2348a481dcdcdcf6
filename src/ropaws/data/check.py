"""What is wrong with a person's pictures, before an hour is spent on training."""

import hashlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from ropaws.data.files import merge
from ropaws.data.listing import Listing, list_labeled, list_unlabeled
from ropaws.data.pictures import UnreadableError, in_workers, read_square

SMALLEST = 16  # pixels; a shorter side than this shows little
IMBALANCE = 10  # times as many labels in the largest class as in the smallest


class Look(NamedTuple):
    """What one picture is like."""

    path: str
    side: int  # shorter side in pixels; 0 if it cannot be read
    mark: str  # equal for pictures that look the same
    reason: str  # why it cannot be read


@dataclass(frozen=True)
class Findings:
    """Counts, and lists of what deserves a look."""

    classes: dict[str, int]  # labelled pictures by class
    unlabeled: int
    test: dict[str, int]
    typical_side: float
    unreadable: list[tuple[str, str]]
    too_small: list[str]
    duplicates: list[list[str]]  # groups of pictures of the training set that look the same
    conflicts: list[list[str]]  # such groups with different labels
    test_in_train: list[tuple[str, str]]  # test picture, its twin in the training set

    def warnings(self) -> list[str]:
        """A line for each thing to mend."""
        fewest, most = min(self.classes.values()), max(self.classes.values())
        lone = [name for name, count in self.classes.items() if count == 1]
        lines = {
            f"{len(self.unreadable)} pictures cannot be read": self.unreadable,
            f"{len(self.too_small)} pictures are smaller than {SMALLEST} px": self.too_small,
            f"{len(self.duplicates)} groups of pictures look the same": self.duplicates,
            f"{len(self.conflicts)} groups of pictures look the same, with different labels": self.conflicts,
            f"{len(self.test_in_train)} test pictures are in the training set too": self.test_in_train,
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
    """Look at every picture once, in worker processes."""
    train = merge([list_labeled(labeled), *(list_unlabeled(source) for source in unlabeled)])
    tests = Listing((), ()) if test is None else list_labeled(test)
    looks = list(watch(in_workers(look_at, train.paths), "Looking at pictures", len(train.paths)))
    test_looks = list(watch(in_workers(look_at, tests.paths), "Looking at test pictures", len(tests.paths)))
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, look in enumerate(looks):
        if look.mark:
            groups[look.mark].append(index)
    twins = [group for group in groups.values() if len(group) > 1]
    conflicting = [group for group in twins if len({train.labels[i] for i in group} - {None}) > 1]
    everything = [*looks, *test_looks]
    return Findings(
        classes=dict(sorted(Counter(label for label in train.labels if label is not None).items())),
        unlabeled=train.labels.count(None),
        test=dict(sorted(Counter(label for label in tests.labels if label is not None).items())),
        typical_side=statistics.median([look.side for look in everything if look.side] or [0]),
        unreadable=[(look.path, look.reason) for look in everything if look.reason],
        too_small=[look.path for look in everything if 0 < look.side < SMALLEST],
        duplicates=[[looks[i].path for i in group] for group in twins],
        conflicts=[[looks[i].path for i in group] for group in conflicting],
        test_in_train=[
            (look.path, looks[groups[look.mark][0]].path)
            for look in test_looks
            if look.mark and look.mark in groups
        ],
    )


def look_at(path: Path) -> Look:
    """Size, and a mark of the decoded pixels: copies have the same one, also in another lossless format."""
    try:
        with Image.open(path) as picture:
            side = min(picture.size)
        square = read_square(path, 32)
    except (UnreadableError, OSError, SyntaxError, ValueError) as error:
        return Look(str(path), 0, "", str(error).splitlines()[0] if str(error) else type(error).__name__)
    return Look(str(path), side, hashlib.blake2b(square.tobytes(), digest_size=16).hexdigest(), "")
