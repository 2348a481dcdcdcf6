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
from ropaws.pool.content import Encoded, ImageRef, remedies
from ropaws.pool.corpus import ImageStack, pixels_of
from ropaws.pool.listing import Pool
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


@dataclass(frozen=True, kw_only=True, eq=False)
class ExploredPool(Pool):
    """All images that are shown, labeled or not, with their features and what is said of them."""

    title: str
    points: Tensor  # (n, d) centered features in their main directions
    class_names: tuple[str, ...] = ()  # of the labels that the images came with
    sources: tuple[Path, ...] = ()  # what training may read as unlabeled; none where they are not files
    outputs: RunOutputs | None = None
    init: tuple[str, ...] = ()  # options of `ropaws train` for the same network

    @functools.cached_property
    def lengths(self) -> Tensor:
        """Of the points, never zero.   (n,)"""
        found: Tensor = self.points.norm(dim=1).clamp_min(1e-12)
        return found

    @functools.cached_property
    def folded(self) -> list[str]:
        """The names without capital letters, to search in."""
        return [name.casefold() for name in self.names]

    @functools.cached_property
    def rank(self) -> NDArray[np.int64]:
        """The place of each image among all, by name.   (n,)"""
        rank = np.empty(len(self), np.int64)
        rank[sorted(range(len(self)), key=self.names.__getitem__)] = np.arange(len(self))
        return rank

    @property
    def files(self) -> list[Path] | None:
        """The images, where all are files here."""
        found = [image for image in self.images if isinstance(image, Path)]
        return found if len(found) == len(self) else None

    @property
    def foreign(self) -> str:
        """The file whose predictions are shown; empty if they are those of a run, or of no one."""
        return "" if self.outputs is None else self.outputs.source


def pool_of_sources(
    unlabeled: Sequence[Path],
    labeled: Sequence[Path],
    embedder: Embedder,
) -> ExploredPool:
    """Images of folders, tables and arrays, with the features of a pretrained network.

    Raises:
        FileNotFoundError: A source is not there.
        ValueError: A source has no image, or too few of them can be read.
    """
    listing = open_images(unlabeled, labeled)
    embedded = embedder.embed(listing)
    labels = tuple(label or None for label in embedded.labels)
    return ExploredPool(
        tuple(listing.images[row] for row in embedded.kept.tolist()),
        labels,
        _left_out(item.reason for item in embedded.unreadable),
        title=", ".join(source.name or str(source) for source in (*unlabeled, *labeled)),
        points=in_main_directions(embedded.rows, embedded.kept),
        class_names=tuple(sorted({label for label in labels if label not in (None, OUT_OF_CLASS_NAME)})),
        sources=tuple(map(absolute_source, unlabeled)) if listing.are_files else (),
        init=_train_options(embedded.facts),
    )


def pool_of_run(run: Run) -> ExploredPool:
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
    images: Sequence[ImageRef]
    if isinstance(pixels, ImageStack):
        images = [pixels.files[row] for row in kept.tolist()]
    elif corpus.train_names and all(Path(name).is_file() for name in corpus.train_names):
        images = [Path(corpus.train_names[row]) for row in kept.tolist()]
    else:
        kept = everything
        squares = pixels[kept].permute(0, 2, 3, 1).numpy()
        squares = squares[..., 0] if squares.shape[3] == 1 else squares
        images = [Encoded(str(number), square) for number, square in enumerate(squares)]
    features = FeatureRows(run.features(corpus.train_images, kept))
    title = f"Looking at {len(kept):,} images, batches"
    probs, in_domain = run.probabilities(corpus.train_images, kept, title=title)
    split = run.facts.split
    known = dict.fromkeys(corpus.outside.tolist(), OUT_OF_CLASS_NAME)
    known |= {
        row: run.class_names[label]
        for row, label in zip(split.indices.tolist(), split.labels.tolist(), strict=True)
    }
    return ExploredPool(
        tuple(images),
        tuple(known.get(row) for row in kept.tolist()),
        _left_out([""] * (len(everything) - len(kept))),
        title=run.path.name,
        points=in_main_directions(features, torch.arange(len(kept))),
        class_names=run.class_names,
        sources=tuple(map(absolute_source, run.config.data.unlabeled)),
        outputs=RunOutputs(probs.numpy(), in_domain.numpy(), run.threshold),
    )


def _left_out(reasons: Iterable[str]) -> tuple[str, ...]:
    if not (found := list(reasons)):
        return ()
    return (f"{counted(len(found), 'image')} cannot be read, so left out{remedies(found)}",)


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
