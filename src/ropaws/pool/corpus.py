"""All the images of a run, and what is known of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ropaws.core.features import Features
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.core.randomness import POOL, generator
from ropaws.pool.augment import Normalization
from ropaws.pool.image_ops import grayscale
from ropaws.pool.streaming import ImageStack
from ropaws.pool.whole_images import WholeBatch, WholeImages


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
