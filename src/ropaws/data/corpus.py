"""All the images of a run in memory, and what is known of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.data.augment import Normalization

UNKNOWN = -1  # in training: no label to grant; in testing: none of the classes


class Corpus(NamedTuple):
    """Training images (labelled or not: labels are granted by a split) and test images."""

    class_names: tuple[str, ...]
    train_images: Tensor  # (n, channels, h, w) uint8; all of them are the unlabelled set
    train_labels: Tensor  # (n,) class, or UNKNOWN
    test_images: Tensor  # (t, channels, h, w) uint8
    test_labels: Tensor  # (t,) class, or UNKNOWN for an out-of-class image
    train_names: tuple[str, ...] = ()  # the file of each training image, where they are files
    unreadable: tuple[tuple[str, str], ...] = ()  # files that were left out, and why

    @property
    def channels(self) -> int:
        return self.train_images.shape[1]


def join(corpus: Corpus, extra: Corpus) -> Corpus:
    """Uncurated data: the images of another corpus join as unlabelled, and as out-of-class tests."""
    if corpus.train_images.shape[1:] != extra.train_images.shape[1:]:
        raise ValueError(
            f"data.extra: images must have the shape {tuple(corpus.train_images.shape[1:])} of data.source,"
            f" got {tuple(extra.train_images.shape[1:])}"
        )
    nothing_known = torch.full((len(extra.train_images),), UNKNOWN)
    out_of_class = torch.full((len(extra.test_images),), UNKNOWN)
    return Corpus(
        corpus.class_names,
        torch.cat([corpus.train_images, extra.train_images]),
        torch.cat([corpus.train_labels, nothing_known]),
        torch.cat([corpus.test_images, extra.test_images]),
        torch.cat([corpus.test_labels, out_of_class]),
    )


def measure_normalization(images: Tensor, *, most: int = 10_000) -> Normalization:
    """Mean and standard deviation a channel, from an even sample of the images (no labels needed)."""
    sample = images[:: max(1, len(images) // most)].float().div_(255)
    std, mean = torch.std_mean(sample, dim=(0, 2, 3))
    return Normalization(tuple(mean.tolist()), tuple(std.clamp_min(1e-3).tolist()))
