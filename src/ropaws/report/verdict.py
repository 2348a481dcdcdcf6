"""The result of a run in one or two sentences."""

import math
from typing import Any, NamedTuple

from ropaws.report import rivals
from ropaws.report.run_files import MissingError, RunFiles, figure

TOLD_APART = 0.6  # AUROC below which a share of out-of-class images means little


class Share(NamedTuple):
    """A share of the pool and the range in which it likely lies."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.low:.0f} to {self.high:.0%}"


def verdict(files: RunFiles) -> str:
    """Plain text: accuracy, what the unlabeled images contributed, logistic regression, the pool."""
    sentences = [_accuracy_sentence(files), _rival_sentence(files), _pool_sentence(files)]
    told = [sentence for sentence in sentences if sentence]
    return " ".join(told) or "This run has not been evaluated yet."


def _accuracy_sentence(files: RunFiles) -> str:
    try:
        evaluation = files.evaluation
    except MissingError:
        return ""
    accuracy = figure(evaluation.get("accuracy"))
    if accuracy is None:
        rival = rivals.on_features(evaluation)
        if rival is not None and rival.on == "labels":
            worth = _worth(files, rival.own.accuracy or 0.0)
            return f"There are no test images, so the accuracy is not known{worth}."
        left_out = figure(evaluation.get("leave_one_out"))
        if left_out is None:
            return ""
        return f"There are no test images, so the accuracy is not known{_worth(files, left_out)}."
    alone = figure((files.supervised or {}).get("accuracy"))
    if alone is None or files.is_supervised:
        return f"The accuracy on unseen test images is {accuracy:.1%}."
    change = accuracy - alone
    if abs(change) <= _standard_error(accuracy, alone, evaluation):
        both = f"{alone:.1%} for the supervised baseline, {accuracy:.1%} with unlabeled data"
        return f"The unlabeled data made no significant difference: {both}{_tested(evaluation)}."
    verb = "raised" if change > 0 else "lowered"
    return f"The unlabeled data {verb} the accuracy from {alone:.1%} to {accuracy:.1%}."


def no_better_than_chance(files: RunFiles, left_out: float) -> bool:
    """Do the labels predict one another no better than guessing does?"""
    try:
        return left_out <= 1 / len(files.class_names)
    except (MissingError, KeyError, TypeError, ZeroDivisionError):
        return False


def _worth(files: RunFiles, left_out: float) -> str:
    return ", no better than guessing: train longer" if no_better_than_chance(files, left_out) else ""


def _test_images(evaluation: dict[str, Any]) -> int:
    """In-class test images that were counted; 0 if that is not known."""
    matrix = evaluation.get("confusion")
    try:
        counted = figure(sum(map(sum, matrix))) if isinstance(matrix, list) else 0
    except (TypeError, ValueError):
        return 0
    return max(0, int(counted or 0))


def _tested(evaluation: dict[str, Any]) -> str:
    images = _test_images(evaluation)
    return f" ({images:,} test images)" if images else ""


def _standard_error(first: float, second: float, evaluation: dict[str, Any]) -> float:
    """Of the difference of two accuracies on as many test images as were counted."""
    images = _test_images(evaluation)
    variance = first * (1 - first) + second * (1 - second)
    return math.sqrt(max(0.0, variance) / images) if images else 0.0


def _rival_sentence(files: RunFiles) -> str:
    try:
        found = rivals.on_features(files.evaluation)
    except MissingError:
        return ""
    return rivals.sentence(found) if found else ""


def share_of(files: RunFiles) -> Share | None:
    """The estimated share of the pool that belongs to the classes; None where there is no estimate."""
    try:
        found = files.found("pool")["in_class_share"]
        low, estimate, high = (figure(found[name]) for name in ("low", "estimate", "high"))
    except (MissingError, KeyError, TypeError):
        return None
    if low is None or estimate is None or high is None:
        return None
    return Share(estimate, low, high)


def _pool_sentence(files: RunFiles) -> str:
    try:
        pool = files.found("pool")
        outside, truly = figure(pool["out_of_class"]), figure(pool.get("truly_out_of_class"))
        share = share_of(files)
        if share is not None:
            sentence = f"About {share.estimate:.0%} ({share}) of the pool belongs to your classes"
            sentence += f"; {1 - truly:.0%} truly does." if truly is not None else "."
            if truly is None and isinstance(doubt := pool.get("share_doubt"), str) and doubt:
                sentence += f" {doubt}"
        elif outside is not None:
            sentence = f"{outside:.0%} of the pool looks out-of-class"
            sentence += f"; {truly:.0%} truly is." if truly is not None else "."
        else:
            return ""
        return sentence + _separation(files, pool)
    except (MissingError, KeyError, TypeError, AttributeError):
        return ""


def _separation(files: RunFiles, pool: dict[str, Any]) -> str:
    """A warning where the in-domain probability, which the share comes from, does not tell the two apart.

    The AUROC of the run is that of its score, which need not be this probability.
    """
    auroc = figure(pool.get("in_domain_auroc"))
    if auroc is None:
        auroc = figure(files.evaluation.get("in_domain_auroc"))
    if auroc is None or auroc >= TOLD_APART:
        return ""
    return f" But the two are hardly separated (AUROC {auroc:.0%}), so this says little."
