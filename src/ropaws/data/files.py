"""A person's own pictures as a corpus: folders and tables, decoded once into memory."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ropaws.data.corpus import UNKNOWN, Corpus
from ropaws.data.listing import Listing, list_labeled, list_unlabeled
from ropaws.data.pictures import UnreadableError, read_squares

MOST_UNREADABLE = 0.1  # share of a source above which something else must be wrong

# Passes an iterable through, showing progress: watch(items, title, total).
Watch = Callable[
    [Iterable[NDArray[np.uint8] | UnreadableError], str, int], Iterable[NDArray[np.uint8] | UnreadableError]
]


class Decoded(NamedTuple):
    """The readable pictures of a listing."""

    images: NDArray[np.uint8]  # (n, size, size, 3)
    kept: tuple[int, ...]  # their positions in the listing
    unreadable: tuple[tuple[str, str], ...]  # path and reason of the others


def no_watch(
    items: Iterable[NDArray[np.uint8] | UnreadableError], _title: str, _total: int
) -> Iterable[NDArray[np.uint8] | UnreadableError]:
    return items


def load_files(
    labeled: Path, unlabeled: Sequence[Path], test: Path | None, *, size: int, watch: Watch = no_watch
) -> Corpus:
    """Labelled pictures, then the pile; every picture once, also where folders overlap.

    Test classes that training does not have are out-of-class.
    """
    train = merge([list_labeled(labeled), *(list_unlabeled(source) for source in unlabeled)])
    decoded = decode(train.paths, size, watch, "Reading pictures")
    labels = [train.labels[i] for i in decoded.kept]
    class_names = tuple(sorted({label for label in train.labels if label is not None}))
    _check_classes(class_names, labels, decoded)
    number = {name: index for index, name in enumerate(class_names)}
    test_images, test_labels = decoded.images[:0], []
    unreadable = decoded.unreadable
    if test is not None:
        listing = list_labeled(test)
        tested = decode(listing.paths, size, watch, "Reading test pictures")
        test_images, unreadable = tested.images, unreadable + tested.unreadable
        test_labels = [number.get(listing.labels[i] or "", UNKNOWN) for i in tested.kept]
    return Corpus(
        class_names,
        _to_tensor(decoded.images),
        torch.tensor([UNKNOWN if label is None else number[label] for label in labels]),
        _to_tensor(test_images),
        torch.tensor(test_labels, dtype=torch.long),
        tuple(str(train.paths[i]) for i in decoded.kept),
        unreadable,
    )


def merge(listings: Sequence[Listing]) -> Listing:
    """One listing without repeats; a file that is labelled anywhere keeps its label."""
    label_of: dict[Path, str | None] = {}
    for listing in listings:
        for path, label in zip(listing.paths, listing.labels, strict=True):
            place = path.absolute()
            if label_of.get(place) is None:
                label_of[place] = label
    return Listing(tuple(label_of), tuple(label_of.values()))


def decode(paths: Sequence[Path], size: int, watch: Watch, title: str) -> Decoded:
    """Decode in worker processes; bad files are left out and listed, too many are an error."""
    images = np.empty((len(paths), size, size, 3), np.uint8)
    kept: list[int] = []
    unreadable: list[tuple[str, str]] = []
    for index, result in enumerate(watch(read_squares(paths, size), title, len(paths))):
        if isinstance(result, UnreadableError):
            unreadable.append((str(paths[index]), str(result)))
        else:
            images[len(kept)] = result
            kept.append(index)
    if len(unreadable) > MOST_UNREADABLE * len(paths):
        first = "; ".join(f"{path} ({reason})" for path, reason in unreadable[:3])
        raise ValueError(f"{len(unreadable)} of {len(paths)} pictures cannot be read, first: {first}")
    return Decoded(images[: len(kept)], tuple(kept), tuple(unreadable))


def _check_classes(names: Sequence[str], labels: Sequence[str | None], decoded: Decoded) -> None:
    lost = [name for name in names if name not in labels]
    if lost:
        raise ValueError(f"class {lost[0]!r} has no readable picture; see {decoded.unreadable[0][0]}")
    if len(names) < 2:
        raise ValueError(f"--labeled has the single class {names[0]!r}; a classifier needs two or more")


def _to_tensor(images: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
