"""The result of a run in one or two sentences."""

import math
from typing import Any

from ropaws.report.run_files import MissingError, RunFiles, figure

TOLD_APART = 0.6  # AUROC below which a share of out-of-class images means little


def verdict(files: RunFiles) -> str:
    """Plain text: the accuracy, what the unlabeled images contributed, and what the pool looks like."""
    sentences = [_accuracy_sentence(files), _pool_sentence(files)]
    told = [sentence for sentence in sentences if sentence]
    return " ".join(told) or "This run has not been evaluated yet."


def _accuracy_sentence(files: RunFiles) -> str:
    try:
        evaluation = files.evaluation
    except MissingError:
        return ""
    accuracy = figure(evaluation.get("accuracy"))
    if accuracy is None:
        left_out = figure(evaluation.get("leave_one_out"))
        if left_out is None:
            return ""
        return (
            "There are no test images, so the accuracy is not known;"
            f" {left_out:.0%} of the labeled images are classified correctly by the others"
            f"{_worth(files, left_out)}."
        )
    alone = figure((files.supervised or {}).get("accuracy"))
    if alone is None or is_supervised(files):
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


def is_supervised(files: RunFiles) -> bool:
    return files.method_name == "supervised"


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


def _pool_sentence(files: RunFiles) -> str:
    try:
        pool = files.found("pool")
        share, truly = figure(pool["out_of_class"]), figure(pool.get("truly_out_of_class"))
        if share is None:
            return ""
        sentence = f"{share:.0%} of the pool looks out-of-class"
        sentence += f"; {truly:.0%} truly is." if truly is not None else "."
        auroc = figure(files.evaluation.get("auroc"))
        if auroc is not None and auroc < TOLD_APART:
            sentence += f" But the two are hardly separated (AUROC {auroc:.0%}), so this says little."
        return sentence
    except (MissingError, KeyError, TypeError, AttributeError):
        return ""
