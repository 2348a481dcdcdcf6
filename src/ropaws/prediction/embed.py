"""Features of images by a pretrained backbone: for `train --features`, and for any other program."""

import functools
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from ropaws.auto_config import pretrained_view
from ropaws.data.corpus import measure_normalization
from ropaws.data.datasets.feature_file import FEATURES, LABELS, NAMES, VIEWS
from ropaws.data.features import Features
from ropaws.data.files.listing import Listing, list_labeled, list_unlabeled, merge
from ropaws.data.files.streaming import ImageStack
from ropaws.data.sources import DataConfig
from ropaws.models import (
    PRETRAINED,
    ModelConfig,
    build_encoder,
    check_model,
    load_init,
    pretrained_normalization,
    recognize_backbone,
)
from ropaws.models.encoder import Encoder
from ropaws.models.timm_backbone import TIMM, timm_weights
from ropaws.prediction.predict import Unreadable
from ropaws.runs.atomic import replacing, write_json
from ropaws.runs.embedding import Embedding, embed_images
from ropaws.runs.lock import locked_file
from ropaws.terminal import Terminal
from ropaws.training.hardware import choose_device, choose_precision, half_type
from ropaws.training.progress import watch_files

SIZES = (8, 3584)  # pixels per side of a view, at least and at most
MOST_VIEWS = 64
BLOCK = 1024  # images whose features are read and written at a time


@dataclass(frozen=True)
class Embedded:
    """Images as features. The features stay on disk until they are asked for."""

    rows: Features
    kept: Tensor  # (n,) rows of the readable images
    names: tuple[str, ...]
    labels: tuple[str, ...]  # empty where an image has none
    unreadable: tuple[Unreadable, ...]  # images that were left out
    facts: dict[str, Any]  # what the features depend on: backbone, size, views ...

    def __len__(self) -> int:
        return len(self.names)

    @property
    def features(self) -> NDArray[np.float32]:
        """Of the center view of each image.   (n, d)"""
        return np.concatenate([block.astype(np.float32) for block in self._blocks(self.rows.__getitem__)])

    @property
    def views(self) -> NDArray[np.float32] | None:
        """Of random views of each image; None without any.   (n, views, d)"""
        if not self.facts["views"]:
            return None
        return np.concatenate([block.astype(np.float32) for block in self._blocks(self.rows.views)])

    @property
    def size(self) -> int:
        """Bytes of the features in a file."""
        return 2 * len(self) * self.rows.shape[1] * (1 + int(self.facts["views"]))

    def save(self, path: Path | str, *, test: "Embedded | None" = None) -> None:
        """Write an .npz: features, views, labels, names, facts; with test, test_features and so on.

        A block of images is held in memory at a time. What could not be read, and why, is in PATH.json.

        Raises:
            ValueError: The path does not end in .npz, or the disk has no room.
        """
        path = Path(path)
        check_features_file(path)
        needed = self.size + (0 if test is None else test.size)
        if needed > (free := shutil.disk_usage(path.parent).free):
            raise ValueError(
                f"--out: {path} takes {needed / 2**30:.1f} GB, but the disk has {free / 2**30:.1f} GB left;"
                " choose another place, or fewer --views"
            )
        unreadable = [*self.unreadable, *(test.unreadable if test is not None else ())]
        with locked_file(path):  # two writers would mix the features of one with the facts of the other
            with replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
                _write(archive, "facts", np.array(json.dumps(self.facts)))
                self._write_to(archive)
                if test is not None:
                    test._write_to(archive, "test_")
            write_json(path.with_name(f"{path.name}.json"), {**self.facts, "unreadable": unreadable})

    def _write_to(self, archive: zipfile.ZipFile, prefix: str = "") -> None:
        count, dims = len(self), self.rows.shape[1]
        _stream(archive, prefix + FEATURES, (count, dims), self._blocks(self.rows.__getitem__))
        if self.facts["views"]:
            shape = (count, int(self.facts["views"]), dims)
            _stream(archive, prefix + VIEWS, shape, self._blocks(self.rows.views))
        _write(archive, prefix + LABELS, np.array(self.labels, dtype=np.str_))
        _write(archive, prefix + NAMES, np.array(self.names, dtype=np.str_))

    def _blocks(self, read: Callable[[Tensor], Tensor]) -> Iterator[NDArray[np.float16]]:
        for part in self.kept.split(BLOCK):
            yield read(part).half().numpy()


def _stream(
    archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], blocks: Iterator[NDArray[np.float16]]
) -> None:
    """Write an array that is never in memory as a whole."""
    header = {"descr": "<f2", "fortran_order": False, "shape": shape}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
        npy.write_array_header_1_0(stream, header)
        for block in blocks:
            stream.write(block.astype("<f2").tobytes())


def _write(archive: zipfile.ZipFile, name: str, array: NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
        npy.write_array(stream, array, allow_pickle=False)


def check_features_file(path: Path) -> None:
    """Raise an error if features cannot be written there."""
    if path.suffix.lower() != ".npz":
        raise ValueError(f"--out must end in .npz, got {path.name}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out: no folder {path.parent}; create it first")


def embed(
    sources: Path | str | Sequence[Path | str] = (),
    *,
    labeled: Path | str | Sequence[Path | str] = (),
    backbone: str | None = None,
    init: Path | str = PRETRAINED,
    views: int = 4,
    size: int | None = None,
    cache: Path | str | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> Embedded:
    """Compute the features of images with a pretrained network, in a center view and in random views.

    Features that an earlier call has computed are taken from the cache.

    Args:
        sources: Folders, searched recursively, images, tables of paths, .npz files, saved datasets.
        labeled: Sources with labels: folders with a folder for each class, tables of path and label ...
        backbone: The network: efficientnet-lite0 (by default), timm:NAME, or one that fits init.
        init: Its weights: "pretrained", or a file.
        views: Random views of each image.
        size: Pixels per side of a view; by default as `ropaws train` chooses it.
        cache: Folder that keeps features; by default ~/.cache/ropaws/features.
        device: Where to compute.
        console: Where progress goes; standard error by default.

    Returns:
        Features, names and labels, labeled images first; unreadable images are left out.

    Raises:
        FileNotFoundError: A source is not there.
        ValueError: A source has no images, too many of them cannot be read, or the weights do not fit.
    """
    settings = EmbedSettings(
        backbone=backbone,
        init=Path(init),
        views=views,
        size=size,
        cache=None if cache is None else Path(cache),
        device=device,
    )
    listing = list_sources(_paths(sources), _paths(labeled))
    return Embedder(settings, listing, console or Terminal(stderr=True)).embed(listing)


def _paths(sources: Path | str | Sequence[Path | str]) -> list[Path]:
    return [Path(source) for source in ([sources] if isinstance(sources, Path | str) else sources)]


def list_sources(sources: Sequence[Path], labeled: Sequence[Path]) -> Listing:
    """Labeled images first; every image once."""
    if not sources and not labeled:
        raise ValueError("name the images to embed: folders, images, tables, .npz files or saved datasets")
    return merge([*map(list_labeled, labeled), *map(list_unlabeled, sources)])


@dataclass(frozen=True, kw_only=True)
class EmbedSettings:
    """The network and its views; see embed."""

    backbone: str | None = None
    init: Path = PRETRAINED
    views: int = 4
    size: int | None = None
    cache: Path | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.views <= MOST_VIEWS:
            raise ValueError(f"views must be from 0 to {MOST_VIEWS}, got {self.views}")
        if self.size is not None and not SIZES[0] <= self.size <= SIZES[1]:
            raise ValueError(f"size must be from {SIZES[0]} to {SIZES[1]} pixels, got {self.size}")

    def model(self) -> ModelConfig:
        name = recognize_backbone(self.init) if self.backbone is None else self.backbone
        config = ModelConfig(backbone=name, init=self.init, frozen=True, frozen_views=self.views)
        check_model(config)
        return config


class Embedder:
    """A pretrained network made ready for images.

    Args:
        settings: The network and its views.
        listing: The first images. As in `ropaws train`, the size of views follows from them; and the
            normalization, where the weights do not say which one they expect.
        console: Where progress goes.
    """

    def __init__(self, settings: EmbedSettings, listing: Listing, console: Console) -> None:
        self.settings = settings
        self.console = console
        self.device = choose_device(settings.device)
        self.config = settings.model()
        self.view, self.image_size, _ = pretrained_view(listing, self.device.type != "cpu", self.config)
        if settings.size is not None:
            self.view, self.image_size = replace(self.view, size=settings.size), round(settings.size * 8 / 7)
        normalize = pretrained_normalization(self.config, channels=3)
        self.normalize = normalize or measure_normalization(ImageStack(listing.images, self.image_size))

    def embed(self, listing: Listing, *, views: int | None = None) -> Embedded:
        """Features of these images. views: instead of those of the settings."""
        stack = ImageStack(listing.images, self.image_size)
        embedding = Embedding(
            self._encoder,
            self.config.backbone,
            self.view,
            self.settings.views if views is None else views,
            self.normalize,
            self.image_size,
            crop="whole",
        )
        found = embed_images(
            stack, embedding, self._data(len(stack)), watch=watch_files(self.console), warn=self.console.print
        )
        kept = [row for row in range(len(stack)) if row not in found.reasons]
        unreadable = (Unreadable(str(listing.images[row]), why) for row, why in sorted(found.reasons.items()))
        return Embedded(
            rows=found.features,
            kept=torch.tensor(kept),
            names=tuple(str(listing.images[row]) for row in kept),
            labels=tuple(listing.labels[row] or "" for row in kept),
            unreadable=tuple(unreadable),
            facts=_facts(self.config, embedding),
        )

    @functools.cached_property
    def _encoder(self) -> Encoder:
        name = self.config.backbone
        if self.config.init == PRETRAINED and name.startswith(TIMM):
            source = timm_weights(name.removeprefix(TIMM))
            line = f"weights of {name}: from timm's cache, or downloaded from {source}"
            self.console.print(line, highlight=False, soft_wrap=True)
        autocast = half_type(choose_precision("auto", self.device))
        encoder = build_encoder(self.config, channels=3, autocast=autocast)
        load_init(encoder, self.config, channels=3)
        return encoder.to(self.device).eval()

    def _data(self, images: int) -> DataConfig:
        """Who asks for these features has room for them: the cache grows as far as they need."""
        each = 64 + 2 * (self.settings.views + 1) * self._encoder.feature_dims
        room = max(DataConfig().cache_gb, images * each / 2**30)
        return DataConfig(feature_cache=self.settings.cache, cache_gb=room)


def _facts(config: ModelConfig, embedding: Embedding) -> dict[str, Any]:
    return {
        "backbone": config.backbone,
        "init": str(config.init),
        "size": embedding.view.size,
        "interpolation": embedding.view.interpolation,
        "mean": embedding.normalize.mean,
        "std": embedding.normalize.std,
        "views": embedding.views,
        "crop": embedding.crop,
        "digest": embedding.digest,
    }
