"""The data of a benchmark, and the settings that all methods share there."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropaws import recipes
from ropaws.classify import head
from ropaws.core.features import Features
from ropaws.core.labels import OUT_OF_CLASS
from ropaws.core.randomness import SupportConfig
from ropaws.embedding.backbones import LITE, PRETRAINED, ModelConfig
from ropaws.embedding.pretrained_views import cached_view
from ropaws.pool.augment import AugmentConfig
from ropaws.pool.corpus import Corpus, in_memory, resized
from ropaws.pool.sources import DataConfig, load_corpus
from ropaws.run.auto_config import HEAD_OPTIM
from ropaws.run.config import RunConfig, TrainConfig
from ropaws.run.outputs import pool_truth
from ropaws.training.optim import OptimConfig

Network = Literal["small", "pretrained"]
SUPPORT_ROWS = 80  # labeled views per step
FEATURE_SIZE = 96  # pixels per side of the views that the pretrained network sees


class Task(NamedTuple):
    """Images to learn from and to test on."""

    name: str
    corpus: Corpus  # its last test images are out-of-class ones of kinds that are not in the pool
    unseen: int  # how many
    in_class: Tensor  # (n,) bool, which training images belong to a known class


@dataclass(frozen=True)
class Data:
    """Where the images of a task come from."""

    source: str
    """A named dataset or mix, or an .npz file in which class -1 is out-of-class; such a file may hold
    `unseen_images` too."""
    unseen: tuple[Path, ...] = ()  # .npz files of images of no class, for testing alone
    root: Path = Path("data")  # folder of named datasets

    @property
    def name(self) -> str:
        return Path(self.source).stem if self.source.endswith(".npz") else self.source

    def config(self) -> DataConfig:
        return DataConfig(source=self.source, root=self.root)

    def load(self) -> Task:
        corpus = load_corpus(self.config())
        if isinstance(corpus.train_images, Features):
            raise ValueError(f"--data: {self.source} holds features, and methods are compared on images")
        truth = pool_truth(corpus, self.config())
        in_class = truth >= 0  # of a file of its own: what has no class is out-of-class
        extra = [_read_unseen(path, "images", corpus) for path in self.unseen]
        if self.source.endswith(".npz"):
            with np.load(self.source, allow_pickle=False) as arrays:
                has_own = "unseen_images" in arrays
            extra += [_read_unseen(Path(self.source), "unseen_images", corpus)] if has_own else []
        unseen = sum(len(images) for images in extra)
        tests = torch.cat([in_memory(corpus.test_images), *extra])
        labels = torch.cat([corpus.test_labels, torch.full((unseen,), OUT_OF_CLASS)])
        return Task(self.name, corpus._replace(test_images=tests, test_labels=labels), unseen, in_class)


def _read_unseen(path: Path, name: str, corpus: Corpus) -> Tensor:
    """Images of no class, of kinds that are not in the pool.   ->  (k, channels, h, w)"""
    if not path.is_file():
        raise FileNotFoundError(f"--unseen: no file at {path}; it is an .npz with `images` (n, h, w, 3)")
    with np.load(path, allow_pickle=False) as arrays:
        images = torch.from_numpy(arrays[name]) if name in arrays else torch.empty(0)
    if images.dtype != torch.uint8 or images.ndim not in (3, 4) or images.shape[3:] not in ((), (1,), (3,)):
        raise ValueError(f"--unseen: {path} has no array `{name}` (n, h, w, 3) or (n, h, w) of uint8")
    images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return resized(images, corpus.train_images.shape[1:])


def base_config(
    task: Task, data: DataConfig, network: Network, *, labels: int, steps: int, views: int = 4
) -> RunConfig:
    """What all methods share: network, views, labeled batch, batch, length; as RoPAWS has them.

    views: random ones of each image, on frozen features
    """
    classes, pool = len(task.corpus.class_names), len(task.corpus.train_images)
    if network == "pretrained":
        return RunConfig(
            model=ModelConfig(
                backbone=LITE,
                init=PRETRAINED,
                frozen=True,
                frozen_views=views,
                head="linear",
                projection_dims=head.DIMS,
            ),
            data=data,
            augment=cached_view(FEATURE_SIZE, "bicubic"),
            support=head.head_support([labels] * classes),
            optim=HEAD_OPTIM,
            train=TrainConfig(
                steps=steps, batch=min(head.BATCH, pool // 2), checkpoint_every=max(100, steps)
            ),
        )
    base, size = recipes.scratch(), min(task.corpus.train_images.shape[2:])
    augment = base.augment
    if size != augment.size:
        small = max(8, round(0.6 * size))
        augment = AugmentConfig(size=size, small_crops=2, small_size=small, solarize=0.0, equalize=0.0)
    images = min(labels, 8)
    support_views = max(1, round(SUPPORT_ROWS / (classes * images)))
    return replace(
        base,
        data=data,
        augment=augment,
        support=SupportConfig(images_per_class=images, views=support_views),
        train=replace(base.train, steps=steps, batch=min(base.train.batch, pool // 2)),
    )


def warmed(optim: OptimConfig, steps: int) -> OptimConfig:
    """Set a warm-up of a tenth of the steps, where there is one at all."""
    return replace(optim, warmup=steps // 10) if optim.warmup else optim
