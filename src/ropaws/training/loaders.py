"""Batches of a step, augmented on the device. Only images on disk go through worker processes."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws.core.distributed import Rank, gather_constants, place, share
from ropaws.core.features import Features
from ropaws.core.randomness import (
    METHOD,
    SUPPORT_VIEWS,
    VIEWS,
    SupportConfig,
    draw_views,
    generator,
    step_seed,
    support_indices,
    support_share,
    unlabeled_indices,
)
from ropaws.core.records import Batch, Support
from ropaws.core.worker_pool import map_in_workers
from ropaws.pool.augment import Normalization, Part, View, augment, center_view, kind_of, random_views
from ropaws.pool.corpus import EmbeddedImages, Images, ImageStack, check_unreadable, features_of, whole_batch
from ropaws.pool.decoding import ReadBatch, ReadRequest, read_batch
from ropaws.pool.image_ops import Interpolation

AHEAD = 2  # steps that a worker reads ahead
FEW = 100  # images seen before a share of unreadable ones means anything
NONE = torch.empty(0, dtype=torch.long)
PASS_BATCH = 512  # images of a pass over the pool at a time


@dataclass(frozen=True)
class TrainingData:
    """What training sees: images, and the granted labels alone."""

    images: Images  # (n, channels, h, w) uint8, on the device or on disk, or features: the unlabeled set
    labeled_indices: Tensor  # (l,) the labeled ones among them
    labels: Tensor  # (l,) their classes
    normalize: Normalization
    outside: Tensor = NONE  # (o,) positions of those that are known to belong to no class


class StepImages(NamedTuple):
    """The images of a step that are this process's."""

    unlabeled: Tensor  # (u,) positions among the training images
    labeled: Tensor  # (k,) positions among the training images


class Pixels(NamedTuple):
    """The images of a step, before augmentation; of images whose features are known, the drawn views."""

    unlabeled: Tensor  # (u, channels, h, w) uint8, or (u, roles, d) one kind of views after another
    labeled: Tensor  # (k, channels, h, w) uint8, or (k, views, d)
    pool_index: Tensor  # (u,) positions of the unlabeled images, also of those that replace an unreadable one
    unlabeled_aspects: Tensor | None = None  # (u,) width / height in truth, on the CPU, of squeezed images
    labeled_aspects: Tensor | None = None  # (k,)

    def to(self, device: torch.device) -> "Pixels":
        """The pixels there; boxes are drawn on the CPU, where the aspects stay."""
        return self._replace(
            unlabeled=self.unlabeled.to(device, non_blocking=True),
            labeled=self.labeled.to(device, non_blocking=True),
            pool_index=self.pool_index.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class BatchStream:
    """The batch of any step, as a function of the seed and the step."""

    data: TrainingData
    views: Mapping[str, View]  # of unlabeled images, by role; none: the method looks at labeled images alone
    labeled_view: View
    support: SupportConfig
    batch: int
    seed: int
    size: int  # pixels per side of the center views of a pass over the pool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    at: Rank = field(default_factory=place)  # which part of each batch is this process's
    unreadable: dict[str, str] = field(default_factory=dict)  # fills while images are read from disk
    interpolation: Interpolation = "bilinear"  # of the center views

    def __post_init__(self) -> None:
        if self.batch % self.at.size:
            raise ValueError(
                f"train.batch={self.batch} cannot be shared out evenly to {self.at.size} processes;"
                f" use a multiple of {self.at.size}"
            )

    def pool_pass(self, step: int) -> "PoolPass | None":
        """A pass over the pool, where a new epoch starts with this step."""
        if not self.views or step % max(1, len(self.data.images) // self.batch):
            return None
        return self.whole_pool(step)

    def whole_pool(self, step: int) -> "PoolPass":
        """A pass over the pool before this step."""
        return PoolPass(self.data, self.size, step, self.device, self.interpolation)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of these steps; images on disk are read ahead by worker processes."""
        for step, pixels in self._all_pixels(start, stop):
            yield Batch(
                step,
                stop,
                self.unlabeled_views(step, pixels.unlabeled, pixels.unlabeled_aspects),
                pixels.pool_index.to(self.device),
                self.support_batch(step, pixels.labeled, pixels.labeled_aspects),
                step_seed(self.seed, METHOD, step),
            )

    def chosen(self, step: int) -> StepImages:
        """This process's images of a step."""
        pool = torch.empty(0, dtype=torch.long)
        if self.views:
            pool = unlabeled_indices(step, batch=self.batch, pool=len(self.data.images), seed=self.seed)
            pool = pool[share(self.batch, self.at)]
        positions, _ = self._drawn(step)
        mine = support_share(len(positions), self.support, self.at)
        return StepImages(pool, self.data.labeled_indices[positions[mine]])

    def pixels(self, step: int) -> Pixels:
        """This process's images of a step; those on disk are read in this process."""
        images, chosen = self.data.images, self.chosen(step)
        if (features := features_of(images)) is not None:
            shown = images.shown(chosen.unlabeled) if isinstance(images, EmbeddedImages) else chosen.unlabeled
            return Pixels(*self._features(step, features, chosen), shown)
        if isinstance(images, ImageStack):
            return self._assembled(chosen, read_batch(self._request(chosen), images.cache))
        unlabeled, labeled = whole_batch(images, chosen.unlabeled), whole_batch(images, chosen.labeled)
        return Pixels(unlabeled.pixels, labeled.pixels, chosen.unlabeled, unlabeled.aspects, labeled.aspects)

    def _features(self, step: int, features: Features, chosen: StepImages) -> tuple[Tensor, Tensor]:
        """Drawn views of unlabeled and labeled images, those of unlabeled ones by kind."""
        count = features.view_count
        random, part = generator(self.seed, VIEWS, step), self._unlabeled_part
        several = [
            features.views(chosen.unlabeled, kind, draw_views(count, len(roles), part.of, random)[part.rows])
            for kind, roles in self._roles_by_kind.items()
        ]
        part = self._labeled_part(step)
        random = generator(self.seed, SUPPORT_VIEWS, step)
        drawn = draw_views(count, self.support.views, part.of, random)[part.rows]
        labeled = features.views(chosen.labeled, kind_of(self.labeled_view), drawn).to(self.device)
        return torch.cat(several, dim=1).to(self.device) if several else labeled[:0], labeled

    @property
    def _unlabeled_part(self) -> Part:
        mine = share(self.batch, self.at)
        return Part(torch.arange(mine.start, mine.stop), self.batch)

    def _labeled_part(self, step: int) -> Part:
        positions, _ = self._drawn(step)
        return Part(support_share(len(positions), self.support, self.at), len(positions))

    @functools.cached_property
    def _drawn(self) -> Callable[[int], tuple[Tensor, Tensor]]:
        """support_indices of a step, which several parts of its batch ask for: drawn once."""
        draw = functools.partial(
            support_indices, labels=self.data.labels, config=self.support, seed=self.seed
        )
        return functools.lru_cache(maxsize=AHEAD + 1)(draw)

    def unlabeled_views(self, step: int, pixels: Tensor, aspects: Tensor | None = None) -> dict[str, Tensor]:
        if not self.views:
            return {}
        if pixels.ndim == 3:
            roles = [role for roles in self._roles_by_kind.values() for role in roles]
            found = dict(zip(roles, pixels.unbind(dim=1), strict=True))
            return {role: found[role] for role in self.views}
        random = generator(self.seed, VIEWS, step)
        return random_views(pixels, self.views, self.data.normalize, random, self._unlabeled_part, aspects)

    @functools.cached_property
    def _roles_by_kind(self) -> dict[View | None, list[str]]:
        """Roles whose views are drawn from the same cached ones."""
        roles: dict[View | None, list[str]] = {}
        for role, view in self.views.items():
            roles.setdefault(kind_of(view), []).append(role)
        return roles

    def support_batch(self, step: int, pixels: Tensor, aspects: Tensor | None = None) -> Support:
        positions, labels = self._drawn(step)
        mine = support_share(len(positions), self.support, self.at)
        views, device = self.support.views, pixels.device
        random = generator(self.seed, SUPPORT_VIEWS, step)
        if pixels.ndim == 3:
            images = torch.cat(pixels.unbind(dim=1))
        else:  # row v * images + i of the batch is view v of image i
            rows = torch.cat([view * len(positions) + mine for view in range(views)])
            part = Part(rows, views * len(positions))
            images = augment(
                pixels.repeat(views, 1, 1, 1),
                self.labeled_view,
                self.data.normalize,
                random,
                part,
                None if aspects is None else aspects.repeat(views),
            )
        all_classes = self.data.labels if self.support.images_per_step is not None else labels
        one_hot = F.one_hot(labels[mine].repeat(views), int(all_classes.max()) + 1)
        return Support(
            images,
            one_hot.to(device, torch.float32),
            positions[mine].repeat(views).to(device),
            self.data.labels[positions[mine]].repeat(views).to(device),
        )

    def _all_pixels(self, start: int, stop: int) -> Iterator[tuple[int, Pixels]]:
        images = self.data.images
        if not isinstance(images, ImageStack):
            yield from ((step, self.pixels(step)) for step in range(start, stop))
            return
        requests = (self._request(self.chosen(step)) for step in range(start, stop))
        read = functools.partial(read_batch, cache=images.cache)  # once for all: a worker counts its room
        found = map_in_workers(read, requests, workers=images.worker_count, ahead=AHEAD)
        for step, result in zip(range(start, stop), found, strict=True):
            pixels = self._assembled(self.chosen(step), result)
            seen = min(len(images), (step - start + 1) * self.batch)
            check_unreadable(self.unreadable, max(seen, min(FEW, len(images))))
            yield step, pixels.to(self.device)

    def _request(self, chosen: StepImages) -> ReadRequest:
        images = self.data.images
        assert isinstance(images, ImageStack)
        both = torch.cat([chosen.unlabeled, chosen.labeled])
        return images.request(both, images.crop)

    def _assembled(self, chosen: StepImages, result: ReadBatch) -> Pixels:
        """Unreadable unlabeled images are replaced; a labeled one was readable before and is an error."""
        images = self.data.images
        assert isinstance(images, ImageStack)
        count = len(chosen.unlabeled)
        index = torch.cat([chosen.unlabeled, chosen.labeled])
        found = images.complete(index, result, strict_from=count)
        self.unreadable.update(found.failures)
        pixels = Pixels(found.images[:count], found.images[count:], found.positions[:count])
        if found.aspects is None:
            return pixels
        return pixels._replace(unlabeled_aspects=found.aspects[:count], labeled_aspects=found.aspects[count:])


@dataclass(frozen=True)
class PoolPass:
    """A pass over all training images, for methods that look at the whole pool now and then."""

    data: TrainingData
    size: int  # pixels per side of the center view
    step: int  # the step that comes next
    device: torch.device
    interpolation: Interpolation = "bilinear"

    def __len__(self) -> int:
        return len(self.data.images)

    def of(self, function: Callable[[Tensor], Tensor]) -> "EncodedPool":
        """The pass in which every center view is what the function makes of it."""
        return EncodedPool(self, function)

    def map(self, function: Callable[[Tensor], Tensor], rows: Tensor | None = None) -> Tensor:
        """function(center views) of training images; the same in every process.

        function: (b, channels, size, size)  ->  (b, ...), called for a batch at a time; it gets features
        (b, d) where those are known. rows (k,): the images to look at; by default all, in their order.
        """
        rows = torch.arange(len(self)) if rows is None else rows.cpu()
        rows = rows[share(len(rows))]
        first, *rest = rows.split(PASS_BATCH)
        answer = function(self._views(first))
        # Made once: many small answers between large blocks that come and go would scatter the memory.
        found = answer.new_empty(len(rows), *answer.shape[1:])
        found[: len(first)] = answer
        for number, part in enumerate(rest, start=1):
            found[number * PASS_BATCH : number * PASS_BATCH + len(part)] = function(self._views(part))
        return gather_constants(found)

    def _views(self, rows: Tensor) -> Tensor:
        images = self.data.images
        if (features := features_of(images)) is not None:
            return features[rows].to(self.device)
        if isinstance(images, ImageStack):
            pixels, _ = images.read(rows)
        else:
            pixels = images[rows.to(images[:0].device)]
        return center_view(pixels.to(self.device), self.size, self.data.normalize, self.interpolation)


@dataclass(frozen=True)
class EncodedPool:
    """A pass over what a function makes of the center views, such as their features."""

    pool: PoolPass
    encode: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.pool)

    def map(self, function: Callable[[Tensor], Tensor], rows: Tensor | None = None) -> Tensor:
        """Return function(encoded views), as PoolPass.map does."""
        return self.pool.map(lambda views: function(self.encode(views)), rows)
