"""All the images of a run, and what is known of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws.data.augment import Normalization
from ropaws.data.files.streaming import ImageStack
from ropaws.data.image_ops import grayscale
from ropaws.data.randomness import POOL, generator
from ropaws.data.whole_images import WholeBatch, WholeImages

UNKNOWN = -1  # in training: no label to grant; in testing: none of the classes


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
    train_labels: Tensor  # (n,) class, or UNKNOWN
    test_images: Images  # (t, channels, h, w) uint8
    test_labels: Tensor  # (t,) class, or UNKNOWN for an out-of-class image
    train_names: tuple[str, ...] = ()  # the file of each training image, where they are files
    unreadable: tuple[tuple[str, str], ...] = ()  # files that were left out, and why
    tests_readable: bool = False  # every test image is known to be readable

    @property
    def channels(self) -> int:
        return self.train_images.shape[1]


def join(corpus: Corpus, extra: Corpus) -> Corpus:
    """Uncurated data: the images of another corpus join as unlabeled, and as out-of-class tests.

    They take the size and the channels of the first.
    """
    shape = corpus.train_images.shape[1:]
    nothing_known = torch.full((len(extra.train_images),), UNKNOWN)
    out_of_class = torch.full((len(extra.test_images),), UNKNOWN)
    return Corpus(
        corpus.class_names,
        _followed(corpus.train_images, resized(in_memory(extra.train_images), shape)),
        torch.cat([corpus.train_labels, nothing_known]),
        _followed(corpus.test_images, resized(in_memory(extra.test_images), shape)),
        torch.cat([corpus.test_labels, out_of_class]),
        corpus.train_names + extra.train_names if corpus.train_names and extra.train_names else (),
        corpus.unreadable + extra.unreadable,
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
    new_number = torch.full((len(corpus.class_names) + 1,), UNKNOWN)  # the last entry serves UNKNOWN
    for number, name in enumerate(names):
        new_number[corpus.class_names.index(name)] = number
    return corpus._replace(
        class_names=tuple(names),
        train_labels=new_number[corpus.train_labels],
        test_labels=new_number[corpus.test_labels],
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
    wanted = {c: share + (c < more) for c in range(len(corpus.class_names))} | {UNKNOWN: out_of_class}
    for label, count in wanted.items():
        candidates = (corpus.train_labels == label).nonzero().squeeze(1)
        if len(candidates) < count:
            what = "out-of-class images" if label == UNKNOWN else f"images of {corpus.class_names[label]!r}"
            raise ValueError(f"the mix needs {count:,} {what}, but there are {len(candidates):,}")
        chosen.append(candidates[torch.randperm(len(candidates), generator=random)[:count]])
    kept = torch.cat(chosen).sort().values
    return corpus._replace(
        train_images=images.chosen(kept) if isinstance(images, WholeImages) else in_memory(images)[kept],
        train_labels=corpus.train_labels[kept],
        train_names=tuple(corpus.train_names[i] for i in kept.tolist()) if corpus.train_names else (),
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
