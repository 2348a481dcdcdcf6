"""Batches of a step, augmented on the device. Images in memory never go through workers."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ropaws.batch import Support, Views
from ropaws.data.augment import AugmentConfig, Normalization, Part, augment, random_views
from ropaws.data.corpus import Images
from ropaws.data.files import check_unreadable
from ropaws.data.randomness import SUPPORT_VIEWS, VIEWS, generator
from ropaws.data.samplers import SupportConfig, support_indices, support_share, unlabeled_indices
from ropaws.data.stacks import PictureStack
from ropaws.data.workers import starting_workers
from ropaws.distributed import place, share
from ropaws.launch import Place

AHEAD = 2  # steps that a worker reads ahead
FEW = 100  # pictures seen before a share of unreadable ones means anything

T = TypeVar("T")


@dataclass(frozen=True)
class TrainingData:
    """What training sees: images, and the granted labels alone."""

    images: Images  # (n, channels, h, w) uint8, on the device or on disk: the unlabelled set
    labeled_indices: Tensor  # (l,) the labelled ones among them
    labels: Tensor  # (l,) their classes
    normalize: Normalization


class Pixels(NamedTuple):
    """The images of a step, before augmentation."""

    unlabeled: Tensor  # (batch, channels, h, w) uint8
    labeled: Tensor  # (k, channels, h, w) uint8
    unreadable: dict[str, str]  # pictures that another one stands in for


@dataclass(frozen=True)
class BatchStream:
    """Views and support of any step, as a function of the seed and the step."""

    data: TrainingData
    augment: AugmentConfig
    support: SupportConfig
    batch: int
    seed: int
    with_views: bool = True  # False: a method that looks at labelled images alone gets empty views
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    at: Place = field(default_factory=place)  # which part of each batch is this process's
    unreadable: dict[str, str] = field(default_factory=dict)  # fills while pictures are read from disk

    def __post_init__(self) -> None:
        if self.batch % self.at.size:
            raise ValueError(
                f"train.batch={self.batch} cannot be shared out evenly to {self.at.size} processes;"
                f" use a multiple of {self.at.size}"
            )

    def pixels(self, step: int) -> Pixels:
        """This process's images of a step; from disk in the calling process."""
        pool = unlabeled_indices(step, batch=self.batch, pool=len(self.data.images), seed=self.seed)
        pool = pool[share(self.batch, self.at)] if self.with_views else pool[:0]
        positions, _ = support_indices(step, self.data.labels, self.support, seed=self.seed)
        mine = support_share(len(positions), self.support, self.at)
        labeled = self.data.labeled_indices[positions[mine]]
        if isinstance(self.data.images, PictureStack):
            unlabeled, failures = self.data.images.read(pool)
            # These were read before training: one that has gone since is an error.
            return Pixels(unlabeled, self.data.images.read(labeled, strict=True)[0], failures)
        here = self.data.images[:0].device
        return Pixels(self.data.images[pool.to(here)], self.data.images[labeled.to(here)], {})

    def views(self, step: int, pixels: Pixels) -> Views:
        if not self.with_views:
            empty = pixels.unlabeled.float()
            return Views(empty, empty)
        random = generator(self.seed, VIEWS, step)
        mine = share(self.batch, self.at)
        part = Part(torch.arange(mine.start, mine.stop), self.batch)
        return random_views(pixels.unlabeled, self.augment, self.data.normalize, random, part)

    def support_batch(self, step: int, pixels: Pixels) -> Support:
        positions, labels = support_indices(step, self.data.labels, self.support, seed=self.seed)
        mine = support_share(len(positions), self.support, self.at)
        views, device = self.support.views, pixels.labeled.device
        # One view of all images after another: row v * images + i of the batch is view v of image i.
        rows = torch.cat([view * len(positions) + mine for view in range(views)])
        random = generator(self.seed, SUPPORT_VIEWS, step)
        images = augment(
            pixels.labeled.repeat(views, 1, 1, 1),
            self.augment,
            self.data.normalize,
            random,
            Part(rows, views * len(positions)),
        )
        classes = int(labels.max()) + 1
        return Support(
            images,
            F.one_hot(labels[mine].repeat(views), classes).to(device, torch.float32),
            positions[mine].repeat(views).to(device),
        )

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, Views, Support]]:
        for step, pixels in self._all_pixels(start, stop):
            yield step, self.views(step, pixels), self.support_batch(step, pixels)

    def _all_pixels(self, start: int, stop: int) -> Iterator[tuple[int, Pixels]]:
        """Pictures on disk are read ahead by worker processes, each of which reads whole steps."""
        images = self.data.images
        if not isinstance(images, PictureStack):
            yield from ((step, self.pixels(step)) for step in range(start, stop))
            return
        workers = images.workers or os.cpu_count() or 1
        loader = DataLoader(
            _Steps(self),
            batch_size=None,
            sampler=range(start, stop),
            num_workers=min(workers, stop - start),
            prefetch_factor=AHEAD,
            collate_fn=_as_it_is,
            worker_init_fn=_leave_signals_to_the_parent,
            multiprocessing_context="spawn",  # a forked child of a process with threads may hang
            pin_memory=self.device.type == "cuda",
        )
        with starting_workers():
            fetched = iter(loader)
        for step, (unlabeled, labeled, failures) in zip(range(start, stop), fetched, strict=True):
            self.unreadable.update(failures)
            seen = min(len(images), (step - start + 1) * self.batch)
            check_unreadable(self.unreadable, max(seen, min(FEW, len(images))))
            unlabeled, labeled = (t.to(self.device, non_blocking=True) for t in (unlabeled, labeled))
            yield step, Pixels(unlabeled, labeled, failures)


class _Steps(Dataset[Pixels]):
    """A stream as DataLoader wants it: the item of a step is its pixels."""

    def __init__(self, stream: BatchStream) -> None:
        self.stream = stream

    def __getitem__(self, step: int) -> Pixels:
        return self.stream.pixels(step)


def _as_it_is(value: T) -> T:
    return value


def _leave_signals_to_the_parent(_worker: int) -> None:
    """Ctrl-C and SIGTERM reach the whole group; the parent ends the run after its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
