"""Images as a corpus: decoded once into memory, or, where they are too many, read while training."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ropaws.core.labels import OUT_OF_CLASS, UNLABELED, class_names_of, label_codes
from ropaws.pool.content import KEY_BYTES, ImageRef, UnreadableError, image_size
from ropaws.pool.corpus import Corpus, Images
from ropaws.pool.decoding import read_images
from ropaws.pool.listing import Pool, merge
from ropaws.pool.square_cache import Found, SquareCache, Wanted
from ropaws.pool.streaming import ImageStack
from ropaws.pool.whole_images import Crop, WholeImages

MOST_UNREADABLE = 0.1  # share of a source above which something else must be wrong
SAMPLE = 200  # images whose shape is looked at before they are decoded

# Passes an iterable through, showing progress: watch(items, title, total).
Watch = Callable[[Iterable[Any], str, int], Iterable[Any]]


class ImageFiles(NamedTuple):
    """Image files to train and to test on, not decoded yet."""

    class_names: tuple[str, ...]
    train: Pool
    test: Pool  # labels that are not class names are out-of-class


@dataclass(frozen=True)
class Decoding:
    """How images become pixels."""

    size: int
    memory: float = float("inf")  # bytes of pixels to hold at most; more are read while training
    cache: SquareCache | None = None
    workers: int | None = None
    crop: Crop = "center"  # what random views of training images are made of

    def needed(self, files: ImageFiles) -> float:
        """Bytes of all pixels: a square of each image, and of those that are not square the whole too."""
        train, tests = len(files.train.images), len(files.test.images)
        wholes = train * _share_not_square(files.train.images) if self.crop == "whole" else 0
        return (train + tests + wholes) * 3 * self.size**2


def _share_not_square(images: Sequence[ImageRef]) -> float:
    """Estimated from the headers of a few."""
    odd = seen = 0
    for image in images[:: max(1, len(images) // SAMPLE)]:
        try:
            width, height = image_size(image)
        except Exception:  # whatever Pillow raises on a damaged file; reported when it is decoded
            continue
        odd += width != height
        seen += 1
    return odd / max(1, seen)


class Decoded(NamedTuple):
    """The readable images of a listing."""

    images: Images  # (n, 3, size, size)
    kept: Sequence[int]  # their positions in the listing
    unreadable: tuple[tuple[str, str], ...] = ()  # name and reason of the others
    keys: NDArray[np.uint8] | None = None  # (n, KEY_BYTES) of their content, where it was read


def no_watch(items: Iterable[Any], _title: str, _total: int) -> Iterable[Any]:
    return items


def own_images(
    labeled: Path,
    unlabeled: Sequence[Path],
    test: Path | None,
    *,
    out_of_class: Sequence[Path] = (),
    prefix: str = "--",
) -> ImageFiles:
    """Labeled images, those that belong to no class, then the pool; every image once, where folders overlap.

    prefix: of the names of the sources in errors: "--" for options, "data." for settings
    """
    name = f"{prefix}labeled"
    train = Pool.open(unlabeled, labeled=labeled, out_of_class=out_of_class, prefix=prefix)
    class_names = class_names_of(train.labels)
    if len(class_names) < 2:
        raise ValueError(f"{name} has the single class {class_names[0]!r}; a classifier needs two or more")
    tests = Pool.open(test=() if test is None else test, prefix=prefix)
    return ImageFiles(class_names, train, tests)


def join_files(files: ImageFiles, extra: ImageFiles) -> ImageFiles:
    """Uncurated data: the images of another source join as unlabeled, and as out-of-class tests."""
    unlabeled = Pool(extra.train.images, (None,) * len(extra.train.images))
    tests = Pool(
        files.test.images + extra.test.images,
        files.test.labels + (None,) * len(extra.test.images),
    )
    return ImageFiles(files.class_names, merge([files.train, unlabeled]), tests)


def decode_corpus(files: ImageFiles, decoding: Decoding, watch: Watch = no_watch) -> Corpus:
    """Test classes that training does not have are out-of-class."""
    train, test = files.train, files.test
    streams = decoding.needed(files) > decoding.memory

    def numbers(listing: Pool, kept: Sequence[int], others: int) -> torch.Tensor:
        labels = (listing.labels[i] for i in kept)
        return torch.tensor(label_codes(labels, files.class_names, others=others), dtype=torch.long)

    read = stack if streams else decode
    trained = read(train.images, decoding, watch, "Reading images")
    # Of test images there are center views alone.
    tested = read(test.images, replace(decoding, crop="center"), watch, "Reading test images")
    _check_classes(files.class_names, {train.labels[i] for i in trained.kept}, trained)
    return Corpus(
        files.class_names,
        trained.images,
        numbers(train, trained.kept, UNLABELED),
        tested.images,
        numbers(test, tested.kept, OUT_OF_CLASS),
        tuple(str(train.images[i]) for i in trained.kept),
        trained.unreadable + tested.unreadable,
        notes=train.notes + test.notes,
        train_keys=trained.keys,
        test_keys=tested.keys,
    )


def stack(files: Sequence[ImageRef], decoding: Decoding, _watch: Watch, _title: str) -> Decoded:
    """Nothing is read yet; bad files are found while training."""
    images = ImageStack(
        files, decoding.size, crop=decoding.crop, cache=decoding.cache, workers=decoding.workers
    )
    return Decoded(images, range(len(files)))


def decode(files: Sequence[ImageRef], decoding: Decoding, watch: Watch, title: str) -> Decoded:
    """Decode in worker processes; bad files are left out and listed, too many are an error."""
    pixels = _Pixels(len(files), decoding.size)
    kept: list[int] = []
    unreadable: list[tuple[str, str]] = []
    keys: list[bytes] = []
    wanted: Wanted = "both" if decoding.crop == "whole" else "center"
    results = read_images(files, decoding.size, wanted, cache=decoding.cache, workers=decoding.workers)
    for index, result in enumerate(watch(results, title, len(files)) if files else ()):
        if isinstance(result, UnreadableError):
            unreadable.append((str(files[index]), str(result)))
        else:
            pixels.add(result)
            keys.append(result.key)
            kept.append(index)
    check_unreadable(dict(unreadable), len(files))
    content = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)
    return Decoded(pixels.images(), kept, tuple(unreadable), content)


class _Pixels:
    """Images as they are decoded."""

    def __init__(self, count: int, size: int) -> None:
        self.shape = (count, 3, size, size)
        self.squares = np.empty(self.shape, np.uint8)
        self.wholes = np.empty((0, 3, size, size), np.uint8)
        self.place: list[int] = []
        self.aspects: list[float] = []
        self.count = 0  # whole images that are not square

    def add(self, found: Found) -> None:
        self.squares[len(self.place)] = found.square.transpose(2, 0, 1)
        if found.whole is None or found.aspect == 1:
            self.place.append(-1)
        else:
            if self.count == 0:  # room for all that may come; what is not filled takes no memory
                self.wholes = np.empty(self.shape, np.uint8)
            self.wholes[self.count] = found.whole.transpose(2, 0, 1)
            self.place.append(self.count)
            self.count += 1
        self.aspects.append(found.aspect)

    def images(self) -> Images:
        """A tensor, if all are square or seen in the center alone."""
        squares = torch.from_numpy(self.squares[: len(self.place)])
        if self.count == 0:
            return squares
        wholes = torch.from_numpy(self.wholes[: self.count])
        return WholeImages(squares, wholes, torch.tensor(self.place), torch.tensor(self.aspects))


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
            " repair or remove them (`ropaws check --json FILE` lists all)"
        )


def _check_classes(names: Sequence[str], left: set[str | None], decoded: Decoded) -> None:
    lost = [name for name in names if name not in left]
    if lost and decoded.unreadable:
        raise ValueError(f"class {lost[0]!r} has no readable image; see {decoded.unreadable[0][0]}")
