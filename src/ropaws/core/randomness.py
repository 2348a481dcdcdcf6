"""Every random choice is a function of the seed, its purpose and the step; so is the batch of a step.

So a run can be continued at any step without having saved the state of a generator, and changing
how much randomness one purpose takes does not move the others.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ropaws.core.distributed import Rank, share

# Purposes. Numbers, not names: they are part of what a seed means and must not change.
SPLIT, POOL_ORDER, SUPPORT, VIEWS, SUPPORT_VIEWS, POOL, FINE_TUNE, ANALYSIS, LABELED_ORDER = range(9)
FROZEN_VIEWS = 9
METHOD = 10
POOL_SAMPLE = 11


def generator(seed: int, purpose: int, step: int = 0) -> torch.Generator:
    """A CPU generator for one purpose at one step."""
    return torch.Generator().manual_seed(step_seed(seed, purpose, step))


def step_seed(seed: int, purpose: int, step: int) -> int:
    """A seed for one purpose at one step."""
    state = np.random.SeedSequence([seed, purpose, step]).generate_state(1, np.uint64)[0]
    return int(state >> np.uint64(1))


MOST_IMAGES, MOST_VIEWS = 100_000, 1000  # of a class per batch, of an image: no memory suffices for more


@dataclass(frozen=True, kw_only=True)
class SupportConfig:
    """The class-balanced labeled batch of a step."""

    classes: int | None = None
    """Classes per batch, sampled at each step; None for all of them."""
    images_per_class: int = 16
    """Images per class; sampled with replacement where there are fewer labels."""
    views: int = 8
    """Random views of each image."""
    unique_classes_per_process: bool = False
    """With several processes: each takes some of the classes, instead of some images of every class."""
    images_per_step: int | None = None
    """Instead of balanced batches: this many labeled images per step, in shuffled epochs (fine-tuning)."""

    def __post_init__(self) -> None:
        for name in ("classes", "images_per_class", "views", "images_per_step"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"support.{name} must be at least 1, got {value}")
        for name, most in (("images_per_class", MOST_IMAGES), ("views", MOST_VIEWS)):
            if (value := getattr(self, name)) > most:
                raise ValueError(f"support.{name} must be at most {most}, got {value}")


def steps_per_epoch(images: int, batch: int) -> int:
    """Steps in which every labeled image is used once, in batches of nearly equal size.

    A batch has two images at least: batch norm has no statistics of a single one.
    """
    return max(1, min(-(-images // batch), images // 2))


def unlabeled_indices(step: int, *, batch: int, pool: int, seed: int) -> Tensor:
    """The unlabeled batch of a step.   ->  (batch,) positions in the pool"""
    if batch > pool:
        raise ValueError(
            f"train.batch={batch} is larger than the unlabeled set of {pool} images; use at most {pool}"
        )
    return shuffled_indices(step, batch=batch, images=pool, seed=seed, purpose=POOL_ORDER)


def shuffled_indices(step: int, *, batch: int, images: int, seed: int, purpose: int) -> Tensor:
    """The batch of a step: images in random order, a new order each epoch, an incomplete batch left out."""
    epoch, position = divmod(step, images // batch)
    return _order(images, seed, purpose, epoch)[position * batch : (position + 1) * batch]


@functools.lru_cache(maxsize=8)  # an epoch's order serves all its steps
def _order(images: int, seed: int, purpose: int, epoch: int) -> Tensor:
    return torch.randperm(images, generator=generator(seed, purpose, epoch))


def support_indices(step: int, labels: Tensor, config: SupportConfig, *, seed: int) -> tuple[Tensor, Tensor]:
    """Positions of the sampled images in the labeled set, and their class in this batch.

    labels (l,)  ->  positions (k,), relative labels (k,) in 0 .. classes of the batch - 1
    One class after another, images_per_class each; views are made later. With images_per_step: in random
    order, and the classes of the batch are all classes.
    """
    if config.images_per_step is not None:
        epoch, number = divmod(step, steps_per_epoch(len(labels), config.images_per_step))
        order = _order(len(labels), seed, LABELED_ORDER, epoch)
        positions = order.tensor_split(steps_per_epoch(len(labels), config.images_per_step))[number]
        return positions, labels[positions]
    random = generator(seed, SUPPORT, step)
    known = labels.unique()
    count = len(known) if config.classes is None else config.classes
    if count > len(known):
        raise ValueError(
            f"support.classes={count}, but only {len(known)} classes have labels; use at most {len(known)}"
        )
    classes = known[torch.randperm(len(known), generator=random)[:count].sort().values]
    drawn = [
        _draw((labels == label).nonzero().squeeze(1), config.images_per_class, random) for label in classes
    ]
    return torch.cat(drawn), torch.arange(count).repeat_interleave(config.images_per_class)


def support_share(images: int, config: SupportConfig, at: Rank) -> Tensor:
    """Which of the sampled images of a step, one class after another, a process has.   ->  (k,) ascending"""
    if config.images_per_step is not None or not config.unique_classes_per_process:
        chosen = torch.arange(at.rank, images, at.size)
    else:
        mine = share(images // config.images_per_class, at)
        chosen = torch.arange(mine.start * config.images_per_class, mine.stop * config.images_per_class)
    if len(chosen) == 0:
        what = "classes" if config.unique_classes_per_process else "labeled images"
        raise ValueError(f"a support batch has too few {what} for {at.size} processes; start fewer of them")
    return chosen


def _draw(candidates: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Draw without replacement as far as possible: every image is used once before any is used twice."""
    rounds = -(-count // len(candidates))
    order = torch.cat([torch.randperm(len(candidates), generator=random) for _ in range(rounds)])
    return candidates[order[:count]]


def draw_views(views: int, count: int, rows: int, random: torch.Generator) -> Tensor:
    """Which of the kept views of each row to show: different ones, as far as there are enough.

    views: kept ones of each row; count: those to show  ->  (rows, count)
    """
    order = torch.rand(rows, views, generator=random).argsort(dim=1)
    return order[:, torch.arange(count) % views]
