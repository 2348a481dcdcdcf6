"""A classifier on feature rows: RoPAWS's head, or its closed form, averaged with logistic regression."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropaws import equations as eq
from ropaws.classify import head
from ropaws.classify.calibration import mixed_probs
from ropaws.classify.class_prior import (
    ClassPrior,
    ClassPriorChoice,
    bounded,
    starting_class_prior,
    with_interval,
)
from ropaws.classify.head import STEPS, LabeledRows, Points, train_head
from ropaws.classify.in_class_share import BORDER
from ropaws.classify.pool_prior import Judgment, PoolPrior, RowPass, as_they_are
from ropaws.classify.propagation import VOTERS, Kernel, Propagation, choose_voters
from ropaws.classify.soft_nn import (
    TYPICAL_PRIOR,
    LabeledEmbeddings,
    class_probabilities,
    default_threshold,
    fitted_prior_temperature,
    likeliest_temperature,
    nearest_same_class,
)
from ropaws.core.features import FeatureRows
from ropaws.core.records import Outputs, Share

FOLDS = 2  # of the labels, to see whether a head helps
MANY_LABELS = 2000
ERRORS = 2.0  # standard errors by which it has to be worse to be given up
TRIAL = 3  # a trial takes one of so many of the steps


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings:
    """Settings of an OpenSetClassifier; RoPAWSClassifier explains each."""

    head: bool = True
    prior: Literal["pool", "distance"] | None = "pool"
    temperature: float | None = None  # None: chosen by the labels
    prior_temperature: float | None = None  # of the prior by distance; None: chosen by the labels
    label_ratio: float = 5.0
    regression_share: float = 0.5
    voters: int | None = VOTERS
    steps: int = STEPS
    seed: int = 0
    class_prior: ClassPriorChoice = "auto"  # how frequent the classes are in the in-class part of the rows


class OpenSetClassifier:
    """Classes and in-domain probabilities of feature rows, from a few labels and all rows together.

    Class probabilities are the geometric mean of logistic regression on the labels and of RoPAWS: the soft
    nearest-neighbor classifier of a trained head, or labels propagated through the rows as they are.

    Args:
        points: Rows in their main directions, and views of them if there are any.
        labeled: The labeled ones.
        settings: What to fit.
        outside: (o, d) points that a person called out-of-class; they are not among the rows.
        after_step: As for train_head.
        prior: Of another classifier on the same rows and labels: it depends on nothing else.
    """

    def __init__(
        self,
        points: Points,
        labeled: LabeledRows,
        settings: ClassifierSettings,
        *,
        outside: Tensor | None = None,
        after_step: Callable[[int], object] = lambda _: None,
        prior: PoolPrior | None = None,
    ) -> None:
        self.settings = settings
        self.classes = labeled.classes
        self.prior = deepcopy(prior) if prior is not None else self._fitted_prior(points, labeled, outside)
        self.class_prior = self._found_class_prior(labeled, len(points))
        self.head = self._trained(points, labeled, after_step) if settings.head else None
        self.support = LabeledEmbeddings(
            self.embed(points.center[labeled.rows]), labeled.labels, labeled.classes
        )
        self.temperature = self._chosen_temperature()
        self.prior_temperature = self._chosen_prior_temperature()
        self.propagation = None if settings.head else self._propagated(points, labeled)
        self._calibrate(points, labeled)

    def _trained(
        self, points: Points, labeled: LabeledRows, after_step: Callable[[int], object]
    ) -> nn.Linear:
        settings = self.settings
        prior: Tensor | float | None = None
        if settings.prior == "pool" and self.prior is not None:
            prior = self.prior.prior
        elif settings.prior == "distance":
            prior = math.nan if settings.prior_temperature is None else settings.prior_temperature
        return train_head(
            points,
            labeled,
            replace(head.OBJECTIVE, label_ratio=settings.label_ratio),
            prior,
            typical_prior=TYPICAL_PRIOR,
            steps=settings.steps,
            seed=settings.seed,
            class_prior=None if self.class_prior is None else self.class_prior.estimate,
            follow=self.prior is not None and bool(self.prior.guessed),
            after_step=after_step,
        )

    def embed(self, points: Tensor) -> Tensor:
        """Unit rows in which neighbors are compared.   (n, d)  ->  (n, d)"""
        return F.normalize(points if self.head is None else self.head(points), dim=1)

    def predict(self, points: Tensor) -> Outputs:
        """The answer for rows; class probabilities are given in-class.   (n, d)  ->  Outputs of n rows"""
        embedding = self.embed(points)
        near = self._neighbor_probs(points, None)
        if self.prior is None or self.settings.prior != "pool":
            return Outputs(embedding, self._mixed(near, points), *self._by_distance(embedding))
        return self.prior.outputs(embedding, near, points, share=self.settings.regression_share)

    def classify(self, points: Tensor, learned: Tensor | None = None) -> Tensor:
        """Class probabilities, given in-class.   (n, d)  ->  (n, c)

        learned (n,): where these are rows that it was fitted to, their positions. The answers are the same
        up to the tolerance of the solution, and known already for those that vote.
        """
        return self._mixed(self._neighbor_probs(points, learned), points)

    def judge(self, points: Tensor) -> Judgment:
        """Whether rows belong to any class.   (n, d)  ->  (n,) each"""
        if self.prior is not None and self.settings.prior == "pool":
            found: Judgment = self.prior(points)
            return found
        return self._by_distance(self.embed(points))

    def _mixed(self, near: Tensor, points: Tensor) -> Tensor:
        if self.prior is None:
            return near
        share, temperature = self.settings.regression_share, self.prior.confidence_temperature
        return mixed_probs(near, self.prior.log_probs(points), share, temperature)

    def _by_distance(self, embedding: Tensor) -> Judgment:
        if self.prior_temperature is None:
            return Judgment(torch.ones(len(embedding)), torch.ones(len(embedding)))
        prior = eq.in_domain_prior(embedding, self.support.embeddings, temperature=self.prior_temperature)
        return Judgment(prior, prior)

    @property
    def threshold(self) -> float:
        """In-domain probability below which a row is out-of-class."""
        if self.settings.prior != "distance" or self.prior_temperature is None:
            return BORDER
        return default_threshold(
            nearest_same_class(self.support.embeddings, self.support.labels), self.prior_temperature
        )

    @property
    def share(self) -> Share | None:
        """Estimated share of the rows that belongs to the classes."""
        if self.prior is None or self.settings.prior != "pool":
            return None
        return self.prior.estimated_share()

    def _fitted_prior(self, points: Points, labeled: LabeledRows, outside: Tensor | None) -> PoolPrior | None:
        """What the points say on their own; None where neither the prior nor the classes ask for it."""
        if self.settings.prior != "pool" and self.settings.regression_share == 0:
            return None
        dims = points.center.shape[1]
        prior = PoolPrior(dims, labeled.classes, len(points))
        rows = RowPass(FeatureRows(points.center))
        prior.fit(
            rows,
            labeled.rows,
            labeled.labels,
            outside=outside,
            directions=as_they_are(dims),
            class_prior=self.settings.class_prior,
        )
        return prior

    def _found_class_prior(self, labeled: LabeledRows, rows: int) -> ClassPrior | None:
        """How frequent the classes are among so many rows; None: equally."""
        if self.prior is not None:
            return self.prior.estimated_class_prior()
        counts = torch.bincount(labeled.labels, minlength=labeled.classes)
        start = starting_class_prior(self.settings.class_prior, counts, unlabeled=rows > len(labeled.rows))
        return None if start is None else with_interval(bounded(start), len(labeled.labels))

    def _calibrate(self, points: Points, labeled: LabeledRows) -> None:
        if self.prior is None:
            return
        rows = self.prior.unlabeled_sample(labeled.rows)
        some = points.center[rows]
        near = self._neighbor_probs(some, rows)
        self.prior.calibrate(near, some, rows, share=self.settings.regression_share)

    def _chosen_temperature(self) -> float:
        """A head was trained with its own."""
        if self.settings.temperature is not None:
            return self.settings.temperature
        return head.OBJECTIVE.temperature if self.settings.head else likeliest_temperature(self.support)

    def _chosen_prior_temperature(self) -> float | None:
        if self.settings.prior != "distance":
            return None
        if self.settings.prior_temperature is not None:
            return self.settings.prior_temperature
        nearest = nearest_same_class(self.support.embeddings, self.support.labels)
        return fitted_prior_temperature(nearest, TYPICAL_PRIOR)

    def _propagated(self, points: Points, labeled: LabeledRows) -> Propagation | None:
        """The unlabeled rows that vote, solved to the fixed point; None where there are none."""
        unlabeled = torch.ones(len(points), dtype=torch.bool)
        unlabeled[labeled.rows] = False
        rows = unlabeled.nonzero().squeeze(1)
        if len(rows) == 0:
            return None
        chosen = rows[choose_voters(len(rows), self.settings.voters, seed=self.settings.seed)]
        prior = None
        if self.prior is not None and self.settings.prior == "pool":
            prior = self.prior.prior[chosen]
        kernel = Kernel(
            temperature=self.temperature,
            prior_temperature=self.prior_temperature,
            label_ratio=self.settings.label_ratio,
        )
        return Propagation.solve(self.embed(points.center[chosen]), chosen, self.support, kernel, prior)

    def _neighbor_probs(self, points: Tensor, learned: Tensor | None) -> Tensor:
        """Of the classes, given in-class: by the labels, or by the labels and the voters."""
        if self.propagation is None:
            near = class_probabilities(self.embed(points), self.support, temperature=self.temperature)
        elif learned is None:
            near = self.propagation.probs(self.embed(points))
        else:
            near = self.propagation.learned_probs(learned, lambda some: self.embed(points[some]))
        if self.class_prior is None or self.head is not None:  # a head was trained to meet the class prior
            return near
        return eq.with_class_prior(near, self.class_prior.estimate)


# Does the head help? The labels alone can tell, if there are two of each class.


class HeadTrial(NamedTuple):
    """Whether to train a head."""

    use: bool
    reason: str


def try_head(points: Points, labeled: LabeledRows, settings: ClassifierSettings) -> HeadTrial:
    """Compare the classifier with and without a head on labels held out; the held-out rows stay, unlabeled.

    The head stays unless it is worse by more than two standard errors. What it gains is most often smaller
    than what a few labels can show: to ask for a gain beyond the error would give it up nearly always, and a
    narrower limit gives it up by chance.
    """
    if labeled.classes < 2:
        return HeadTrial(False, "there is one class only")
    if len(labeled.rows) == len(points):
        return HeadTrial(False, "there is no unlabeled row to learn from")
    fewest = int(torch.bincount(labeled.labels, minlength=labeled.classes).min())
    if fewest < 2:
        return HeadTrial(True, "one label only in some class, so labels cannot be held out to compare")
    differences = []
    tried = 1 if len(labeled.rows) > MANY_LABELS else FOLDS  # so many that one part of them says enough
    for held in _folds(labeled.labels, min(FOLDS, fewest))[:tried]:
        kept = torch.ones(len(labeled.rows), dtype=torch.bool)
        kept[held] = False
        rest = LabeledRows(labeled.rows[kept], labeled.labels[kept], labeled.classes)
        short = replace(settings, head=True, steps=max(1, settings.steps // TRIAL))
        trained = OpenSetClassifier(points, rest, short)
        plain = OpenSetClassifier(points, rest, replace(short, head=False), prior=trained.prior)
        asked, truth = points.center[labeled.rows[held]], labeled.labels[held]
        right = [(model.classify(asked).argmax(dim=1) == truth).float() for model in (trained, plain)]
        differences.append(right[0] - right[1])
    difference = torch.cat(differences)
    gain, error = float(difference.mean()), float(difference.std() / len(difference) ** 0.5)
    use, where = gain >= -ERRORS * error, f"on {len(difference)} labels held out"
    if not difference.any():
        return HeadTrial(use, f"kept: it changes none of the answers {where}")
    figures = f"{100 * gain:+.1f} points (standard error {100 * error:.1f}) {where}"
    return HeadTrial(use, f"kept: {figures}" if use else f"given up, as it costs too much: {figures}")


def _folds(labels: Tensor, count: int) -> list[Tensor]:
    """Parts with as equal a share of every class as can be."""
    by_class = labels.argsort(stable=True)
    return [by_class[start::count] for start in range(count)]
