"""Features of images by a frozen network: looked up in the cache, and computed where they are missing."""

import copy
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
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ropaws.core.distributed import check_same, place, share, wait_for_all
from ropaws.core.features import FeatureBank
from ropaws.core.hardware import keep_freed_memory
from ropaws.core.randomness import FROZEN_VIEWS, generator
from ropaws.core.terminal import counted
from ropaws.core.worker_pool import map_in_workers
from ropaws.embedding.backbones import JoinedFeatures, side_by_side
from ropaws.embedding.encoder import Encoder
from ropaws.embedding.feature_cache import SEGMENT, FeatureStore, Where, default_folder
from ropaws.embedding.pretrained import known_name
from ropaws.pool.augment import AugmentConfig, Normalization, Part, View, augment, center_view
from ropaws.pool.content import KEY_BYTES as KEY
from ropaws.pool.content import content_key, named_keys
from ropaws.pool.corpus import (
    EmbeddedImages,
    Images,
    ImageStack,
    WholeBatch,
    WholeImages,
    check_unreadable,
    pixels_of,
    whole_batch,
)
from ropaws.pool.decoding import Crop, ReadBatch, in_workers, read_batch
from ropaws.pool.sources import DataConfig, Watch


def folded(backbone: nn.Module) -> nn.Module:
    """A copy for inference whose batch norms are part of the convolutions; it cannot be trained.

    A module names its pairs in `norm_pairs`: tuples of the name of a convolution and of the batch norm that
    takes its output, and nothing else does. Pairs that a module does not have (a missing shortcut) are
    skipped. A backbone that declares no pairs (timm's) is returned as it is, not a copy.
    """
    if not any(hasattr(module, "norm_pairs") for module in backbone.modules()):
        return backbone
    copied = copy.deepcopy(backbone).eval().requires_grad_(False)
    for module in list(copied.modules()):
        for convolution, norm in getattr(module, "norm_pairs", ()):
            _fold(module, convolution, norm)
    return copied


def _fold(module: nn.Module, convolution: str, norm: str) -> None:
    parts = dict(module.named_modules())
    if convolution not in parts:
        return
    merged = fuse_conv_bn_eval(parts[convolution], parts[norm])
    for name, part in ((convolution, merged), (norm, nn.Identity())):
        parent, _, own = name.rpartition(".")
        setattr(parts[parent], own, part)


HALF = 16  # characters of a digest that tell the center view
FORMAT = 3  # part of every digest: raise it when the same settings give other features
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
    parts: "tuple[Embedding, ...]" = ()  # of several networks together: how each of them sees images

    def in_views(self, views: int, kind: View | None = None) -> "Embedding":
        """Return the same embedding with so many random views, of this kind or its own."""
        parts = tuple(
            part.in_views(views, kind and dataclasses.replace(kind, size=part.view.size))  # type: ignore[type-var]
            for part in self.parts
        )
        return dataclasses.replace(self, views=views, kind=kind, parts=parts)

    @functools.cached_property
    def digest(self) -> str:
        """Digest whose first half is the same for all that see the same center view."""
        if self.parts:
            digests = [part.digest for part in self.parts]
            return _half([each[:HALF] for each in digests]) + _half([each[HALF:] for each in digests])
        view = dataclasses.asdict(self.view)
        random = {name: value for name, value in view.items() if not name.startswith("small_")}
        if self.kind is not None:
            random = {"kind": repr(self.kind)}  # a dataclass: its name and all its settings
        center = {
            "format": FORMAT,
            "backbone": known_name(self.backbone),
            "weights": self.encoder.backbone_digest(),
            "precision": str(self.encoder.autocast),
            "size": self.view.size,
            "interpolation": view["interpolation"],
            "normalize": [self.normalize.mean, self.normalize.std],
            "image_size": self.image_size,
        }
        views = [self.views, random, self.crop] if self.views else []
        return _half(center) + _half([center, views])


def _half(facts: object) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def embed_images(
    images: Images,
    embedding: Embedding,
    data: DataConfig,
    *,
    watch: Watch,
    warn: Callable[[str], object],
    together: bool = False,
    few_unreadable: bool = True,
    keys: NDArray[np.uint8] | None = None,
    stores: dict[str, FeatureStore] | None = None,
) -> EmbeddedImages:
    """Images with their features, from the cache as far as they are there.

    Args:
        images: In memory, or on disk.
        embedding: The backbone, on its device, and the views.
        data: Where the cache is and how large it may be.
        watch: Shows the progress.
        warn: Takes a line about a damaged file of the cache.
        together: All processes of the run call this; each computes its part of what is missing.
        few_unreadable: More than a tenth of them is an error.
        keys: (n, KEY) of the files that images in memory were decoded from; by default those of their pixels.
        stores: Opened caches by digest, for a caller that asks for a few images again and again: opening one
            takes time by the number of images that it holds.

    Returns:
        The images. The row of an unreadable one is that of the next readable one.

    Raises:
        ValueError: Too many images are unreadable, the cache has no room for them, or the processes see
            different ones.
    """
    pixels = pixels_of(images)
    if isinstance(images, EmbeddedImages) and images.features.made_from == embedding.digest:
        return images
    if embedding.parts:
        found = [
            embed_images(
                _at_size(pixels, part.image_size), part, data, watch=watch, warn=warn, together=together,
                few_unreadable=few_unreadable, keys=keys, stores=stores,
            )
            for part in embedding.parts
        ]  # fmt: skip
        return _side_by_side(pixels, found, embedding.digest)
    shape = (embedding.views + 1, embedding.encoder.feature_dims)
    folder = data.feature_cache or default_folder()
    store = None if stores is None else stores.get(embedding.digest)
    store = store or FeatureStore(folder, embedding.digest, shape, data.cache_gb * 2**30, warn)
    if stores is not None:
        stores[embedding.digest] = store
    store.limit = data.cache_gb * 2**30
    known = image_keys(pixels) if keys is None else ImageKeys(keys.copy(), np.ones(len(keys), bool))
    if together and place().size > 1 and isinstance(pixels, ImageStack):  # others were compared before
        check_same({"contents of training images": named_keys(pixels.files, known.values)})
    if embedding.views == 0 and (not together or place().rank == 0):
        _copy_centers(store, known)
    if together:
        wait_for_all()
    where, reasons = _looked_up(store, pixels, known, embedding, watch, together=together)
    where, replaced = _complete(where, pixels, reasons, few_unreadable=few_unreadable)
    bank = FeatureBank([segment.rows for segment in store.segments], where, embedding.digest)
    return EmbeddedImages(pixels, bank, replaced, {p: reasons[p] for p in replaced})


def _at_size(images: Images, size: int) -> Images:
    """Images on disk as one network decodes them; those in memory stay as they are."""
    if not isinstance(images, ImageStack) or images.size == size:
        return images
    return ImageStack(images.files, size, crop=images.crop, cache=images.cache, workers=images.workers)


def _side_by_side(images: Images, found: Sequence[EmbeddedImages], digest: str) -> EmbeddedImages:
    """The same images with the features of all networks."""
    replaced = {position: other for each in found for position, other in each.replaced.items()}
    reasons = {position: why for each in found for position, why in each.reasons.items()}
    features = JoinedFeatures([each.features for each in found], digest)
    return EmbeddedImages(images, features, replaced, reasons)


def _looked_up(
    store: FeatureStore,
    images: Images,
    keys: "ImageKeys",
    embedding: Embedding,
    watch: Watch,
    *,
    together: bool,
) -> tuple[Where, dict[int, str]]:
    """Where the features of images are, after computing those that are missing; and the unreadable ones."""
    where = _find(store, keys)
    missing = _missing(keys, where)
    store.check_room(len(np.unique(keys.values[keys.known], axis=0)) + int((~keys.known).sum()))
    if len(missing) and (not together or place().rank == 0):
        store.make_room(len(missing))
    if together:
        wait_for_all()  # nobody writes before all have seen what is missing, or the parts would not fit
        missing = missing[share(len(missing))]
    reasons = _fill(store, images, keys, missing, embedding, watch)
    if together:
        wait_for_all()
    where = _find(store, keys)
    # What another process found unreadable, or keeps on the disk of another machine; and copies of a file
    # that could not be read, or was replaced after its key was taken.
    left = np.setdiff1d(np.flatnonzero(where[:, 0] < 0), missing)
    if len(left):
        reasons |= _fill(store, images, keys, left, embedding, watch)
        where = _find(store, keys)
    return where, reasons


@dataclass(frozen=True)
class ImageKeys:
    """Keys by content. An image without one is never looked up and never stored."""

    values: NDArray[np.uint8]  # (n, KEY)
    known: NDArray[np.bool_]  # (n,)


def image_keys(images: Images) -> ImageKeys:
    """The keys of images in memory by their pixels, of those on disk by what is stored there."""
    if isinstance(images, ImageStack):
        found: Iterable[bytes | None] = in_workers(content_key, images.files, workers=images.workers)
    else:
        found = (_image_key(images, row) for row in range(len(images)))
    keys = ImageKeys(np.zeros((len(images), KEY), np.uint8), np.zeros(len(images), bool))
    for row, key in enumerate(found):
        if key is not None:
            keys.values[row], keys.known[row] = np.frombuffer(key, np.uint8), True
    return keys


def _copy_centers(store: FeatureStore, keys: ImageKeys) -> None:
    """Center views that `train` has kept beside random ones are taken over where they are missing."""
    for source in store.with_same_start(HALF):
        missing = _missing(keys, _find(store, keys))
        missing = missing[keys.known[missing]]
        where = source.find(keys.values[missing])
        there = where[:, 0] >= 0
        for part in np.array_split(np.flatnonzero(there), max(1, -(-int(there.sum()) // SEGMENT))):
            if len(part):
                rows = [source.segments[number].rows[row, :1] for number, row in where[part]]
                store.write(keys.values[missing[part]], np.stack(rows))


def _find(store: FeatureStore, keys: ImageKeys) -> Where:
    where = np.full((len(keys.known), 2), -1, np.int64)
    where[keys.known] = store.find(keys.values[keys.known])
    return where


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


def _missing(keys: ImageKeys, where: Where) -> NDArray[np.int64]:
    """Positions to compute: one for each content that is not there, and all without a key."""
    missing = where[:, 0] < 0
    positions = np.flatnonzero(missing & keys.known)
    _, first = np.unique(keys.values[positions], axis=0, return_index=True)
    return np.sort(np.concatenate([positions[first], np.flatnonzero(missing & ~keys.known)]))


class _Block(NamedTuple):
    positions: Tensor  # (b,)
    pixels: Tensor  # (b, channels, h, w) central squares
    whole: WholeBatch  # what random views are made of
    keys: NDArray[np.uint8]  # (b, KEY) of what the pixels were decoded from
    unreadable: dict[int, str]  # row: reason


def _fill(
    store: FeatureStore,
    images: Images,
    keys: ImageKeys,
    positions: NDArray[np.int64],
    embedding: Embedding,
    watch: Watch,
) -> dict[int, str]:
    """Compute the features of images and write them, a segment at a time. Returns the unreadable ones.

    What is written has the key that came with its pixels: a file may have been replaced since it was looked
    up. The keys are updated.
    """
    if len(positions) == 0:
        return {}
    describe = _describer(embedding)
    waiting: list[tuple[NDArray[np.uint8], NDArray[np.float16]]] = []
    reasons: dict[int, str] = {}

    def flush() -> None:
        read, rows = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
        store.write(read, rows)
        waiting.clear()

    title = (
        f"Computing features of {counted(len(positions), 'image')} in {counted(embedding.views + 1, 'view')},"
        f" batches of {_block_of(images)}"
    )
    parts = torch.from_numpy(positions).split(_block_of(images))
    wanted: Crop = embedding.crop if embedding.views else "center"
    for block in watch(_blocks(images, keys, parts, wanted), title, len(parts)):
        reasons |= {int(block.positions[row]): reason for row, reason in block.unreadable.items()}
        good = torch.tensor([row for row in range(len(block.positions)) if row not in block.unreadable])
        if len(good) == 0:
            continue
        chosen, read = block.positions[good].numpy(), block.keys[good.numpy()]
        keys.values[chosen], keys.known[chosen] = read, True
        aspects = None if block.whole.aspects is None else block.whole.aspects[good]
        whole = WholeBatch(block.whole.pixels[good], aspects)
        waiting.append((read, describe(block.pixels[good], whole)))
        if sum(len(part) for part, _ in waiting) >= SEGMENT:
            flush()
    if waiting:
        flush()
    return reasons


def _block_of(images: Images) -> int:
    """How many images are read at a time; of very large ones fewer. Their features do not depend on it."""
    return max(1, min(BLOCK, BLOCK_PIXELS // math.prod(images.shape[2:])))


def _blocks(images: Images, keys: ImageKeys, parts: Sequence[Tensor], crop: Crop) -> Iterator[_Block]:
    if not isinstance(images, ImageStack):
        for part in parts:
            squares = images[part]
            whole = whole_batch(images, part) if crop == "whole" else WholeBatch(squares)
            yield _Block(part, squares, whole, keys.values[part.numpy()], {})
        return
    read = functools.partial(read_batch, cache=images.cache)
    requests = (images.request(part, "both" if crop == "whole" else "center") for part in parts)
    found: Iterable[ReadBatch] = map(read, requests)
    if len(parts) > 1:  # a block is one worker's: alone it is read sooner here
        found = map_in_workers(read, requests, workers=images.worker_count)
    for part, result in zip(parts, found, strict=True):
        squares = torch.from_numpy(result.squares).permute(0, 3, 1, 2)
        whole = WholeBatch(squares)
        if result.wholes is not None and result.aspects is not None:
            wholes = torch.from_numpy(result.wholes).permute(0, 3, 1, 2)
            whole = WholeBatch(wholes, torch.from_numpy(result.aspects))
        yield _Block(part, squares, whole, result.keys, result.unreadable)


def frozen_features(encoder: Encoder) -> Callable[[Tensor], Tensor]:
    """The one way in which views become features of a frozen backbone, for the cache and for prediction.

    In bf16 a backbone with folded norms answers otherwise than one without, and both must not be mixed.
    views (b, channels, size, size), normalized  ->  (b, d) float16 on the CPU
    """
    backbone = folded(encoder.backbone)
    network = Encoder(backbone, nn.Sequential(), nn.Identity(), autocast=encoder.autocast, frozen=True).eval()
    return functools.partial(_describe, network)


def center_features(embedding: Embedding) -> Callable[[Tensor], Tensor]:
    """Features of the center views of images in memory.

    images (b, channels, h, w) uint8  ->  (b, d) float32 on the CPU
    """
    if embedding.parts:
        each = [center_features(part) for part in embedding.parts]
        return lambda images: side_by_side([describe(images) for describe in each])
    describe, view = frozen_features(embedding.encoder), embedding.view

    def of(images: Tensor) -> Tensor:
        views = center_view(images, view.size, embedding.normalize, view.interpolation)
        return describe(views).float()

    return of


def _describer(embedding: Embedding) -> Callable[[Tensor, WholeBatch], NDArray[np.float16]]:
    """Central squares, and what random views are made of  ->  (b, views + 1, d), the center view first"""
    features_of_views = frozen_features(embedding.encoder)
    device = next(embedding.encoder.parameters()).device
    if device.type == "cpu":
        keep_freed_memory()
    view, normalize = embedding.view, embedding.normalize

    @torch.no_grad()
    def describe(pixels: Tensor, whole: WholeBatch) -> NDArray[np.float16]:
        draws, order = _draw_rows(pixels).sort(stable=True)
        part = Part(draws, DRAWS)
        pixels, wholes = pixels[order].to(device), whole.pixels[order].to(device)
        aspects = None if whole.aspects is None else whole.aspects[order]
        found = [features_of_views(center_view(pixels, view.size, normalize, view.interpolation))]
        for number in range(embedding.views):
            random = generator(0, FROZEN_VIEWS, number)
            drawn = augment(wholes, embedding.kind or view, normalize, random, part, aspects)
            found.append(features_of_views(drawn))
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
    where: Where, images: Images, reasons: dict[int, str], *, few_unreadable: bool
) -> tuple[Where, dict[int, int]]:
    """Each unreadable image has the row of the next readable one."""
    bad, good = np.flatnonzero(where[:, 0] < 0).tolist(), np.flatnonzero(where[:, 0] >= 0)
    if not bad:
        return where, {}
    for position in bad:
        reasons.setdefault(position, "another run has dropped its features from the cache; start again")
    names: Sequence[Any] = images.files if isinstance(images, ImageStack) else range(len(images))
    if few_unreadable:
        check_unreadable({str(names[p]): reasons[p] for p in bad}, len(images))
    if len(good) == 0:
        return where, {p: p for p in bad}
    replaced = {p: int(good[np.searchsorted(good, p) % len(good)]) for p in bad}
    where = where.copy()
    for position, other in replaced.items():
        where[position] = where[other]
    return where, replaced
