"""What a run comes to, in a sentence."""

import math

from ropaws.report.run_files import MissingError, RunFiles


def verdict(files: RunFiles) -> str:
    """Plain text: accuracy and what the unlabelled images brought, and what the pile looks like."""
    sentences = [_accuracy_sentence(files), _pile_sentence(files)]
    told = [sentence for sentence in sentences if sentence]
    return " ".join(told) or "This run has not been evaluated yet."


def _accuracy_sentence(files: RunFiles) -> str:
    try:
        evaluation = files.evaluation
    except MissingError:
        return ""
    accuracy = evaluation.get("accuracy")
    if accuracy is None:
        left_out = evaluation.get("leave_one_out")
        if left_out is None:
            return ""
        return (
            "There are no test images, so the accuracy is not known;"
            f" {left_out:.0%} of the labelled images get their label from the others."
        )
    alone = (files.supervised or {}).get("accuracy")
    if alone is None or is_supervised(files):
        return f"The accuracy on unseen test images is {accuracy:.1%}."
    change = accuracy - alone
    if abs(change) <= _standard_error(accuracy, alone, evaluation):
        both = f"{alone:.1%} from the labels alone, {accuracy:.1%} with it"
        return f"Unlabelled data hardly changed the accuracy: {both}."
    verb = "raised" if change > 0 else "lowered"
    return f"Unlabelled data {verb} the accuracy from {alone:.1%} to {accuracy:.1%}."


def is_supervised(files: RunFiles) -> bool:
    try:
        return bool(files.config["method"]["name"] == "supervised")
    except (MissingError, KeyError, TypeError):
        return False


def _standard_error(first: float, second: float, evaluation: dict[str, object]) -> float:
    """Of the difference of two accuracies on as many test images as were counted."""
    matrix = evaluation.get("confusion")
    images = sum(map(sum, matrix)) if isinstance(matrix, list) else 0
    return math.sqrt((first * (1 - first) + second * (1 - second)) / images) if images else 0.0


def _pile_sentence(files: RunFiles) -> str:
    try:
        pool = files.found("pool")
        truly = pool.get("truly_out_of_class")
        sentence = f"{pool['out_of_class']:.0%} of the pile looks out-of-class"
        return f"{sentence}; {truly:.0%} truly is." if truly is not None else f"{sentence}."
    except (MissingError, KeyError, TypeError, AttributeError):
        return ""
