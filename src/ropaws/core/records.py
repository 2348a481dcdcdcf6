"""The named shapes of data that cross module borders.

Sizes: u unlabeled rows, s labeled rows, c classes, d dimensions, n any rows.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class Support(NamedTuple):
    """The labeled batch of a step. Labels and identities travel with the images."""

    images: Tensor  # (s, channels, size, size)
    labels: Tensor  # (s, c) one-hot; the columns are the classes of this batch
    identity: Tensor  # (s,) which labeled image a row shows; views of one image share it
    classes: Tensor  # (s,) class number of a row among all classes of the run


class Batch(NamedTuple):
    """What a method gets in one step."""

    step: int  # from 0
    steps: int  # of the whole run
    views: Mapping[str, Tensor]  # role -> (u, channels, size, size); row i of every view shows the same image
    pool_index: Tensor  # (u,) position of each row among the training images
    labeled: Support
    seed: int = 0  # of random draws in this step: another one in every step and for every seed of the run


class Embeddings(NamedTuple):
    """What the encoder says of one batch of images; rows have unit length."""

    h: Tensor  # (n, d) after the projection head: the target side, and evaluation
    z: Tensor  # (n, d) after the prediction head (h itself without one): the anchor side


class Outputs(NamedTuple):
    """What a trained method says of images. Evaluation, prediction and reports read nothing else."""

    embedding: Tensor  # (n, d) unit rows
    probs: Tensor  # (n, c) rows sum to 1
    in_domain: Tensor  # (n,) probability of belonging to any known class
    score: Tensor  # (n,) ranks images from out-of-class (low) to in-class, on any scale


MOST_WRONG = 1 / 3  # of the images of a kind, before a share is doubtful


class Share(NamedTuple):
    """An estimated share of the unlabeled pool, with a 90 % interval."""

    estimate: float
    low: float
    high: float

    @property
    def doubt(self) -> str:
        """What may be wrong with a flag that agrees with the estimate; empty where little can be.

        As many images are flagged as the estimate leaves out. If the share is at one end of the interval,
        flags of one kind are wrong that no error of the other kind makes up for.
        """
        lost = (self.high - self.estimate) / max(self.high, 1e-9)
        missed = (self.estimate - self.low) / max(1 - self.low, 1e-9)
        if max(lost, missed) <= MOST_WRONG:
            return ""
        found = f"up to {lost:.0%} of the in-class images may be flagged" if lost > MOST_WRONG else ""
        if missed > MOST_WRONG:
            others = f"up to {missed:.0%} of the out-of-class ones"
            found = f"{found}, and {others} not" if found else f"{others} may not be flagged"
        return f"The share is uncertain: {found}."


class Losses(NamedTuple):
    """The loss to minimize, and its parts to log. A total below zero is normal (me-max)."""

    total: Tensor  # ()
    parts: Mapping[str, Tensor]  # each (), detached
    selected: Tensor | None = None  # (u,) weight of each unlabeled row in the loss, 0 to 1; None: all alike
    mean: Tensor | None = None  # (c,) prediction of the rows on average, detached; None where nobody asks
