"""A frozen network made ready for images, and the features that it gives, for every command and program."""

import contextlib
import json
import platform
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib import format as npy
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from ropaws.core.features import Features, SeveralKinds
from ropaws.core.files import check_out_folder, locked_file, read_json, replacing, write_json
from ropaws.core.hardware import choose_device, choose_precision, half_type
from ropaws.core.labels import class_names_of, label_codes
from ropaws.core.terminal import Terminal, watch_files
from ropaws.embedding.backbones import (
    PRETRAINED,
    JoinedBackbone,
    ModelConfig,
    build_encoder,
    check_model,
    download_notice,
    load_init,
    own_sizes,
    pretrained_normalization,
    pretrained_view,
    recognize_backbone,
    view_sizes,
)
from ropaws.embedding.encoder import Encoder
from ropaws.embedding.feature_cache import FeatureStore, default_folder
from ropaws.embedding.frozen_features import CHUNK, Embedding, embed_images, frozen_features
from ropaws.embedding.pretrained import AUTO, NETWORKS, best_at_hand, weights_input
from ropaws.pool.augment import AugmentConfig, Normalization, View
from ropaws.pool.content import Unreadable
from ropaws.pool.corpus import Corpus, EmbeddedImages, Images, ImageStack, measure_normalization, no_watch
from ropaws.pool.datasets.feature_file import FEATURES, LABELS, NAMES, VIEWS
from ropaws.pool.decoding import Crop
from ropaws.pool.listing import Pool, Sources
from ropaws.pool.sources import DataConfig

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
        """Features of the center view of each image.   (n, d)"""
        return np.concatenate([block.astype(np.float32) for block in self._blocks(self.rows.__getitem__)])

    @property
    def views(self) -> NDArray[np.float32] | None:
        """Features of random views of each image; None without any.   (n, views, d)"""
        if not self.facts["views"]:
            return None
        return np.concatenate([block.astype(np.float32) for block in self._blocks(self._random_views)])

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
            _stream(archive, prefix + VIEWS, shape, self._blocks(self._random_views))
        _write(archive, prefix + LABELS, np.array(self.labels, dtype=np.str_))
        _write(archive, prefix + NAMES, np.array(self.names, dtype=np.str_))

    def _random_views(self, part: Tensor) -> Tensor:
        return self.rows.views(part)[:, -int(self.facts["views"]) :]

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
    check_out_folder(path.parent)


class Embedder:
    """A frozen network that turns images into features, each image once.

    What any command has computed before comes from the cache, by the content of the image, the weights and
    the view. `train` on frozen features, `predict`, `evaluate`, `suggest`, `explore` and `embed` use this.

    >>> import numpy as np, ropaws, tempfile, torch
    >>> from ropaws.embedding.convnets import SmallConvNet
    >>> folder = Path(tempfile.mkdtemp())
    >>> np.savez(folder / "own.npz", images=np.random.default_rng(0).integers(0, 255, (5, 32, 32), np.uint8))
    >>> torch.save(SmallConvNet().state_dict(), folder / "weights.pth")
    >>> embedder = ropaws.Embedder("small", init=folder / "weights.pth", cache=folder / "cache")
    >>> embedder.embed(ropaws.Pool.open(folder / "own.npz")).features.shape
    (5, 96)

    Args:
        backbone: The network by name: one of `ropaws backbones`, several of them joined by +, timm:NAME, or
            "auto" (the default) for the best one at hand, or the one that fits init. Or a network that is
            there, with its views.
        init: Its weights: "pretrained", or a file; of several networks as many files, joined by +.
        views: Random views of each image, besides the center view.
        size: Pixels per side of a view; by default as suits the network and the first images.
        cache: Folder that keeps features; by default ~/.cache/ropaws/features.
        cache_gb: Size of the cache at most; by default it grows as far as these images need.
        device: Where to compute.
        console: Where progress goes; standard error by default.

    Raises:
        FileNotFoundError: The weight file is not there.
        ValueError: The weights do not fit the network, or a number is out of its range.
    """

    def __init__(
        self,
        backbone: str | Embedding | None = None,
        *,
        init: Path | str = PRETRAINED,
        views: int = 0,
        size: int | None = None,
        cache: Path | str | None = None,
        cache_gb: float | None = None,
        device: str = "auto",
        console: Console | None = None,
    ) -> None:
        self.console = console or Terminal(stderr=True)
        self.cache = None if cache is None else Path(cache)
        self.cache_gb = cache_gb
        self._embedding = backbone if isinstance(backbone, Embedding) else None
        self._init = str(init) if self._embedding is None else None  # of a network that is there: not known
        self._kinds: dict[tuple[int, str], Embedding] = {}  # each reads the weights once, for its digest
        self._stores: dict[str, FeatureStore] = {}
        if isinstance(backbone, Embedding):
            return
        if not 0 <= views <= MOST_VIEWS:
            raise ValueError(f"views must be from 0 to {MOST_VIEWS}, got {views}")
        if size is not None and not SIZES[0] <= size <= SIZES[1]:
            raise ValueError(f"size must be from {SIZES[0]} to {SIZES[1]} pixels, got {size}")
        self.size = size
        self.device = choose_device(device)
        name = backbone
        if backbone in (None, AUTO):
            name, why = best_at_hand() if Path(init) == PRETRAINED else (recognize_backbone(Path(init)), "")
            if name is None:
                raise ValueError(why)
            if why:
                self._say(why)
        assert name is not None
        self.config = ModelConfig(backbone=name, init=Path(init), frozen=True, frozen_views=views)
        check_model(self.config)

    def embed(self, pool: Pool, *, views: int | None = None) -> "Embedded":
        """Compute the features of images, as far as they are not in the cache.

        Args:
            pool: The images; those that cannot be read are left out.
            views: Random views of each, instead of those of the embedder.

        Raises:
            ValueError: Too many images cannot be read.
        """
        for line in pool.notes:
            self._say(line)
        embedding = self.embedding(pool)
        found = self.features(ImageStack(pool.images, embedding.image_size), views=views)
        kept = [row for row in range(len(pool)) if row not in found.reasons]
        codes = label_codes(pool.labels, class_names_of(pool.labels))
        if doubt := useless_features(found.features, codes):
            self._say(f"Warning: {doubt}")
        return Embedded(
            rows=found.features,
            kept=torch.tensor(kept),
            names=tuple(pool.names[row] for row in kept),
            labels=tuple(pool.labels[row] or "" for row in kept),
            unreadable=tuple(Unreadable(pool.names[row], why) for row, why in sorted(found.reasons.items())),
            facts=self._facts(embedding.views if views is None else views),
        )

    def features(
        self,
        images: Images,
        *,
        views: int | None = None,
        kind: View | None = None,
        keys: NDArray[np.uint8] | None = None,
        together: bool = False,
        one_by_one: bool = False,
    ) -> EmbeddedImages:
        """Images with their features, for what has a network already.

        Args:
            images: In memory, or on disk.
            views: Random views of each, instead of those of the embedder.
            kind: Of the random views; None for the embedder's own.
            keys: (n, KEY_BYTES) of the files that images in memory were decoded from.
            together: All processes of a run call this; each computes its part of what is missing.
            one_by_one: The caller shows progress and lists unreadable images itself, however many.
        """
        own = self._fitted
        count = own.views if views is None else views
        wanted = self._kinds.setdefault((count, repr(kind)), own.in_views(count, kind))
        return embed_images(
            images,
            wanted,
            self._data(len(images), wanted),
            watch=no_watch if one_by_one else watch_files(self.console),
            warn=self._say,
            together=together,
            few_unreadable=not one_by_one,
            keys=keys,
            stores=self._stores,
        )

    def corpus(self, corpus: Corpus, kinds: Sequence[View | None] = (None,)) -> Corpus:
        """The corpus with the features of its training images, computed by all processes of a run together.

        Features of a person's own stay as they are.   kinds: of the random views, one after another
        """
        if isinstance(corpus.train_images, Features):
            return corpus
        found = {
            kind: self.features(corpus.train_images, kind=kind, keys=corpus.train_keys, together=True)
            for kind in kinds
        }
        train = found[kinds[0]]
        if len(found) > 1:
            features = SeveralKinds({kind: images.features for kind, images in found.items()})
            train = EmbeddedImages(train.pixels, features, train.replaced, train.reasons)
        names = corpus.train_names
        unreadable = {names[p] if names else str(p): reason for p, reason in train.reasons.items()}
        listed = dict(corpus.unreadable) | unreadable
        return corpus._replace(train_images=train, unreadable=tuple(listed.items()))

    def embedding(self, pool: Pool) -> Embedding:
        """What features depend on; the first pool decides what the weights leave open.

        As in `ropaws train`, that is the size of views, and the normalization where the weights expect none.
        """
        if self._embedding is None:
            view, image_size, _ = pretrained_view(pool, self.device.type != "cpu", self.config)
            model = self.config
            if self.size is not None:
                view, image_size = replace(view, size=self.size), round(self.size * 8 / 7)
            else:
                model = replace(model, view_sizes=own_sizes(pool, self.device.type != "cpu", model))
            normalize = pretrained_normalization(model, channels=3)
            normalize = normalize or measure_normalization(ImageStack(pool.images, image_size))
            self._embedding = embedding_of(model, self._encoder, view, normalize, image_size, "whole")
        return self._embedding

    def digest(self, views: int) -> str:
        """Digest of the features in so many random views: other weights or views have another one."""
        return self._fitted.in_views(views).digest

    @property
    def _fitted(self) -> Embedding:
        if self._embedding is None:
            raise ValueError("the embedder has seen no pool yet; call embed(pool) first")
        return self._embedding

    def _encoder(self) -> Encoder:
        if notice := download_notice(self.config):
            self._say(f"backbone {self.config.backbone}{notice}")
        autocast = half_type(choose_precision("auto", self.device))
        encoder = build_encoder(self.config, channels=3, autocast=autocast)
        load_init(encoder, self.config, channels=3)
        return encoder.to(self.device).eval()

    def _data(self, images: int, wanted: Embedding) -> DataConfig:
        each = 64 + 2 * (wanted.views + 1) * wanted.encoder.feature_dims
        room = self.cache_gb
        if room is None:
            room = max(DataConfig().cache_gb, images * each / 2**30)
        return DataConfig(feature_cache=self.cache, cache_gb=room)

    def _facts(self, views: int) -> dict[str, Any]:
        embedding = self._fitted.in_views(views)
        sizes = {"view_sizes": [part.view.size for part in embedding.parts]} if embedding.parts else {}
        return sizes | {
            "backbone": embedding.backbone,
            "init": self._init,
            "size": embedding.view.size,
            "interpolation": embedding.view.interpolation,
            "mean": embedding.normalize.mean,
            "std": embedding.normalize.std,
            "views": views,
            "crop": embedding.crop,
            "digest": embedding.digest,
        }

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def embedding_of(
    model: ModelConfig,
    encoder: Encoder | Callable[[], Encoder],
    view: AugmentConfig,
    normalize: Normalization,
    image_size: int,
    crop: Crop,
) -> Embedding:
    """How a network with these settings sees images; of several networks, how each of them does.

    encoder: the network, or what makes it, called once the settings are known to be right
    """
    sizes = view_sizes(model, view.size)
    network = encoder if isinstance(encoder, Encoder) else encoder()
    whole = Embedding(network, model.backbone, view, model.frozen_views, normalize, image_size, crop=crop)
    if not isinstance(network.backbone, JoinedBackbone):
        return whole
    parts = []
    for own, size, backbone in zip(model.parts, sizes, network.backbone.parts, strict=True):
        single = Encoder(
            backbone, nn.Sequential(), nn.Identity(), autocast=network.autocast, frozen=True
        ).train(network.training)
        expected, mean = (
            weights_input(own.backbone),
            pretrained_normalization(own, channels=len(normalize.mean)),
        )
        assert expected is not None  # view_sizes has looked
        assert mean is not None
        parts.append(
            replace(
                whole,
                encoder=single,
                backbone=own.backbone,
                view=replace(view, size=size, small_size=size, interpolation=expected.interpolation),
                normalize=mean,
                image_size=min(image_size, round(size * 8 / 7)),
            )
        )
    return replace(whole, parts=tuple(parts))


def embed(
    sources: Sources = (),
    *,
    labeled: Sources = (),
    backbone: str | None = None,
    init: Path | str = PRETRAINED,
    views: int = 1,
    size: int | None = None,
    cache: Path | str | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> Embedded:
    """Compute the features of images with a pretrained network, in a center view and in random views.

    Features that an earlier call has computed are taken from the cache.

    Args:
        sources: Unlabeled images, as for Pool.open.
        labeled: Sources with labels, as for Pool.open.
        backbone: As for Embedder.
        init: As for Embedder.
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
    embedder = Embedder(
        backbone, init=init, views=views, size=size, cache=cache, device=device, console=console
    )
    return embedder.embed(open_images(sources, labeled))


def open_images(sources: Sources, labeled: Sources) -> Pool:
    """Open a pool for a command that needs images at all, like Pool.open."""
    pool = Pool.open(sources, labeled=labeled)
    if not len(pool):
        raise ValueError("name the images to embed: folders, images, tables, .npz files or saved datasets")
    return pool


def seconds_per_view(name: str) -> float:
    """How long a named network takes for one view on this machine: measured once, and kept in the cache."""
    size = NETWORKS[name].cpu_size
    embedder = Embedder(name, console=Terminal(quiet=True))
    made_by = (
        f"{name} {size} {embedder.device} {torch.get_num_threads()} {platform.node()} {torch.__version__}"
    )
    path = default_folder() / "seconds_per_view.json"
    kept: Any = {}
    with contextlib.suppress(OSError, ValueError):  # not there yet, or damaged
        kept = read_json(path)
    if isinstance(kept, dict) and isinstance(kept.get(made_by), float):
        return float(kept[made_by])
    describe = frozen_features(embedder._encoder())
    views = torch.rand(CHUNK, 3, size, size, device=embedder.device)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        describe(views)
        times.append((time.perf_counter() - began) / CHUNK)
    with contextlib.suppress(OSError):  # a cache that cannot be written: measured again the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**(kept if isinstance(kept, dict) else {}), made_by: min(times)})
    return min(times)


LOOKED_AT = 512  # rows, spread evenly
SAME, ALIKE = 1e-6, 0.98  # mean distance from 1 of the cosine; mean cosine
FEWEST = 30  # labels from which on a chance hit tells something
CHANCE = 0.99  # share of random labelings that do no better
CAUSES = (
    "likely the weights are not those of this network, or expect other views; compare --backbone, --init and"
    " --augment.size with `ropaws backbones`"
)


def useless_features(features: Features, labels: Sequence[int]) -> str | None:
    """A line that names the likely cause, where features know nothing of the images; None where all is well.

    labels: class of each row, below 0 for none
    """
    rows = F.normalize(features[_spread(len(features))], dim=1)
    if len(rows) < 2:
        return None
    cosine = float((rows.sum(dim=0).square().sum() - len(rows)) / (len(rows) * (len(rows) - 1)))
    if 1 - cosine < SAME:
        return f"the features of all images are the same: {CAUSES}"
    if cosine > ALIKE:
        return f"the features hardly vary (mean cosine {cosine:.3f}): all images look alike, or {CAUSES}"
    numbers = torch.tensor(labels)
    known = (numbers >= 0).nonzero().squeeze(1)[:4096]
    return _at_chance(features[known], numbers[known]) if len(known) >= FEWEST else None


def _at_chance(rows: Tensor, labels: Tensor) -> str | None:
    """Held-out labels by the nearest class mean, each row left out of its own.   (n, d), (n,)"""
    classes, numbers, counts = labels.unique(return_inverse=True, return_counts=True)
    known = counts[numbers] > 1
    if len(classes) < 2 or int(known.sum()) < FEWEST:
        return None
    rows = F.normalize(F.normalize(rows, dim=1) - F.normalize(rows, dim=1).mean(dim=0), dim=1)
    sums = torch.zeros(len(classes), rows.shape[1]).index_add_(0, numbers, rows)
    scores = rows @ (sums / counts[:, None]).T
    own = ((sums[numbers] - rows) / (counts[numbers] - 1).clamp_min(1)[:, None] * rows).sum(dim=1)
    scores[torch.arange(len(rows)), numbers] = own
    from scipy.special import bdtr  # slow to load

    right = int((scores.argmax(dim=1) == numbers)[known].sum())
    seen, chance = int(known.sum()), float(counts.max() / counts.sum())
    if right and bdtr(right - 1, seen, chance) >= CHANCE:  # so many draw fewer at random
        return None
    return (
        f"the features know no more of the {seen} labels than chance ({right} right, held out): the labels do"
        f" not follow from the images, or {CAUSES}"
    )


def _spread(count: int) -> Tensor:
    return torch.arange(0, count, max(1, -(-count // LOOKED_AT)))
