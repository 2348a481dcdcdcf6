"""The named shapes of data that cross module borders."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class Views(NamedTuple):
    """Augmented views of one unlabelled batch: row i of every tensor shows the same image."""

    first: Tensor  # (u, channels, size, size)
    second: Tensor  # (u, channels, size, size)
    crops: tuple[Tensor, ...] = ()  # each (u, channels, small, small)


class Support(NamedTuple):
    """A class-balanced labelled batch. Labels and identities travel with the images."""

    images: Tensor  # (s, channels, size, size)
    labels: Tensor  # (s, c) one-hot; the columns are the classes of this batch
    identity: Tensor  # (s,) which labelled image a row shows; views of one image share it


class Embeddings(NamedTuple):
    """What the encoder says of one batch of images; rows have unit length."""

    h: Tensor  # (n, d) after the projection head: the target side, and evaluation
    z: Tensor  # (n, d) after the prediction head (h itself without one): the anchor side


class Losses(NamedTuple):
    """The loss to descend, and its parts to log. A total below zero is normal (me-max)."""

    total: Tensor  # ()
    parts: Mapping[str, Tensor]  # each (), detached
