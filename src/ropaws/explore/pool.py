"""What is explored: images, their features, and the labels that they came with."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropaws.classify import head
from ropaws.core.features import FeatureRows, Features, main_directions, principal_components
from ropaws.core.labels import OUT_OF_CLASS_NAME
from ropaws.core.terminal import counted
from ropaws.embedding.embedder import Embedder, open_images
from ropaws.explore.images import ArrayImages, ListedImages, ShownImages
from ropaws.pool.content import remedies
from ropaws.pool.corpus import ImageStack, pixels_of
from ropaws.pool.remote import absolute_source
from ropaws.run.outputs import readable_among
from ropaws.run.run import Run

BLOCK = 4096  # images whose features are read at a time


@dataclass(frozen=True)
class RunOutputs:
    """What a run says of the images."""

    probs: NDArray[np.float32]  # (n, c)
    in_domain: NDArray[np.float32]  # (n,)
    threshold: float
    source: str = ""  # the file of someone else's model; none if the run says it


@dataclass(frozen=True)
class Pool:
    """All images that are shown, labeled or not."""

    title: str
    images: ShownImages
    points: Tensor  # (n, d) centered features in their main directions
    class_names: tuple[str, ...]  # of the labels that the images came with
    labels: dict[str, str]  # class of each labeled image, by name
    sources: tuple[Path, ...] = ()  # what training may read as unlabeled; none where they are not files
    outputs: RunOutputs | None = None
    unreadable: str = ""  # a line about images that were left out
    init: tuple[str, ...] = ()  # options of `ropaws train` for the same network
    outside: tuple[str, ...] = ()  # names of images that came as out-of-class

    def __len__(self) -> int:
        return len(self.images)

    @functools.cached_property
    def lengths(self) -> Tensor:
        """Of the points, never zero.   (n,)"""
        found: Tensor = self.points.norm(dim=1).clamp_min(1e-12)
        return found

    @property
    def foreign(self) -> str:
        """The file whose predictions are shown; empty if they are those of a run, or of no one."""
        return "" if self.outputs is None else self.outputs.source


def pool_of_sources(
    unlabeled: Sequence[Path],
    labeled: Sequence[Path],
    embedder: Embedder,
) -> Pool:
    """Images of folders, tables and arrays, with the features of a pretrained network.

    Raises:
        FileNotFoundError: A source is not there.
        ValueError: A source has no image, or too few of them can be read.
    """
    listing = open_images(unlabeled, labeled)
    embedded = embedder.embed(listing)
    kept = embedded.kept.tolist()
    images = ListedImages([listing.images[row] for row in kept])
    named = {name: label for name, label in zip(images.names, embedded.labels, strict=True) if label}
    outside = tuple(name for name, label in named.items() if label == OUT_OF_CLASS_NAME)
    named = {name: label for name, label in named.items() if label != OUT_OF_CLASS_NAME}
    return Pool(
        title=", ".join(source.name or str(source) for source in (*unlabeled, *labeled)),
        images=images,
        points=in_main_directions(embedded.rows, embedded.kept),
        class_names=tuple(sorted(set(named.values()))),
        labels=named,
        outside=outside,
        sources=tuple(map(absolute_source, unlabeled)) if listing.are_files else (),
        unreadable=_left_out(item.reason for item in embedded.unreadable),
        init=_train_options(embedded.facts),
    )


def pool_of_run(run: Run) -> Pool:
    """All training images of a run, with the features of its backbone, and what it says of them.

    Raises:
        ValueError: The run was trained on features, which nobody can look at.
    """
    corpus = run.corpus
    everything = torch.arange(len(corpus.train_images))
    pixels = pixels_of(corpus.train_images)
    if isinstance(pixels, Features):
        raise ValueError(f"{run.path} was trained on features; `ropaws explore` shows images")
    kept = readable_among(corpus.train_images, everything)
    images: ShownImages
    if isinstance(pixels, ImageStack):
        images = ListedImages([pixels.files[row] for row in kept.tolist()])
    elif corpus.train_names and all(Path(name).is_file() for name in corpus.train_names):
        images = ListedImages([Path(corpus.train_names[row]) for row in kept.tolist()])
    else:
        images = ArrayImages(pixels, run.facts.digest)
        kept = everything
    features = FeatureRows(run.features(corpus.train_images, kept))
    outputs = run.outputs(corpus.train_images, kept, title=f"Looking at {len(kept):,} images, batches")
    split = run.facts.split
    place = {row: number for number, row in enumerate(kept.tolist())}
    labels = {
        images.names[place[row]]: run.class_names[label]
        for row, label in zip(split.indices.tolist(), split.labels.tolist(), strict=True)
        if row in place
    }
    return Pool(
        title=run.path.name,
        images=images,
        points=in_main_directions(features, torch.arange(len(kept))),
        class_names=run.class_names,
        labels=labels,
        outside=tuple(images.names[place[row]] for row in corpus.outside.tolist() if row in place),
        sources=tuple(map(absolute_source, run.config.data.unlabeled)),
        outputs=RunOutputs(outputs.probs.numpy(), outputs.in_domain.numpy(), run.threshold),
        unreadable=_left_out([""] * (len(everything) - len(kept))),
    )


def _left_out(reasons: Iterable[str]) -> str:
    if not (found := list(reasons)):
        return ""
    return f"{counted(len(found), 'image')} cannot be read, so left out{remedies(found)}"


def in_main_directions(features: Features, rows: Tensor) -> Tensor:
    """Centered features, most of whose thousand dimensions are nearly empty.   ->  (n, d)"""
    mean, components = principal_components(features, min(head.DIMS, features.shape[1]))
    mean, components = mean.float(), components.float()
    return torch.cat([main_directions(features[part], mean, components) for part in rows.split(BLOCK)])


def _train_options(facts: dict[str, Any]) -> tuple[str, ...]:
    """Those of `ropaws train` for the same network and the same views."""
    options = {"--init": facts["init"], "--backbone": facts["backbone"], "--augment.size": facts["size"]}
    words = [str(word) for option in options.items() for word in option]
    sizes = facts.get("view_sizes", [])  # of several networks together
    return (*words, *(["--model.view-sizes", *map(str, sizes)] if sizes else []))
