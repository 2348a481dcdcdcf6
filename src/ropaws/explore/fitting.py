"""One round: fit a classifier to the answers, and draw from it all that the page shows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropaws.classify import head
from ropaws.classify.classifier import ClassifierSettings, OpenSetClassifier
from ropaws.classify.head import LabeledRows, Points
from ropaws.classify.in_class_share import BORDER
from ropaws.core.features import sample_rows
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.core.records import Share
from ropaws.insight.accuracy_estimate import AccuracyEstimate, PoolAccuracy, pool_accuracy
from ropaws.insight.groups import NewClass, new_classes
from ropaws.insight.label_errors import SuspectedError, check_labels
from ropaws.insight.suggestions import Suggestion, suggest

BLOCK = 2048
SUGGESTED = 20  # images that a round suggests, or as many as there are classes
FITTED = 100_000  # rows a classifier is fitted to, all answers among them; then it answers for all rows
FOLDS = 5  # of the labels, to see how often the classifier is right
LEAST_TO_ESTIMATE = 10  # labels

Report = Callable[[str, float | None], object]  # what is done, and how far; an error that it raises ends it


class Answered(NamedTuple):
    """The answers as numbers."""

    labels: Tensor  # (n,) position among `classes`, UNLABELED or OUT_OF_CLASS
    classes: tuple[int, ...]  # ids of the classes that have labels
    audited: Tensor  # (n,) bool: drawn at random
    skipped: Tensor  # (n,) bool: not to be suggested again


@dataclass(frozen=True)
class Fitted:
    """What a classifier says of all images. Classes are columns here; `classes` has their ids."""

    classes: tuple[int, ...]
    probs: NDArray[np.float32]  # (n, c), given in-class
    in_class: NDArray[np.float32]  # (n,) probability of belonging to any class
    threshold: float = BORDER
    share: Share | None = None
    frequencies: dict[int, Share] = field(default_factory=dict)  # of classes in the in-class part, by id
    suggestions: Sequence[Suggestion] = ()
    groups: Sequence[NewClass] = ()
    suspects: dict[int, SuspectedError] = field(default_factory=dict)  # by image, the most suspect first
    accuracy: PoolAccuracy | None = None
    seconds: float = 0.0

    @property
    def predicted(self) -> NDArray[np.int16]:
        """Class id, OUT_OF_CLASS, or UNLABELED where nothing is known.   ->  (n,)"""
        if not self.classes:
            return np.full(len(self.in_class), UNLABELED, np.int16)
        ids = np.array(self.classes, np.int16)[self.probs.argmax(axis=1)]
        return np.where(self.in_class >= self.threshold, ids, np.int16(OUT_OF_CLASS))

    @property
    def confidence(self) -> NDArray[np.float32]:
        """Probability of the predicted class, among the classes; of being so, where that is out-of-class.

        ->  (n,)
        """
        if not self.classes:
            return np.zeros(len(self.in_class), np.float32)
        best = self.probs.max(axis=1)
        return np.where(self.in_class >= self.threshold, best, 1 - self.in_class).astype(np.float32)


def nothing_known(images: int) -> Fitted:
    """Before the first round."""
    return Fitted((), np.zeros((images, 0), np.float32), np.ones(images, np.float32))


def cold_start(points: Tensor, answered: Answered) -> Fitted:
    """Without a label of any class: what to label first.   points (n, d)"""
    return replace(nothing_known(len(points)), suggestions=_suggested(points, answered, None))


def with_suggestions(fitted: Fitted, points: Tensor, answered: Answered) -> Fitted:
    """What to label next by predictions of someone else's model."""
    return replace(fitted, suggestions=_suggested(points, answered, torch.from_numpy(fitted.in_class.copy())))


def _suggested(points: Tensor, answered: Answered, in_class: Tensor | None) -> list[Suggestion]:
    """Margins are those of logistic regression, as measured: the head is too sure of itself to show doubt."""
    classes = max(1, len(answered.classes))
    count, skipped = max(SUGGESTED, classes), answered.skipped
    wanted = count + int(skipped.sum())
    found = suggest(points, answered.labels, classes=classes, count=wanted, in_class=in_class)
    return [suggestion for suggestion in found if not skipped[suggestion.position]][:count]


def fit_round(points: Tensor, answered: Answered, report: Report) -> Fitted:
    """Fit to the answers, without the estimate of the accuracy: that takes several fits more.

    Args:
        points: Frozen features of all images, (n, d).
        answered: The answers.
        report: Told what is done; what it raises ends the round.
    """
    if not answered.classes:
        return cold_start(points, answered)
    began = time.perf_counter()
    classes = len(answered.classes)
    steps = head.STEPS
    model = _classifier(
        points, answered.labels, classes, steps, lambda done: report("refitting", 0.8 * done / steps)
    )
    report("choosing what to label next", 0.85)
    probs, in_class = _answers(model, points)
    in_class[answered.labels >= 0], in_class[answered.labels == OUT_OF_CLASS] = 1.0, 0.0
    suggestions = _suggested(points, answered, in_class)
    report("looking for new classes", 0.9)
    groups = new_classes(points, answered.labels, in_class, probs)
    report("looking for label errors", 0.95)
    return Fitted(
        answered.classes,
        probs.numpy().astype(np.float32),
        in_class.numpy().astype(np.float32),
        share=model.share,
        frequencies=_frequencies(model, answered.classes),
        suggestions=suggestions,
        groups=groups,
        suspects=find_suspects(points, answered),
        seconds=time.perf_counter() - began,
    )


def _frequencies(model: OpenSetClassifier, classes: Sequence[int]) -> dict[int, Share]:
    """How frequent each class is; nothing where they are taken for equally frequent."""
    if (prior := model.class_prior) is None:
        return {}
    ends = zip(*(part.tolist() for part in prior), strict=True)
    return {number: Share(*shares) for number, shares in zip(classes, ends, strict=True)}


def find_suspects(points: Tensor, answered: Answered) -> dict[int, SuspectedError]:
    rows = (answered.labels != UNLABELED).nonzero().squeeze(1)
    if len(rows) < 3:
        return {}
    found = check_labels(points[rows], answered.labels[rows], classes=len(answered.classes))
    return {int(rows[error.position]): error for error in found.errors}


def estimate(points: Tensor, answered: Answered, fitted: Fitted, report: Report) -> PoolAccuracy | None:
    """How accurate the answers are for images without a label; None where labels are too few.

    Every answer is predicted by a classifier that has not seen it: in folds, each fitted with a third of the
    steps. As for fit_round.
    """
    rows = (answered.labels != UNLABELED).nonzero().squeeze(1)
    classes = len(answered.classes)
    if len(rows) < LEAST_TO_ESTIMATE or classes == 0 or not bool((answered.labels == UNLABELED).any()):
        return None
    held_out = torch.zeros(len(rows), classes + 1)
    fold = _folds(answered.labels[rows])
    for number in range(FOLDS):
        out = fold == number
        hidden = answered.labels.clone()
        hidden[rows[out]] = UNLABELED
        report("estimating the accuracy", number / FOLDS)
        held_out[out] = _open_set_probs(points, hidden, classes, rows[out], report)
    rest = answered.labels == UNLABELED
    inside = torch.from_numpy(fitted.in_class)[rest, None]
    pool = torch.cat([torch.from_numpy(fitted.probs)[rest] * inside, 1 - inside], dim=1)
    return pool_accuracy(held_out, answered.labels[rows], answered.audited[rows], pool)


def _open_set_probs(points: Tensor, labels: Tensor, classes: int, rows: Tensor, report: Report) -> Tensor:
    """Of some rows, by the labels that are left; the last column is out-of-class.   ->  (k, c + 1)"""
    present = labels[labels >= 0].unique()
    probs = torch.zeros(len(rows), classes + 1)
    if len(present) == 0:
        probs[:, -1] = 1.0
        return probs
    numbers = torch.full((classes,), -1)
    numbers[present] = torch.arange(len(present))
    known = torch.where(labels >= 0, numbers[labels.clamp_min(0)], labels)

    def after_step(_: int) -> None:
        report("estimating the accuracy", None)

    model = _classifier(points, known, len(present), head.STEPS // 3, after_step)
    found, in_class = _answers(model, points[rows])
    probs[:, present] = found * in_class[:, None]
    probs[:, -1] = 1 - in_class
    return probs


def _classifier(
    points: Tensor, labels: Tensor, classes: int, steps: int, after_step: Callable[[int], object]
) -> OpenSetClassifier:
    """Fitted to the answers; out-of-class ones say what is in-class, and teach no class."""
    if len(labels) > FITTED:
        rows = _with_answers(labels)
        points, labels = points[rows], labels[rows]
    outside = labels == OUT_OF_CLASS
    known = labels[~outside]
    where = (known >= 0).nonzero().squeeze(1)
    settings = ClassifierSettings(head=classes > 1 and len(where) < len(known), steps=steps)
    return OpenSetClassifier(
        Points(points[~outside]),
        LabeledRows(where, known[where], classes),
        settings,
        outside=points[outside],
        after_step=after_step,
    )


def _with_answers(labels: Tensor) -> Tensor:
    """All rows that have an answer, and a sample of the others.   ->  (at most FITTED, or the answers)"""
    others = (labels == UNLABELED).nonzero().squeeze(1)
    answers = (labels != UNLABELED).nonzero().squeeze(1)
    return (
        torch.cat([answers, others[sample_rows(len(others), max(1, FITTED - len(answers)), 0)]]).sort().values
    )


def _answers(model: OpenSetClassifier, points: Tensor) -> tuple[Tensor, Tensor]:
    """Class probabilities, given in-class, and the probability of being in-class.   ->  (n, c), (n,)"""
    found = [model.predict(part) for part in points.split(BLOCK)]
    return torch.cat([part.probs for part in found]), torch.cat([part.in_domain for part in found])


def _folds(labels: Tensor) -> Tensor:
    """The fold in which each answer is hidden; each has as equal a share of every answer as can be."""
    fold = torch.empty_like(labels)
    random = torch.Generator().manual_seed(0)
    start = 0  # each answer begins where the one before has ended: folds are alike in size, too
    for label in labels.unique().tolist():
        mine = (labels == label).nonzero().squeeze(1)
        fold[mine[torch.randperm(len(mine), generator=random)]] = (torch.arange(len(mine)) + start) % FOLDS
        start += len(mine)
    return fold


def estimate_facts(accuracy: PoolAccuracy | None) -> dict[str, Any] | None:
    """For the page; None where nothing can be said."""
    if accuracy is None or (accuracy.in_class is None and accuracy.overall is None):
        return None

    def ends(found: AccuracyEstimate | None, name: str) -> dict[str, float | None]:
        if found is None:
            return {name: None, f"{name}_low": None, f"{name}_high": None}
        return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}

    inside = ends(accuracy.in_class, "accuracy")
    shown = accuracy.in_class or accuracy.overall
    assert shown is not None
    return {
        "accuracy": inside["accuracy"],
        "low": inside["accuracy_low"],
        "high": inside["accuracy_high"],
        "labels": shown.labels,
        "kind": shown.kind,
        **ends(accuracy.overall, "overall"),
        "overall_labels": None if accuracy.overall is None else accuracy.overall.labels,
        "overall_kind": None if accuracy.overall is None else accuracy.overall.kind,
    }
