"""The run against simpler classifiers, in rows and in words, also where it loses; its result in words."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from markupsafe import Markup

from ropaws.core.run_layout import FINETUNE_RESULTS, LINEAR_RESULTS
from ropaws.report.page import percent, section
from ropaws.report.run_files import MissingError, RunFiles, figure

ON_FEATURES = {
    "logistic": "logistic regression on the same features",
    "soft_nn": "soft nearest neighbors on the same features",
}
ON_EMBEDDING = {
    "knn": "k-NN on its embedding",
    "logistic": "logistic regression on its embedding",
    "sskde": "SSKDE on its embedding",
}
OWN = "this run"
SUPERVISED = "supervised baseline: the same network and steps, labeled images alone"
CLEAR = 2.0  # standard errors from which on a difference is taken for one


class Row(NamedTuple):
    """One classifier; what is not known is None."""

    name: str
    accuracy: float | None
    auroc: float | None = None
    error: float | None = None  # standard error of the accuracy
    low: float | None = None  # exact 90 % interval of the accuracy
    high: float | None = None

    @property
    def interval(self) -> str:
        return "" if self.low is None or self.high is None else f"{100 * self.low:.0f} to {self.high:.0%}"


class OnFeatures(NamedTuple):
    """The run beside logistic regression on the features of its backbone."""

    on: str  # "test" or "labels"
    images: int
    frozen: bool
    own: Row
    logistic: Row
    gain: float  # accuracy of the run minus that of logistic regression
    error: float  # standard error of the gain

    @property
    def is_clear(self) -> bool:
        return abs(self.gain) > CLEAR * self.error


def on_features(evaluation: Mapping[str, Any]) -> OnFeatures | None:
    """From evaluation.json; None where it has no such figures, or damaged ones."""
    found = evaluation.get("features")
    if not isinstance(found, dict) or found.get("on") not in ("test", "labels"):
        return None
    own, logistic = _row("this run", found.get("own")), _row(ON_FEATURES["logistic"], found.get("logistic"))
    numbers = [figure(found.get(name)) for name in ("images", "gain", "gain_error")]
    if None in (own.accuracy, own.error, logistic.accuracy, logistic.error, *numbers):
        return None
    images, gain, error = (number or 0.0 for number in numbers)
    return OnFeatures(found["on"], int(images), found.get("frozen") is True, own, logistic, gain, error)


def _row(name: str, found: object) -> Row:
    values = found if isinstance(found, dict) else {}
    return Row(name, *(figure(values.get(key)) for key in ("accuracy", "auroc", "error", "low", "high")))


def on_tests(evaluation: Mapping[str, Any]) -> list[Row]:
    """The run and the classifiers that `ropaws evaluate` compares it with, on test images; the run first."""
    own = figure(evaluation.get("accuracy"))
    if own is None:
        return []
    rows = [Row("this run", own, figure(evaluation.get("auroc")))]
    features, embedding = (_object(evaluation.get(name)) for name in ("features", "baselines"))
    if features.get("on") == "test":
        rows += [_row(words, features.get(name)) for name, words in ON_FEATURES.items()]
    rows += [Row(words, figure(embedding.get(name))) for name, words in ON_EMBEDDING.items()]
    return [row for row in rows if row.accuracy is not None]


def on_labels(evaluation: Mapping[str, Any]) -> list[Row]:
    """The same on labeled images that were held out, where there are no test images."""
    features = _object(evaluation.get("features"))
    if features.get("on") != "labels":
        return []
    names = {"own": OWN, **ON_FEATURES}
    return [
        row
        for row in (_row(words, features.get(name)) for name, words in names.items())
        if row.accuracy is not None
    ]


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def sentence(found: OnFeatures) -> str:
    """How logistic regression does beside the run, in plain words."""
    return _on_tests_sentence(found) if found.on == "test" else _on_labels_sentence(found)


def _on_tests_sentence(found: OnFeatures) -> str:
    name, points = "Logistic regression on the same features", f"{100 * abs(found.gain):.1f}"
    accuracy = f"{found.logistic.accuracy:.1%}"
    if not found.is_clear:
        told = f"{name} is level with this run: {accuracy} on the same images."
    elif found.gain > 0:
        told = f"{name} gets {accuracy}, {points} points less than this run."
    else:
        told = f"{name} does better: {accuracy}, {points} points more than this run."
    own, theirs = found.own.auroc, found.logistic.auroc
    if own is not None and theirs is not None:
        told += (
            f" At telling out-of-class images apart this run has an AUROC of {own:.1%}, logistic regression"
            f" {theirs:.1%}."
        )
    return told


def _on_labels_sentence(found: OnFeatures) -> str:
    own, theirs = (
        f"{row.accuracy:.0%}" + (f" ({row.interval})" if row.interval else "")
        for row in (found.own, found.logistic)
    )
    told = (
        f"Of {found.images:,} labeled images that were held out in turn, a fit like this run that has not"
        f" seen them classifies {own} correctly, logistic regression on the same features {theirs}."
    )
    if found.is_clear and found.gain < 0:
        return f"{told} So logistic regression does better."
    return told if found.is_clear else f"{told} With so few images that is no clear difference."


def comparison(files: RunFiles) -> Markup:
    """This run against plain classifiers, and against the supervised baseline."""
    evaluation = files.evaluation
    found = on_features(evaluation)
    tested = on_tests(evaluation)
    head, rows = _table_on_tests(files, tested) if tested else _table_on_labels(files)
    return section(
        "comparison",
        words=sentence(found) if found else "",
        head=head,
        rows=rows,
        dims=figure(_object(evaluation.get("features")).get("dims")),
        untrained=None if not tested or files.supervised is not None or files.is_supervised else files.run,
    )


Table = tuple[list[str], list[list[str]]]  # head and rows


def _table_on_labels(files: RunFiles) -> Table:
    rows = on_labels(files.evaluation)
    if not rows:
        raise MissingError(
            "there is nothing to compare on: the data has no test images, and no class has two labels, the"
            f" whole network was trained on all labels, or `ropaws evaluate {files.run}` has not been run"
            " with this version"
        )
    head = ["classifier", "accuracy on held-out labels, % (90 % interval)"]
    if rows[0].name != OWN:  # it cannot be fitted anew without some labels
        return head, [[row.name, f"{percent(row.accuracy)} ({row.interval})"] for row in rows]
    return [*head, "against this run"], [
        [row.name, f"{percent(row.accuracy)} ({row.interval})", _gain(row, rows[0])] for row in rows
    ]


def _table_on_tests(files: RunFiles, rows: list[Row]) -> Table:
    fixed = [row for row in files.evaluation.get("propagation", []) if row["iterations"] is None]
    more = [Row("this run, with label propagation among the test images", row["accuracy"]) for row in fixed]
    rows = [rows[0], *more, *rows[1:], *_further_runs(files)]
    has_auroc = any(row.auroc is not None for row in rows)
    head = ["classifier", "accuracy, %", "against this run", *(["AUROC, %"] if has_auroc else [])]
    return head, [
        [row.name, percent(row.accuracy), _gain(row, rows[0]), *([percent(row.auroc)] if has_auroc else [])]
        for row in rows
    ]


def _further_runs(files: RunFiles) -> list[Row]:
    """What was trained from this run, and the supervised baseline."""
    rows = []
    for name, words in (
        (FINETUNE_RESULTS, "this run, fine-tuned"),
        (LINEAR_RESULTS, "linear probe on its features"),
    ):
        try:
            results = files.read(name)
            rows.append(Row(words, results["accuracy"], results.get("auroc")))
        except (MissingError, KeyError):
            continue
    if files.supervised and "accuracy" in files.supervised:
        rows.append(Row(SUPERVISED, files.supervised["accuracy"], files.supervised.get("auroc")))
    return rows


def _gain(row: Row, own: Row) -> str:
    return "" if row is own else f"{100 * ((row.accuracy or 0) - (own.accuracy or 0)):+.1f}"


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
        rival = on_features(evaluation)
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
        found = on_features(files.evaluation)
    except MissingError:
        return ""
    return sentence(found) if found else ""


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
