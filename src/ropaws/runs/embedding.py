"""Features of images by a frozen backbone: computed once for each image, kept in a cache."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ropaws.config import RunConfig
from ropaws.data.augment import AugmentConfig, Normalization, Part, View, augment, center_view
from ropaws.data.corpus import Corpus, Images, whole_batch
from ropaws.data.feature_cache import SEGMENT, FeatureStore, Where, default_folder
from ropaws.data.features import EmbeddedImages, FeatureBank, Features, SeveralKinds, pixels_of
from ropaws.data.files.decoding import KEY_BYTES as KEY
from ropaws.data.files.decoding import content_key, in_workers, read_batch
from ropaws.data.files.reading import check_unreadable
from ropaws.data.files.streaming import ImageStack
from ropaws.data.files.whole import Crop
from ropaws.data.files.worker_pool import map_in_workers
from ropaws.data.randomness import FROZEN_VIEWS, generator
from ropaws.data.sources import DataConfig, Watch
from ropaws.data.whole_images import WholeBatch, WholeImages
from ropaws.distributed import place, share, wait_for_all
from ropaws.models.encoder import Encoder
from ropaws.models.folding import folded

FORMAT = 1  # part of every digest: raise it when the same settings give other features
DRAWS = 4096  # rows of the fixed batch of random draws; an image has the row that its content says
BLOCK = 64  # images that are read and augmented at a time
BLOCK_PIXELS = BLOCK * 512 * 512  # at most
CHUNK, GPU_CHUNK = 16, 64  # views that the backbone sees at a time: always so many, see _describe


@dataclass(frozen=True)
class Embedding:
    """How images become features: all that the features of an image depend on besides the image."""

    encoder: Encoder
    backbone: str  # its name
    view: AugmentConfig
    views: int  # random views of each image, besides the center view
    normalize: Normalization
    image_size: int  # pixels per side to which files are decoded
    kind: View | None = None  # of the random views; None: as `view` says
    crop: Crop = "center"  # what the random views are made of

    @functools.cached_property
    def digest(self) -> str:
        view = dataclasses.asdict(self.view)
        random = {name: value for name, value in view.items() if not name.startswith("small_")}
        if self.kind is not None:
            random = {"kind": repr(self.kind)}  # a dataclass: its name and all its settings
        facts = {
            "format": FORMAT,
            "backbone": self.backbone,
            "weights": self.encoder.backbone_digest(),
            "precision": str(self.encoder.autocast),
            "size": self.view.size,
            "interpolation": view["interpolation"],
            "views": [self.views, random] if self.views else [],
            "normalize": [self.normalize.mean, self.normalize.std],
            "image_size": self.image_size,
        }
        if self.views and self.crop == "whole":
            facts["crop"] = self.crop  # not for "center": such features have been kept before
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def embedding_of(
    config: RunConfig,
    encoder: Encoder,
    normalize: Normalization,
    *,
    views: int | None = None,
    kind: View | None = None,
) -> Embedding:
    """As a run with these settings embeds its training images.

    views: instead of model.frozen_views; kind: of the random views, by default the run's augmentation.
    """
    return Embedding(
        encoder,
        config.model.backbone,
        config.augment,
        config.model.frozen_views if views is None else views,
        normalize,
        config.data.image_size,
        kind,
        config.data.crop,
    )


def embed_images(
    images: Images,
    embedding: Embedding,
    data: DataConfig,
    *,
    watch: Watch,
    warn: Callable[[str], object],
    together: bool = False,
) -> EmbeddedImages:
    """Images with their features, from the cache as far as they are there.

    Args:
        images: In memory, or on disk.
        embedding: The backbone, on its device, and the views.
        data: Where the cache is and how large it may be.
        watch: Shows the progress.
        warn: Takes a line about a damaged file of the cache.
        together: All processes of the run call this; each computes its part of what is missing.

    Returns:
        The images. The row of an unreadable one is that of the next readable one.

    Raises:
        ValueError: Too many images are unreadable, or the cache has no room for them.
    """
    pixels = pixels_of(images)
    if isinstance(images, EmbeddedImages) and images.features.made_from == embedding.digest:
        return images
    shape = (embedding.views + 1, embedding.encoder.feature_dims)
    folder = data.feature_cache or default_folder()
    store = FeatureStore(folder, embedding.digest, shape, data.cache_gb * 2**30, warn)
    keys = image_keys(pixels)
    where, reasons = store.find(keys), dict[int, str]()
    missing = _missing(keys, where)
    store.check_room(len(np.unique(keys, axis=0)))
    if len(missing) and (not together or place().rank == 0):
        store.make_room(len(missing))
    if together:
        wait_for_all()  # nobody writes before all have seen what is missing, or the parts would not fit
        mine = missing[share(len(missing))]
        reasons |= _fill(store, pixels, keys, mine, embedding, watch)
        wait_for_all()
        where = store.find(keys)
        # What another process found unreadable, or keeps on the disk of another machine.
        missing = np.setdiff1d(_missing(keys, where), np.array(list(reasons), np.int64))
    if len(missing):
        reasons |= _fill(store, pixels, keys, missing, embedding, watch)
        where = store.find(keys)
    where, replaced = _complete(where, keys, pixels, reasons)
    bank = FeatureBank([segment.rows for segment in store.segments], where, embedding.digest)
    return EmbeddedImages(pixels, bank, replaced, reasons)


def image_keys(images: Images) -> NDArray[np.uint8]:
    """By content: of the pixels, or of the files.   ->  (n, KEY)"""
    if isinstance(images, ImageStack):
        found: Iterable[bytes] = in_workers(content_key, images.files, workers=images.workers)
    else:
        found = (_image_key(images, row) for row in range(len(images)))
    return np.frombuffer(b"".join(found), np.uint8).reshape(len(images), KEY)


def _image_key(images: Images, row: int) -> bytes:
    """Of an image in memory."""
    if isinstance(images, WholeImages) and images.place[row] >= 0:
        whole = images.whole(torch.tensor([row]))
        assert whole.aspects is not None
        both = _pixel_key(images[row : row + 1]) + _pixel_key(whole.pixels) + whole.aspects.numpy().tobytes()
        return hashlib.blake2b(both, digest_size=KEY).digest()
    return _pixel_key(images[row : row + 1])


def _pixel_key(image: Tensor) -> bytes:
    """image (1, channels, h, w) uint8"""
    pixels = image.cpu().contiguous().numpy()
    state = hashlib.blake2b(str(pixels.shape).encode(), digest_size=KEY)
    state.update(pixels.data)
    return state.digest()


def _draw_rows(images: Tensor) -> Tensor:
    """Which row of the fixed batch of random draws each image has: by its pixels alone, so that its views
    do not depend on whether it is in memory or on disk, or on what stands beside it.   ->  (n,)
    """
    keys = [_pixel_key(image[None]) for image in images]
    return torch.tensor([int.from_bytes(key[:8], "little") % DRAWS for key in keys])


def _missing(keys: NDArray[np.uint8], where: Where) -> NDArray[np.int64]:
    """Positions to compute: one for each content that is not there."""
    positions = np.flatnonzero(where[:, 0] < 0)
    _, first = np.unique(keys[positions], axis=0, return_index=True)
    return np.sort(positions[first])


class _Block(NamedTuple):
    positions: Tensor  # (b,)
    pixels: Tensor  # (b, channels, h, w) central squares
    whole: WholeBatch  # what random views are made of
    unreadable: dict[int, str]  # row: reason


def _fill(
    store: FeatureStore,
    images: Images,
    keys: NDArray[np.uint8],
    positions: NDArray[np.int64],
    embedding: Embedding,
    watch: Watch,
) -> dict[int, str]:
    """Compute the features of images and write them, a segment at a time. Returns the unreadable ones."""
    if len(positions) == 0:
        return {}
    describe = _describer(embedding)
    waiting: list[tuple[NDArray[np.int64], NDArray[np.float16]]] = []
    reasons: dict[int, str] = {}

    def flush() -> None:
        chosen, rows = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
        store.write(keys[chosen], rows)
        waiting.clear()

    title = (
        f"Computing features of {len(positions):,} images in {embedding.views + 1} views, batches of"
        f" {_block_of(images)}"
    )
    parts = torch.from_numpy(positions).split(_block_of(images))
    wanted: Crop = embedding.crop if embedding.views else "center"
    for block in watch(_blocks(images, parts, wanted), title, len(parts)):
        reasons |= {int(block.positions[row]): reason for row, reason in block.unreadable.items()}
        good = torch.tensor([row for row in range(len(block.positions)) if row not in block.unreadable])
        if len(good) == 0:
            continue
        chosen = block.positions[good].numpy()
        aspects = None if block.whole.aspects is None else block.whole.aspects[good]
        whole = WholeBatch(block.whole.pixels[good], aspects)
        waiting.append((chosen, describe(block.pixels[good], whole)))
        if sum(len(part) for part, _ in waiting) >= SEGMENT:
            flush()
    if waiting:
        flush()
    return reasons


def _block_of(images: Images) -> int:
    """How many images are read at a time; of very large ones fewer. Their features do not depend on it."""
    return max(1, min(BLOCK, BLOCK_PIXELS // math.prod(images.shape[2:])))


def _blocks(images: Images, parts: Sequence[Tensor], crop: Crop) -> Iterator[_Block]:
    if not isinstance(images, ImageStack):
        for part in parts:
            squares = images[part]
            yield _Block(
                part, squares, whole_batch(images, part) if crop == "whole" else WholeBatch(squares), {}
            )
        return
    read = functools.partial(read_batch, cache=images.cache)
    requests = (images.request(part, "both" if crop == "whole" else "center") for part in parts)
    found = map_in_workers(read, requests, workers=images.worker_count)
    for part, result in zip(parts, found, strict=True):
        squares = torch.from_numpy(result.squares).permute(0, 3, 1, 2)
        whole = WholeBatch(squares)
        if result.wholes is not None and result.aspects is not None:
            wholes = torch.from_numpy(result.wholes).permute(0, 3, 1, 2)
            whole = WholeBatch(wholes, torch.from_numpy(result.aspects))
        yield _Block(part, squares, whole, result.unreadable)


def _describer(embedding: Embedding) -> Callable[[Tensor, WholeBatch], NDArray[np.float16]]:
    """Central squares, and what random views are made of  ->  (b, views + 1, d), the center view first"""
    encoder = embedding.encoder
    backbone = folded(encoder.backbone)
    network = Encoder(backbone, nn.Sequential(), nn.Identity(), autocast=encoder.autocast, frozen=True).eval()
    device = next(encoder.parameters()).device
    view, normalize = embedding.view, embedding.normalize

    @torch.no_grad()
    def describe(pixels: Tensor, whole: WholeBatch) -> NDArray[np.float16]:
        draws, order = _draw_rows(pixels).sort(stable=True)
        part = Part(draws, DRAWS)
        pixels, wholes = pixels[order].to(device), whole.pixels[order].to(device)
        aspects = None if whole.aspects is None else whole.aspects[order]
        found = [_describe(network, center_view(pixels, view.size, normalize, view.interpolation))]
        for number in range(embedding.views):
            random = generator(0, FROZEN_VIEWS, number)
            drawn = augment(wholes, embedding.kind or view, normalize, random, part, aspects)
            found.append(_describe(network, drawn))
        rows = torch.empty(len(pixels), len(found), found[0].shape[1], dtype=torch.float16)
        rows[order] = torch.stack(found, dim=1)
        if not rows.isfinite().all():
            raise ValueError(
                f"backbone {embedding.backbone} gives features that are not finite, or beyond"
                f" {torch.finfo(torch.float16).max:g}; use another"
            )
        result: NDArray[np.float16] = rows.numpy()
        return result

    return describe


def _describe(network: Encoder, views: Tensor) -> Tensor:
    """Features of views, in chunks that always have the same number of rows.

    What a network says of an image may differ in the last bits with the number of images beside it.
    """
    size = CHUNK if views.device.type == "cpu" else GPU_CHUNK
    parts = []
    for part in views.split(size):
        padded = torch.cat([part, part[:1].expand(size - len(part), -1, -1, -1)])
        parts.append(network.features(padded)[: len(part)].half().cpu())
    return torch.cat(parts)


def _complete(
    where: Where, keys: NDArray[np.uint8], images: Images, reasons: dict[int, str]
) -> tuple[Where, dict[int, int]]:
    """Each unreadable image has the row of the next readable one."""
    for position in np.flatnonzero(where[:, 0] < 0).tolist():  # copies of an unreadable file are so too
        same = next((p for p in reasons if (keys[p] == keys[position]).all()), None)
        reasons.setdefault(position, reasons[same] if same is not None else "cannot be read any more")
    if not reasons:
        return where, {}
    names: Sequence[Any] = images.files if isinstance(images, ImageStack) else range(len(images))
    check_unreadable({str(names[p]): reason for p, reason in reasons.items()}, len(images))
    good = np.flatnonzero(where[:, 0] >= 0)
    replaced = {p: int(good[np.searchsorted(good, p) % len(good)]) for p in reasons}
    where = where.copy()
    for position, other in replaced.items():
        where[position] = where[other]
    return where, replaced


def embed_corpus(
    corpus: Corpus,
    embeddings: Sequence[Embedding],
    data: DataConfig,
    *,
    watch: Watch,
    warn: Callable[[str], object],
    together: bool = False,
) -> Corpus:
    """The corpus with the features of its training images, one kind of views after another.

    Features of a person's own stay as they are.
    """
    if isinstance(corpus.train_images, Features):
        return corpus
    found = [
        embed_images(corpus.train_images, embedding, data, watch=watch, warn=warn, together=together)
        for embedding in embeddings
    ]
    train = found[0]
    if len(found) > 1:
        kinds = {embedding.kind: images.features for embedding, images in zip(embeddings, found, strict=True)}
        train = EmbeddedImages(train.pixels, SeveralKinds(kinds), train.replaced, train.reasons)
    names = corpus.train_names
    unreadable = {names[p] if names else str(p): reason for p, reason in train.reasons.items()}
    listed = dict(corpus.unreadable) | unreadable
    return corpus._replace(train_images=train, unreadable=tuple(listed.items()))
