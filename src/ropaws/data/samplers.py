"""Which images make up the batches of a step: pure functions of the seed and the step."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ropaws.data.randomness import POOL_ORDER, SUPPORT, generator
from ropaws.distributed import share
from ropaws.launch import Place


@dataclass(frozen=True, kw_only=True)
class SupportConfig:
    """The class-balanced labelled batch of a step."""

    classes: int | None = None
    """Classes a batch, drawn anew each step; None for all of them."""
    images_per_class: int = 16
    """Images a class; drawn with replacement where a class has fewer labels."""
    views: int = 8
    """Random views of each image."""
    unique_classes_per_process: bool = False
    """With several processes: each takes some of the classes, instead of some images of every class."""

    def __post_init__(self) -> None:
        for name in ("classes", "images_per_class", "views"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"support.{name} must be at least 1, got {value}")


def unlabeled_indices(step: int, *, batch: int, pool: int, seed: int) -> Tensor:
    """The batch of a step: the pool in random order, a new order each epoch, the rest left out."""
    batches = pool // batch
    if batches == 0:
        raise ValueError(
            f"train.batch={batch} is larger than the unlabelled set of {pool} images; use at most {pool}"
        )
    epoch, position = divmod(step, batches)
    return _pool_order(pool, seed, epoch)[position * batch : (position + 1) * batch]


@functools.lru_cache(maxsize=1)  # an epoch's order serves all its steps
def _pool_order(pool: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(pool, generator=generator(seed, POOL_ORDER, epoch))


def support_indices(step: int, labels: Tensor, config: SupportConfig, *, seed: int) -> tuple[Tensor, Tensor]:
    """Positions of the sampled images in the labelled set, and their class in this batch.

    labels (l,)  ->  positions (k,), relative labels (k,) in 0 .. classes of the batch - 1
    One class after another, images_per_class each; views are made later.
    """
    random = generator(seed, SUPPORT, step)
    known = labels.unique()
    count = len(known) if config.classes is None else config.classes
    if count > len(known):
        raise ValueError(
            f"support.classes={count}, but only {len(known)} classes have labels; use at most {len(known)}"
        )
    classes = known[torch.randperm(len(known), generator=random)[:count].sort().values]
    positions = [
        _draw((labels == label).nonzero().squeeze(1), config.images_per_class, random) for label in classes
    ]
    return torch.cat(positions), torch.arange(count).repeat_interleave(config.images_per_class)


def support_share(images: int, config: SupportConfig, at: Place) -> Tensor:
    """Which of the sampled images of a step, one class after another, a process has.   ->  (k,) ascending"""
    if not config.unique_classes_per_process:
        chosen = torch.arange(at.rank, images, at.size)
    else:
        mine = share(images // config.images_per_class, at)
        chosen = torch.arange(mine.start * config.images_per_class, mine.stop * config.images_per_class)
    if len(chosen) == 0:
        what = "classes" if config.unique_classes_per_process else "labelled images"
        raise ValueError(f"a support batch has too few {what} for {at.size} processes; start fewer of them")
    return chosen


def _draw(candidates: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Without replacement as far as it goes: every image comes up once before any comes up twice."""
    rounds = -(-count // len(candidates))
    order = torch.cat([torch.randperm(len(candidates), generator=random) for _ in range(rounds)])
    return candidates[order[:count]]
