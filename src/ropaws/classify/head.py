"""A linear head on feature rows, trained by RoPAWS: a loop on rows that knows no image.

The numbers won on data that is in no table: `python benchmarks/head_trials.py`, docs/features.md.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws.classify.objective import RoPAWSObjective
from ropaws.classify.soft_nn import (
    auto_prior_temperature,
    followed,
    gather_support,
    nearest_gap,
    update_running_gap,
)
from ropaws.core.optimizers import Adam
from ropaws.core.randomness import SUPPORT_VIEWS as SUPPORT_DRAWS
from ropaws.core.randomness import (
    VIEWS,
    SupportConfig,
    draw_views,
    generator,
    support_indices,
    unlabeled_indices,
)
from ropaws.core.records import Embeddings, Support

OBJECTIVE = RoPAWSObjective(sharpen_temperature=0.5, reweight_entropy=True)
RATE = 1e-3  # of Adam at the start; falls to 0 by half a cosine
STEPS = 300
BATCH = 256
DIMS = 256  # principal components that the head starts as
RANDOM_VIEWS = 1  # of each image beside the center view, computed once: benchmarks/view_worth.py
SUPPORT_VIEWS = 4
SUPPORT_IMAGES = 80  # labeled images per step to aim for
MOST_PER_CLASS = 16
MOST_CLASSES = 100  # per step
ROLES = 4  # views of a row in a step, where there are several: two that teach, and two that learn alone


class LabeledRows(NamedTuple):
    """The labeled ones among feature rows."""

    rows: Tensor  # (l,) positions
    labels: Tensor  # (l,) class of each
    classes: int


class Points(NamedTuple):
    """Feature rows in their main directions, around the mean."""

    center: Tensor  # (n, d)
    views: Tensor | None = None  # (n, v, d) of augmented versions of each

    def __len__(self) -> int:
        return len(self.center)


def head_batch(rows: int) -> int:
    """Unlabeled rows per step that suit a pool of so many."""
    return max(2, min(BATCH, rows // 2))


def head_support(counts: Sequence[int], *, views: int = SUPPORT_VIEWS) -> SupportConfig:
    """The labeled batch that suits these numbers of labels per class."""
    classes = min(len(counts), MOST_CLASSES)
    typical = sorted(counts)[len(counts) // 2]
    images = max(1, min(MOST_PER_CLASS, typical, SUPPORT_IMAGES // classes))
    return SupportConfig(
        classes=None if classes == len(counts) else classes, images_per_class=images, views=views
    )


class RowBatches:
    """The rows of any step, as a function of the seed and the step."""

    def __init__(self, points: Points, labeled: LabeledRows, seed: int) -> None:
        self.views = points.center[:, None] if points.views is None else points.views
        if points.views is not None and points.views.shape[1] == 1:  # two at least, for them to differ
            self.views = torch.cat([self.views, points.center[:, None].to(self.views)], dim=1)
        self.labeled, self.seed = labeled, seed
        several = points.views is not None
        self.roles = ROLES if several else 2
        counts = torch.bincount(labeled.labels, minlength=labeled.classes).tolist()
        self.support = head_support(counts, views=SUPPORT_VIEWS if several else 1)
        self.batch = head_batch(len(points))

    def unlabeled(self, step: int) -> tuple[Tensor, Tensor]:
        """Positions of the rows of a step, and views of them.   ->  (u,), (roles, u, d)"""
        rows = unlabeled_indices(step, batch=self.batch, pool=len(self.views), seed=self.seed)
        random = generator(self.seed, VIEWS, step)
        chosen = draw_views(self.views.shape[1], self.roles, len(rows), random)
        return rows, self.views[rows[:, None], chosen].float().transpose(0, 1)

    def supports(self, step: int) -> Support:
        """The labeled batch of a step; its images are rows."""
        positions, labels = support_indices(step, self.labeled.labels, self.support, seed=self.seed)
        random = generator(self.seed, SUPPORT_DRAWS, step)
        chosen = draw_views(self.views.shape[1], self.support.views, len(positions), random)
        rows = self.views[self.labeled.rows[positions][:, None], chosen].float()
        views = self.support.views
        return Support(
            torch.cat(rows.unbind(dim=1)),
            F.one_hot(labels.repeat(views), int(labels.max()) + 1).float(),
            positions.repeat(views),
            self.labeled.labels[positions].repeat(views),
        )


def train_head(
    points: Points,
    labeled: LabeledRows,
    objective: RoPAWSObjective,
    prior: Tensor | float | None,
    *,
    typical_prior: float,
    steps: int,
    seed: int,
    class_prior: Tensor | None = None,
    follow: bool = False,
    after_step: Callable[[int], object] = lambda _: None,
) -> nn.Linear:
    """Train a head that starts as the identity: its neighbors are those of the points themselves.

    Args:
        points: Rows that are learned from.
        labeled: The labeled ones.
        objective: What is minimized.
        prior: Of each row (n,), the temperature of the prior by distance, NaN for one that fits the supports
            of each step, or None for no prior.
        typical_prior: With NaN: the prior that a labeled row gets from the nearest one of its class.
        steps: Of Adam.
        seed: Of the batches.
        class_prior: Frequencies of the classes in the pool (c,); None for equal ones.
        follow: Whether these are a guess that follows the mean prediction.
        after_step: Called with the number of steps that are done; an error that it raises ends the training.
    """
    dims = points.center.shape[1]
    head: nn.Linear = nn.utils.skip_init(nn.Linear, dims, dims)  # no random number is drawn
    nn.init.eye_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = Adam(head.parameters(), lr=RATE)
    batches, gap = RowBatches(points, labeled, seed), torch.tensor(math.nan)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * step / steps)) / 2
        rows, views = batches.unlabeled(step)
        support = batches.supports(step)
        known, *looks = _embedded(head, [support.images, *views])
        supports = gather_support(known, support, objective.label_smoothing)
        inside = prior[rows] if isinstance(prior, Tensor) else prior
        if isinstance(inside, float) and math.isnan(inside):
            update_running_gap(gap, nearest_gap(supports.h, supports.labeled))
            inside = auto_prior_temperature(float(gap), typical_prior)
        losses = objective.losses(looks, supports, inside, class_prior)
        losses.total.backward()
        if follow and class_prior is not None and losses.mean is not None:
            class_prior = followed(class_prior, losses.mean, supports.labeled)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step(step + 1)
    return head.requires_grad_(False).eval()


def _embedded(head: nn.Module, parts: Sequence[Tensor]) -> list[Embeddings]:
    """All parts in one pass; h is the constant side of z."""
    unit = F.normalize(head(torch.cat(list(parts))), dim=1)
    return [Embeddings(part.detach(), part) for part in unit.split([len(part) for part in parts])]
