"""Batches of a step, augmented on the device. Images in memory never go through workers."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ropaws.batch import Support, Views
from ropaws.data.augment import AugmentConfig, Normalization, augment, random_views
from ropaws.data.randomness import SUPPORT_VIEWS, VIEWS, generator
from ropaws.data.samplers import SupportConfig, support_indices, unlabeled_indices


@dataclass(frozen=True)
class TrainingData:
    """What training sees: images, and the granted labels alone."""

    images: Tensor  # (n, channels, h, w) uint8, on the device: the unlabelled set
    labeled_indices: Tensor  # (l,) the labelled ones among them
    labels: Tensor  # (l,) their classes
    normalize: Normalization


@dataclass(frozen=True)
class BatchStream:
    """Views and support of any step, as a function of the seed and the step."""

    data: TrainingData
    augment: AugmentConfig
    support: SupportConfig
    batch: int
    seed: int
    with_views: bool = True  # False: a method that looks at labelled images alone gets empty views

    def views(self, step: int) -> Views:
        if not self.with_views:
            empty = self.data.images[:0].float()
            return Views(empty, empty)
        indices = unlabeled_indices(step, batch=self.batch, pool=len(self.data.images), seed=self.seed)
        images = self.data.images[indices.to(self.data.images.device)]
        return random_views(images, self.augment, self.data.normalize, generator(self.seed, VIEWS, step))

    def support_batch(self, step: int) -> Support:
        positions, labels = support_indices(step, self.data.labels, self.support, seed=self.seed)
        positions, labels = positions.repeat(self.support.views), labels.repeat(self.support.views)
        device = self.data.images.device
        images = self.data.images[self.data.labeled_indices[positions].to(device)]
        random = generator(self.seed, SUPPORT_VIEWS, step)
        return Support(
            augment(images, self.augment, self.data.normalize, random),
            F.one_hot(labels).to(device, torch.float32),
            positions.to(device),
        )

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, Views, Support]]:
        for step in range(start, stop):
            yield step, self.views(step), self.support_batch(step)
