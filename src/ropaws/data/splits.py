"""Which labels training may see."""

from typing import NamedTuple

import torch
from torch import Tensor

from ropaws.data.randomness import SPLIT, generator


class Labeled(NamedTuple):
    """The granted labels, and no others."""

    indices: Tensor  # (l,) of the training images
    labels: Tensor  # (l,) class


def draw_split(
    train_labels: Tensor, class_names: tuple[str, ...], *, labels_per_class: int | None, seed: int
) -> Labeled:
    """The same number of labels a class, at random from a seed; None for all that are known."""
    if not class_names:
        raise ValueError("no training image has a label; label at least one image of every class")
    random = generator(seed, SPLIT)
    chosen = []
    for label, name in enumerate(class_names):
        candidates = (train_labels == label).nonzero().squeeze(1)
        if len(candidates) == 0:
            raise ValueError(f"class {name!r} has no labelled image; label at least one, or drop the class")
        if labels_per_class is None:
            chosen.append(candidates)
            continue
        if len(candidates) < labels_per_class:
            raise ValueError(
                f"class {name!r} has {len(candidates)} labelled images, fewer than"
                f" data.labels_per_class={labels_per_class}; ask for at most {len(candidates)}"
            )
        chosen.append(candidates[torch.randperm(len(candidates), generator=random)[:labels_per_class]])
    indices = torch.cat(chosen)
    return Labeled(indices, train_labels[indices])
