"""Problems in a person's images, found before training."""

import functools
import hashlib
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ropaws.core.labels import OUT_OF_CLASS_NAME
from ropaws.core.terminal import shown_path
from ropaws.pool.content import (
    ImageRef,
    UnreadableError,
    image_size,
    one_line_errors,
    read_content,
    remedies,
)
from ropaws.pool.decoding import decode_content, in_workers
from ropaws.pool.listing import Pool

THUMB = 16  # pixels per side of a thumbnail
# Images whose thumbnails correlate like this, with the same brightness, are taken for copies of one
# another. Flat ones have no structure to compare.
ALIKE, SAME_BRIGHTNESS, FLAT = 0.99, 10.0, 4.0
BLOCK = 1024  # images that are compared with as many others at a time


class Look(NamedTuple):
    """What one image is like."""

    path: str
    size: tuple[int, int]  # width and height in pixels; zeros if it cannot be read
    mark: str  # equal for images with the same pixels
    thumb: bytes  # THUMB x THUMB gray pixels
    reason: str  # why it cannot be read


class Groups:
    """Positions 0 to n - 1, joined to groups."""

    def __init__(self, count: int) -> None:
        self._leader = np.arange(count)  # of the group of each, or a step on the way to it

    def join(self, rows: NDArray[np.int64], columns: NDArray[np.int64], alike: NDArray[np.bool_]) -> None:
        """Join each position in rows with each in columns where alike (r, c) says so."""
        from scipy.sparse import coo_matrix  # slow to load
        from scipy.sparse.csgraph import connected_components

        row, column = alike.nonzero()
        if len(row) == 0:
            return
        # One step from each member to the first of its part is enough, whatever the number of pairs.
        ends = (len(rows) + len(columns),) * 2
        _, part = connected_components(
            coo_matrix((np.ones(len(row), np.int8), (row, len(rows) + column)), ends), directed=False
        )
        places = np.concatenate([rows, columns])
        joined = np.zeros(len(places), bool)
        joined[row], joined[len(rows) + column] = True, True
        first: dict[int, int] = {}
        for place, number in zip(places[joined].tolist(), part[joined].tolist(), strict=True):
            self._join_pair(first.setdefault(number, place), place)

    def _join_pair(self, one: int, other: int) -> None:
        one, other = self._find(one), self._find(other)
        self._leader[max(one, other)] = min(one, other)

    def _find(self, position: int) -> int:
        while (leader := int(self._leader[position])) != position:
            self._leader[position] = self._leader[leader]  # halves the way for the next one
            position = leader
        return position

    def listed(self) -> list[list[int]]:
        """Groups of two or more, each in order."""
        found: dict[int, list[int]] = {}
        for position in range(len(self._leader)):
            found.setdefault(self._find(position), []).append(position)
        return [group for group in found.values() if len(group) > 1]


class Tile(NamedTuple):
    """Some images against some others."""

    rows: NDArray[np.int64]  # (r,) positions
    columns: NDArray[np.int64]  # (c,)
    alike: NDArray[np.bool_]  # (r, c) nearly the same, but not the very same pixels


def near_copies(some: Sequence[Look], others: Sequence[Look]) -> Iterator[Tile]:
    """Which images are much like which others, a block at a time; blocks without any are left out."""
    marks = {look.mark: number for number, look in enumerate(others)}
    left, right = _structure(some, marks), _structure(others, marks)
    for rows in _blocks(len(some)):
        pattern = left.pattern(rows)
        for columns in _blocks(len(others)):
            alike = pattern @ right.pattern(columns).T > ALIKE
            alike &= abs(left.brightness[rows, None] - right.brightness[columns]) < SAME_BRIGHTNESS
            alike &= left.mark[rows, None] != right.mark[columns]
            if alike.any():
                yield Tile(rows, columns, alike)


def _blocks(count: int) -> list[NDArray[np.int64]]:
    return [np.arange(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK)]


class _Structure(NamedTuple):
    thumbs: NDArray[np.uint8]  # (n, THUMB^2)
    brightness: NDArray[np.float32]  # (n,)
    mark: NDArray[np.int64]  # (n,) equal for the same pixels, -1 for pixels that no other has

    def pattern(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Unit rows, or zero for flat images. Computed when asked for: of all they take a kilobyte each.

        (r,)  ->  (r, THUMB^2)
        """
        pattern = self.thumbs[rows].astype(np.float32)
        pattern -= self.brightness[rows, None]
        length = np.linalg.norm(pattern, axis=1, keepdims=True)
        pattern /= np.where(length < FLAT * THUMB, np.inf, length)  # FLAT is a standard deviation
        return pattern


def _structure(looks: Sequence[Look], marks: dict[str, int]) -> _Structure:
    empty = bytes(THUMB * THUMB)
    pixels = np.frombuffer(b"".join(look.thumb or empty for look in looks), np.uint8)
    thumbs = pixels.reshape(len(looks), THUMB * THUMB)
    brightness = np.empty(len(looks), np.float32)
    for rows in _blocks(len(looks)):
        brightness[rows] = thumbs[rows].astype(np.float32).mean(axis=1)
    return _Structure(thumbs, brightness, np.array([marks.get(look.mark, -1) for look in looks], np.int64))


SMALLEST = 16  # pixels; a shorter side than this shows little
IMBALANCE = 5  # times as many labels in the largest class as in the smallest
LEAST_OF_ONE_SIZE = 10  # images, so that one of another size is odd
SHORTEST = 5  # letters of a class name that may be a slip of another: cat and bat are two words


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Counts, and lists of what deserves a look."""

    classes: dict[str, int]  # labeled images by class, without those that cannot be read
    unlabeled: int  # likewise
    test: dict[str, int]
    typical_side: float
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    too_small: list[str] = field(default_factory=list)
    odd_sizes: list[tuple[str, str]] = field(default_factory=list)  # where nearly all have one size
    duplicates: list[list[str]] = field(default_factory=list)  # groups of training images, the same pixels
    labeled_in_pool: list[tuple[str, str]] = field(default_factory=list)  # and the same in the pool
    lookalikes: list[list[str]] = field(default_factory=list)  # groups, some labeled, nearly the same
    conflicts: list[list[str]] = field(default_factory=list)  # groups of (near) copies, different labels
    test_in_train: list[tuple[str, str]] = field(default_factory=list)  # and the same or nearly in training
    left_out: list[str] = field(default_factory=list)  # a line for each thing that the listing left out

    def warnings(self) -> list[str]:
        """One line for each kind of problem: how many, what to do, and the first of them."""
        return [*self.left_out, *self._about_images(), *self._about_classes()]

    def _about_images(self) -> Iterator[str]:
        need = remedies(reason for _, reason in self.unreadable)
        for found, words in (
            (self.unreadable, f"that cannot be read, so not counted; copy anew or remove{need}"),
            (self.too_small, f"smaller than {SMALLEST} px, which shows little; replace or remove"),
            (self.odd_sizes, "unlike all the others in size; look whether they belong here"),
            (self.duplicates, "with the same pixels; keep one of each"),
            (self.labeled_in_pool, "with a label and in the pool too, by another name; remove it there"),
            (self.lookalikes, "nearly the same; keep one of each, unless all shall count"),
            (self.conflicts, "copied under different labels; keep one label"),
            (self.test_in_train, "for testing and in the training set too; remove one of the two"),
        ):
            if found:
                yield f"{_counted(found)} {words}: {_first(found)}"

    def _about_classes(self) -> Iterator[str]:
        counts = {name: count for name, count in self.classes.items() if name != OUT_OF_CLASS_NAME}
        ranked = sorted(counts, key=lambda name: counts[name])
        fewest, most = ranked[0], ranked[-1]
        if none := [name for name, count in counts.items() if count == 0]:
            yield f"classes without a readable image: {', '.join(none)}; add some, or remove the class"
        if lone := [name for name, count in counts.items() if count == 1]:
            yield f"classes with a single label: {', '.join(lone)}; add one at least, `ropaws explore` helps"
        if counts[most] >= IMBALANCE * counts[fewest]:
            few = f"{most} has {counts[most]:,} labels, {fewest} {counts[fewest]:,}"
            yield f"{few}: label more of the small classes"
        for rare, common in slips(ranked):
            both = f"classes {rare} ({counts[rare]:,}) and {common} ({counts[common]:,})"
            yield f"{both} are named nearly alike; if they mean the same, make them one"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "warnings": self.warnings()}


def _counted(found: Sequence[Any]) -> str:
    """Images, or groups of images."""
    if isinstance(found[0], list):
        groups = "1 group" if len(found) == 1 else f"{len(found):,} groups"
        return f"{groups} of images ({sum(map(len, found)):,} in all)"
    return "1 image" if len(found) == 1 else f"{len(found):,} images"


def _first(found: Sequence[Any]) -> str:
    """The first of them, as an example."""
    parts = [found[0]] if isinstance(found[0], str) else found[0]
    shown = [shown_path(part) for part in parts[:2]]
    example = shown[0] if len(shown) == 1 else f"{shown[0]} ({shown[1]})"
    return f"{example} ..." if len(found) > 1 else example


def slips(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of names, in their order, that differ by a letter: missing, added, another, or two swapped.

    Such names are the same once a letter is taken out of one or both, so that not every pair is tried.
    """
    without: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for name in names:
        for place in range(len(name) + 1):  # the last takes none out
            without[(name[:place] + name[place + 1 :]).casefold()][name] = None
    pairs = (pair for found in without.values() for pair in itertools.combinations(found, 2))
    return list(dict.fromkeys(pair for pair in pairs if _is_slip(*pair)))


def _is_slip(one: str, other: str) -> bool:
    """By one letter, in names that are long enough for it and not numbered, as class 1 and class 2 are."""
    one, other = sorted((one.casefold(), other.casefold()), key=len)
    start = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    rest, others = one[start:], other[start:]
    if len(one) < SHORTEST or any(letter.isdigit() for letter in rest[:1] + others[:1]):
        return False
    swapped = rest[:2] == others[1::-1] and rest[2:] == others[2:]
    return rest == others[1:] or rest[1:] == others[1:] or swapped


Watch = Callable[[Iterable[Look], str, int], Iterable[Look]]


def check_data(
    labeled: Path,
    unlabeled: Sequence[Path],
    test: Path | None,
    *,
    watch: Watch = lambda items, _title, _total: items,
) -> Findings:
    """Look at every image once, in worker processes."""
    train = Pool.open(unlabeled, labeled=labeled, may_be_empty=True)
    tests = Pool.open(test=() if test is None else test, may_be_empty=True)
    look = functools.partial(in_workers, look_at)
    looks = list(watch(look(train.images), "Looking at images", len(train.images)))
    test_looks = list(watch(look(tests.images), "Looking at test images", len(tests.images)))
    copies: defaultdict[str, list[int]] = defaultdict(list)
    for index, seen in enumerate(looks):
        if seen.mark:
            copies[seen.mark].append(index)
    twins = [group for group in copies.values() if len(group) > 1]
    near, conflicting = _near_groups(looks, train.labels)
    different = [group for group in twins if _differ(group, train.labels)]
    leaks = _first_alike(test_looks, looks)
    leaks |= {row: copies[seen.mark][0] for row, seen in enumerate(test_looks) if seen.mark in copies}
    everything = [*looks, *test_looks]
    return Findings(
        classes=_per_class(train.labels, looks),
        unlabeled=sum(
            not look.reason for look, label in zip(looks, train.labels, strict=True) if label is None
        ),
        test=_per_class(tests.labels, test_looks),
        typical_side=statistics.median([min(look.size) for look in everything if not look.reason] or [0]),
        unreadable=[(look.path, look.reason) for look in everything if look.reason],
        too_small=[look.path for look in everything if 0 < min(look.size) < SMALLEST],
        odd_sizes=_odd_sizes(everything),
        duplicates=[[looks[i].path for i in group] for group in twins],
        labeled_in_pool=[(looks[i].path, looks[j].path) for i, j in _in_both(twins, train.labels)],
        lookalikes=[[looks[i].path for i in group] for group in near],
        conflicts=[[looks[i].path for i in group] for group in (*different, *conflicting)],
        test_in_train=[(test_looks[i].path, looks[j].path) for i, j in sorted(leaks.items())],
        left_out=[*train.notes, *tests.notes],
    )


def _per_class(labels: Sequence[str | None], looks: Sequence[Look]) -> dict[str, int]:
    """Images that can be read, by class."""
    found = Counter({label: 0 for label in labels if label is not None})
    found.update(label for label, look in zip(labels, looks, strict=True) if label and not look.reason)
    return dict(sorted(found.items()))


def _odd_sizes(looks: Sequence[Look]) -> list[tuple[str, str]]:
    """Images of another size than all the others have: one of them, or one in a hundred."""
    seen = [look for look in looks if not look.reason]
    usual = Counter(look.size for look in seen).most_common(1)
    odd = [look for look in seen if look.size != usual[0][0]]
    if len(seen) < LEAST_OF_ONE_SIZE or len(odd) > max(1, len(seen) // 100):
        return []
    width, height = usual[0][0]
    return [(look.path, f"{look.size[0]} x {look.size[1]} px, not {width} x {height}") for look in odd]


def _in_both(groups: Sequence[Sequence[int]], labels: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """Of each group of copies the first with a label, beside each without."""
    for group in groups:
        known = next((i for i in group if labels[i] is not None), None)
        if known is not None:
            yield from ((known, i) for i in group if labels[i] is None)


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
        with one_line_errors():
            content = read_content(image)
            size = image_size(content)
        square = decode_content(content, 4 * THUMB, "center").square
    except UnreadableError as error:
        return Look(str(image), (0, 0), "", b"", str(error))
    mark = hashlib.blake2b(square.tobytes(), digest_size=16).hexdigest()
    gray = square.reshape(THUMB, 4, THUMB, 4, 3).mean(axis=(1, 3, 4)).round().astype(np.uint8)
    return Look(str(image), size, mark, gray.tobytes(), "")
