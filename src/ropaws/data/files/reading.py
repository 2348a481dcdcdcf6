"""Images as a corpus: decoded once into memory, or, where they are too many, read while training."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ropaws.data.corpus import UNKNOWN, Corpus, Images
from ropaws.data.files.cache import SquareCache
from ropaws.data.files.decoding import ImageRef, UnreadableError, read_squares
from ropaws.data.files.listing import Listing, list_labeled, list_unlabeled, merge
from ropaws.data.files.streaming import ImageStack

MOST_UNREADABLE = 0.1  # share of a source above which something else must be wrong

# Passes an iterable through, showing progress: watch(items, title, total).
Watch = Callable[
    [Iterable[NDArray[np.uint8] | UnreadableError], str, int], Iterable[NDArray[np.uint8] | UnreadableError]
]


class ImageFiles(NamedTuple):
    """Image files to train and to test on, not decoded yet."""

    class_names: tuple[str, ...]
    train: Listing
    test: Listing  # labels that are not class names are out-of-class


@dataclass(frozen=True)
class Decoding:
    """How images become pixels."""

    size: int
    memory: float = float("inf")  # bytes of pixels to hold at most; more are read while training
    cache: SquareCache | None = None
    workers: int | None = None


class Decoded(NamedTuple):
    """The readable images of a listing."""

    images: Images  # (n, 3, size, size)
    kept: Sequence[int]  # their positions in the listing
    unreadable: tuple[tuple[str, str], ...] = ()  # name and reason of the others


def no_watch(
    items: Iterable[NDArray[np.uint8] | UnreadableError], _title: str, _total: int
) -> Iterable[NDArray[np.uint8] | UnreadableError]:
    return items


def own_images(labeled: Path, unlabeled: Sequence[Path], test: Path | None) -> ImageFiles:
    """Labeled images, then the pool; every image once, also where folders overlap."""
    train = merge([list_labeled(labeled), *(list_unlabeled(source) for source in unlabeled)])
    class_names = tuple(sorted({label for label in train.labels if label is not None}))
    if len(class_names) < 2:
        raise ValueError(f"--labeled has the single class {class_names[0]!r}; a classifier needs two or more")
    return ImageFiles(class_names, train, Listing() if test is None else list_labeled(test))


def join_files(files: ImageFiles, extra: ImageFiles) -> ImageFiles:
    """Uncurated data: the images of another source join as unlabeled, and as out-of-class tests."""
    unlabeled = Listing(extra.train.images, (None,) * len(extra.train.images))
    tests = Listing(
        files.test.images + extra.test.images,
        files.test.labels + (None,) * len(extra.test.images),
    )
    return ImageFiles(files.class_names, merge([files.train, unlabeled]), tests)


def decode_corpus(files: ImageFiles, decoding: Decoding, watch: Watch = no_watch) -> Corpus:
    """Test classes that training does not have are out-of-class."""
    train, test = files.train, files.test
    count = len(train.images) + len(test.images)
    streams = count * 3 * decoding.size**2 > decoding.memory
    number = {name: index for index, name in enumerate(files.class_names)}

    def numbers(listing: Listing, kept: Sequence[int]) -> torch.Tensor:
        return torch.tensor([number.get(listing.labels[i] or "", UNKNOWN) for i in kept], dtype=torch.long)

    read = stack if streams else decode
    trained = read(train.images, decoding, watch, "Reading images")
    tested = read(test.images, decoding, watch, "Reading test images")
    _check_classes(files.class_names, {train.labels[i] for i in trained.kept}, trained)
    return Corpus(
        files.class_names,
        trained.images,
        numbers(train, trained.kept),
        tested.images,
        numbers(test, tested.kept),
        tuple(str(train.images[i]) for i in trained.kept),
        trained.unreadable + tested.unreadable,
    )


def stack(files: Sequence[ImageRef], decoding: Decoding, _watch: Watch, _title: str) -> Decoded:
    """Nothing is read yet; bad files are found while training."""
    images = ImageStack(files, decoding.size, cache=decoding.cache, workers=decoding.workers)
    return Decoded(images, range(len(files)))


def decode(files: Sequence[ImageRef], decoding: Decoding, watch: Watch, title: str) -> Decoded:
    """Decode in worker processes; bad files are left out and listed, too many are an error."""
    size = decoding.size
    images = np.empty((len(files), 3, size, size), np.uint8)
    kept: list[int] = []
    unreadable: list[tuple[str, str]] = []
    results = read_squares(files, size, cache=decoding.cache, workers=decoding.workers)
    for index, result in enumerate(watch(results, title, len(files)) if files else ()):
        if isinstance(result, UnreadableError):
            unreadable.append((str(files[index]), str(result)))
        else:
            images[len(kept)] = result.transpose(2, 0, 1)
            kept.append(index)
    check_unreadable(dict(unreadable), len(files))
    return Decoded(torch.from_numpy(images[: len(kept)]), kept, tuple(unreadable))


def drop_unreadable_tests(corpus: Corpus) -> Corpus:
    """Where images are read as they are needed: the test images that can be, as if all were in memory."""
    images = corpus.test_images
    if corpus.tests_readable or not isinstance(images, ImageStack):
        return corpus
    bad = images.unreadable(torch.arange(len(images)))
    names = {str(images.files[position]): reason for position, reason in bad.items()}
    check_unreadable(names, len(images))
    kept = [position for position in range(len(images)) if position not in bad]
    readable = ImageStack(
        [images.files[position] for position in kept],
        images.size,
        cache=images.cache,
        workers=images.workers,
    )
    return corpus._replace(
        test_images=readable,
        test_labels=corpus.test_labels[kept],
        unreadable=corpus.unreadable + tuple(names.items()),
        tests_readable=True,
    )


def check_unreadable(unreadable: dict[str, str], seen: int) -> None:
    """A few bad files are normal; many mean that something else is wrong."""
    if len(unreadable) > MOST_UNREADABLE * seen:
        first = "; ".join(f"{name} ({reason})" for name, reason in list(unreadable.items())[:3])
        raise ValueError(
            f"{len(unreadable)} of {seen} images cannot be read, first: {first}. More than 10 % is too many;"
            " repair or remove them (`ropaws check` lists all)"
        )


def _check_classes(names: Sequence[str], left: set[str | None], decoded: Decoded) -> None:
    lost = [name for name in names if name not in left]
    if lost and decoded.unreadable:
        raise ValueError(f"class {lost[0]!r} has no readable image; see {decoded.unreadable[0][0]}")
