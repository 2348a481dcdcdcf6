"""All the images of a run, and what is known of them: in memory, or read while training if too many."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ropaws.core.cores import own_cores
from ropaws.core.features import Features
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED, class_names_of, label_codes
from ropaws.core.randomness import POOL, generator
from ropaws.pool.augment import Normalization
from ropaws.pool.content import KEY_BYTES, ImageRef, UnreadableError, image_size
from ropaws.pool.decoding import (
    Crop,
    Found,
    ReadBatch,
    ReadRequest,
    SquareCache,
    Wanted,
    read_batch,
    read_images,
    read_or_error,
    read_squares,
)
from ropaws.pool.image_ops import grayscale
from ropaws.pool.listing import Pool, merge

MOST_TRIES = 100  # neighbors that are tried in the place of an unreadable image


class Completed(NamedTuple):
    """Images that were read, each bad one replaced by the next good one."""

    images: Tensor  # (k, 3, size, size) uint8
    aspects: Tensor | None  # (k,) of whole images; None for central squares
    positions: Tensor  # (k,) of the images that are shown
    failures: dict[str, str]  # unreadable files, and why


class ImageStack:
    """Indexed like a tensor (n, 3, size, size) of central squares of uint8, but read when asked for.

    crop: what random views are made of; where it is "whole", a request may ask for whole images.
    """

    def __init__(
        self,
        files: Sequence[ImageRef],
        size: int,
        *,
        crop: Crop = "center",
        cache: SquareCache | None = None,
        workers: int | None = None,
    ) -> None:
        self.crop = crop
        self.files = tuple(files)
        self.size = size
        self.cache = cache
        self.workers = workers

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.files), 3, self.size, self.size))

    @property
    def worker_count(self) -> int:
        return self.workers or own_cores()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """Read in worker processes; an image that cannot be read is an error."""
        chosen = self._chosen(index)
        squares: list[NDArray[np.uint8]] = []
        results = read_squares(chosen, self.size, cache=self.cache, workers=self.workers)
        for file, result in zip(chosen, results, strict=True):
            if isinstance(result, UnreadableError):
                raise _gone(file, result)
            squares.append(result)
        return stack_squares(squares, self.size)

    def unreadable(self, index: Tensor) -> dict[int, str]:
        """Which of these positions cannot be read, and why."""
        results = read_squares(self._chosen(index), self.size, cache=self.cache, workers=self.workers)
        pairs = zip(index.tolist(), results, strict=True)
        return {position: str(result) for position, result in pairs if isinstance(result, UnreadableError)}

    def request(self, index: Tensor, wanted: Wanted = "center") -> ReadRequest:
        """What read_batch needs for these positions, in any process."""
        return ReadRequest(self._chosen(index), self.size, wanted)

    def read(self, index: Tensor) -> tuple[Tensor, dict[str, str]]:
        """Read in this process.   ->  squares (k, 3, size, size), and the reasons of unreadable ones"""
        found = self.complete(index, read_batch(self.request(index), self.cache))
        return found.images, found.failures

    def complete(self, index: Tensor, result: ReadBatch, *, strict_from: int | None = None) -> Completed:
        """What was read, with the next good image in the place of each bad one.

        The rule needs no random choice, so a resumed run sees the same images. From row strict_from on a bad
        image is an error.
        """
        failures: dict[str, str] = {}
        positions = index.clone()
        for row, reason in result.unreadable.items():
            position = int(index[row])
            if strict_from is not None and row >= strict_from:
                raise _gone(self.files[position], reason)
            failures[str(self.files[position])] = reason
            wanted: Wanted = "center" if result.aspects is None else "whole"
            positions[row], found = self._next_good(position, failures, wanted)
            result.squares[row] = found.square
            if result.aspects is not None:
                result.aspects[row] = found.aspect
        aspects = None if result.aspects is None else torch.from_numpy(result.aspects)
        return Completed(torch.from_numpy(result.squares).permute(0, 3, 1, 2), aspects, positions, failures)

    def _next_good(self, position: int, failures: dict[str, str], wanted: Wanted) -> tuple[int, Found]:
        for step in range(1, MOST_TRIES):
            following = (position + step) % len(self.files)
            file = self.files[following]
            found = read_or_error(file, wanted, self.size, self.cache)
            if not isinstance(found, UnreadableError):
                return following, found
            failures[str(file)] = str(found)
        raise ValueError(f"{MOST_TRIES} images in a row cannot be read, the last is {file}")

    def digest(self) -> str:
        """A fingerprint from names and file sizes: reading every image for it would take too long.

        A name is that of the file and of its folder, so that images may be moved together.
        """
        state = hashlib.blake2b(str(self.size).encode(), digest_size=16)
        for file in self.files:
            state.update(os.fsencode("/".join(str(file).rsplit(os.sep, 2)[-2:])))
            state.update(str(file.stat().st_size if isinstance(file, Path) else "").encode())
        return state.hexdigest()

    def _chosen(self, index: Tensor | slice) -> list[ImageRef]:
        if isinstance(index, slice):
            return list(self.files[index])
        return [self.files[position] for position in index.tolist()]


def _gone(file: ImageRef, reason: object) -> ValueError:
    return ValueError(f"{file} cannot be read any more ({reason}); restore it")


def stack_squares(squares: Iterable[NDArray[np.uint8]], size: int) -> Tensor:
    """(size, size, 3) each  ->  (n, 3, size, size), the channels of a pixel side by side in memory"""
    listed = list(squares)
    stacked = np.empty((len(listed), size, size, 3), np.uint8)
    for place, square in zip(stacked, listed, strict=True):
        place[:] = square
    return torch.from_numpy(stacked).permute(0, 3, 1, 2)


class WholeBatch(NamedTuple):
    """Images of which random views are made."""

    pixels: Tensor  # (k, channels, h, w) uint8
    aspects: Tensor | None = None  # (k,) width / height, on the CPU; None: as h and w say


class WholeImages:
    """Indexed like the tensor of central squares; the whole images that are not square are kept besides.

    Args:
        squares: Central squares (n, channels, size, size), uint8.
        wholes: The whole images that are not square, squeezed to squares (m, channels, size, size).
        place: Row of each image in wholes, -1 for square images (n,).
        aspects: Width / height of each image (n,).
    """

    def __init__(self, squares: Tensor, wholes: Tensor, place: Tensor, aspects: Tensor) -> None:
        self.squares = squares
        self.wholes = wholes
        self.place = place.cpu()
        self.aspects = aspects.cpu()  # views are drawn there

    @property
    def shape(self) -> torch.Size:
        return self.squares.shape

    def __len__(self) -> int:
        return len(self.squares)

    def __getitem__(self, index: Any, /) -> Tensor:
        """Central squares.   (k,)  ->  (k, channels, size, size)"""
        return self.squares[index]

    def whole(self, index: Tensor) -> WholeBatch:
        """Whole images."""
        device, index = self.squares.device, index.cpu()
        pixels = self.squares[index.to(device)]
        place = self.place[index]
        rows = (place >= 0).nonzero().squeeze(1)
        pixels.index_copy_(0, rows.to(device), self.wholes[place[rows].to(device)])
        return WholeBatch(pixels, self.aspects[index])

    def to(self, device: torch.device) -> "WholeImages":
        return WholeImages(self.squares.to(device), self.wholes.to(device), self.place, self.aspects)

    def followed_by(self, squares: Tensor) -> "WholeImages":
        """Append other images, of which there are squares alone."""
        place, ones = self.place.new_full((len(squares),), -1), self.aspects.new_ones(len(squares))
        return WholeImages(
            torch.cat([self.squares, squares]),
            self.wholes,
            torch.cat([self.place, place]),
            torch.cat([self.aspects, ones]),
        )

    def chosen(self, index: Tensor) -> "WholeImages":
        """These images alone."""
        return WholeImages(self.squares[index], self.wholes, self.place[index], self.aspects[index])


class Images(Protocol):
    """A tensor (n, channels, h, w) of uint8, or images on disk that are read as if they were one.

    An index gives what evaluation sees; of images of a person's own that is the central square.
    """

    @property
    def shape(self) -> torch.Size: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Tensor: ...


class Corpus(NamedTuple):
    """Training images (labeled or not: labels are granted by a split) and test images."""

    class_names: tuple[str, ...]
    train_images: Images  # (n, channels, h, w) uint8; all of them are the unlabeled set
    train_labels: Tensor  # (n,) class; UNLABELED: no label to grant; OUT_OF_CLASS: a person said so
    test_images: Images  # (t, channels, h, w) uint8
    test_labels: Tensor  # (t,) class, or OUT_OF_CLASS
    train_names: tuple[str, ...] = ()  # the file of each training image, where they are files
    unreadable: tuple[tuple[str, str], ...] = ()  # files that were left out, and why
    tests_readable: bool = False  # every test image is known to be readable
    notes: tuple[str, ...] = ()  # a line for each thing that was left out when the files were listed
    train_keys: NDArray[np.uint8] | None = None  # (n, KEY_BYTES) of the files that were decoded into memory
    test_keys: NDArray[np.uint8] | None = None  # (t, KEY_BYTES)

    @property
    def channels(self) -> int:
        return self.train_images.shape[1]

    @property
    def outside(self) -> Tensor:
        """Positions of the training images that are known to belong to no class.   ->  (o,)"""
        return (self.train_labels == OUT_OF_CLASS).nonzero().squeeze(1)


def join(corpus: Corpus, extra: Corpus) -> Corpus:
    """Uncurated data: the images of another corpus join as unlabeled, and as out-of-class tests.

    They take the size and the channels of the first.
    """
    shape = corpus.train_images.shape[1:]
    unlabeled = torch.full((len(extra.train_images),), UNLABELED)
    out_of_class = torch.full((len(extra.test_images),), OUT_OF_CLASS)
    return Corpus(
        corpus.class_names,
        _followed(corpus.train_images, resized(in_memory(extra.train_images), shape)),
        torch.cat([corpus.train_labels, unlabeled]),
        _followed(corpus.test_images, resized(in_memory(extra.test_images), shape)),
        torch.cat([corpus.test_labels, out_of_class]),
        corpus.train_names + extra.train_names if corpus.train_names and extra.train_names else (),
        corpus.unreadable + extra.unreadable,
        notes=corpus.notes + extra.notes,
    )


def _followed(images: Images, extra: Tensor) -> Images:
    if isinstance(images, WholeImages):
        return images.followed_by(extra)
    return torch.cat([in_memory(images), extra])


def in_memory(images: Images) -> Tensor:
    """The tensor, of central squares where they are images of a person's own; arrays can join arrays only."""
    if isinstance(images, Tensor):
        return images
    if isinstance(images, WholeImages):
        return images.squares
    raise ValueError(
        f"{len(images):,} images are read while training, and arrays cannot join them;"
        " raise data.memory_gb, or make the extra source a folder"
    )


def resized(images: Tensor, shape: Sequence[int]) -> Tensor:
    """Images of other size and channels as those of a corpus.   (n, c, h, w) -> (n, *shape), uint8"""
    channels, height, width = shape
    if images.shape[1:] == torch.Size(shape):
        return images
    parts = []
    for part in images.split(4096):
        pixels = part.float()
        if pixels.shape[1] == 3 and channels == 1:
            pixels = grayscale(pixels)
        if pixels.shape[2:] != (height, width):
            pixels = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
        parts.append(pixels.round().clamp(0, 255).to(torch.uint8).expand(-1, channels, -1, -1))
    return torch.cat(parts) if parts else images.new_empty(0, *shape)


def keep_classes(corpus: Corpus, names: Sequence[str]) -> Corpus:
    """Only these classes are known; the images of the others stay, as out-of-class ones."""
    missing = set(names) - set(corpus.class_names)
    if missing:
        raise ValueError(f"no class {sorted(missing)[0]!r}; known are {', '.join(corpus.class_names)}")
    old = torch.tensor([corpus.class_names.index(name) for name in names])

    def renumbered(labels: Tensor, others: int) -> Tensor:
        numbers = torch.full((len(corpus.class_names) + 2,), others)  # the last two serve the codes below 0
        numbers[old] = torch.arange(len(names))
        return numbers[labels]

    return corpus._replace(
        class_names=tuple(names),
        train_labels=renumbered(corpus.train_labels, UNLABELED),
        test_labels=renumbered(corpus.test_labels, OUT_OF_CLASS),
    )


def thin_out(corpus: Corpus, *, in_class: int, out_of_class: int) -> Corpus:
    """Keep in_class training images of the known classes, evenly, and out_of_class other ones.

    Always the same ones: which images a benchmark has must not depend on the seed of a run.
    """
    random = generator(0, POOL)
    images = corpus.train_images
    chosen = []
    share, more = divmod(in_class, len(corpus.class_names))
    # The classes first: the in-class part does not depend on how many others there are.
    wanted = {c: share + (c < more) for c in range(len(corpus.class_names))} | {UNLABELED: out_of_class}
    for label, count in wanted.items():
        candidates = (corpus.train_labels == label).nonzero().squeeze(1)
        if len(candidates) < count:
            what = "out-of-class images" if label == UNLABELED else f"images of {corpus.class_names[label]!r}"
            raise ValueError(f"the mix needs {count:,} {what}, but there are {len(candidates):,}")
        chosen.append(candidates[torch.randperm(len(candidates), generator=random)[:count]])
    kept = torch.cat(chosen).sort().values
    return corpus._replace(
        train_images=images.chosen(kept) if isinstance(images, WholeImages) else in_memory(images)[kept],
        train_labels=corpus.train_labels[kept],
        train_names=tuple(corpus.train_names[i] for i in kept.tolist()) if corpus.train_names else (),
        train_keys=None if corpus.train_keys is None else corpus.train_keys[kept.numpy()],
    )


def whole_batch(images: Images, index: Tensor) -> WholeBatch:
    """What random views are made of, of images in memory."""
    if isinstance(images, WholeImages):
        return images.whole(index)
    return WholeBatch(images[index.to(images[:0].device)])


def measure_normalization(images: Images, *, most: int = 10_000) -> Normalization:
    """Mean and standard deviation per channel, from an even sample of the images (no labels needed)."""
    if isinstance(images, ImageStack):  # fewer: images on disk take time
        sample, _ = images.read(torch.arange(0, len(images), max(1, 10 * len(images) // most)))
    else:
        sample = images[:: max(1, len(images) // most)]
    sample = sample.float().div_(255)
    std, mean = torch.std_mean(sample, dim=(0, 2, 3))
    return Normalization(tuple(mean.tolist()), tuple(std.clamp_min(1e-3).tolist()))


class EmbeddedImages:
    """Images whose features are known: the pixels for people who look at them, the features for training.

    Args:
        pixels: The images.
        features: Theirs; the row of an unreadable image is that of the readable one in its place.
        replaced: Position of each unreadable image -> position of the one in its place.
        reasons: Position of each unreadable image -> why.
    """

    def __init__(
        self,
        pixels: Images,
        features: Features,
        replaced: Mapping[int, int] | None = None,
        reasons: Mapping[int, str] | None = None,
    ) -> None:
        if len(pixels) != len(features):
            raise ValueError(f"{len(features)} rows of features for {len(pixels)} images")
        self.pixels = pixels
        self.features = features
        self.replaced = dict(replaced or {})
        self.reasons = dict(reasons or {})

    @property
    def shape(self) -> torch.Size:
        return self.pixels.shape

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        return self.pixels[index]

    def shown(self, index: Tensor) -> Tensor:
        """Positions of the images whose features these positions have.   (k,)  ->  (k,)"""
        if not self.replaced:
            return index
        return torch.tensor([self.replaced.get(position, position) for position in index.tolist()])


def features_of(images: Images) -> Features | None:
    """The features that take the place of pixels; None for images alone."""
    if isinstance(images, EmbeddedImages):
        return images.features
    return images if isinstance(images, Features) else None


def pixels_of(images: Images) -> Images:
    """The images alone."""
    return images.pixels if isinstance(images, EmbeddedImages) else images


def without_features(corpus: Corpus) -> Corpus:
    """The images alone, for a network that is trained as a whole."""
    return corpus._replace(
        train_images=pixels_of(corpus.train_images), test_images=pixels_of(corpus.test_images)
    )


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
