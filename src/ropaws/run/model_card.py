"""The model card of a run: what it was trained on, what was measured, and what was not.

README.md in the format of Hugging Face: YAML first, then Markdown. Every figure is one of the run folder; one
that was not measured is not there, and the card says so. No path of this machine is in it.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ropaws.core.files import write_text
from ropaws.core.run_layout import CARD
from ropaws.core.terminal import printable
from ropaws.insight.accuracy_estimate import binomial_interval
from ropaws.methods import method_name
from ropaws.pool.datasets.catalog import DATASETS, MIXES
from ropaws.report.run_files import figure
from ropaws.run.export_model import ExportedFile, check_place, cost_sentence, verification_lines
from ropaws.run.results import Evaluation, read_evaluation
from ropaws.run.run import Run, open_run

MOST_CLASSES = 100  # that are listed
NOT_EVALUATED = "This run has not been evaluated: `ropaws evaluate` measures it where there are test images."


class Accuracy(NamedTuple):
    """Accuracy on in-class test images; the rest is None where their number is not known."""

    value: float
    images: int | None = None
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.images is None or self.interval is None:
            return f"{self.value:.1%}"
        low, high = self.interval
        return (
            f"{self.value:.1%} (95 % interval {100 * low:.1f} to {high:.1%}, {self.images:,} in-class test"
            " images)"
        )


def model_card(
    run: Path | str | Run,
    path: Path | str | None = None,
    *,
    overwrite: bool = False,
    exported: ExportedFile | None = None,
) -> Path:
    """Write the model card of a run: data, labels, accuracy, calibration, out-of-class images, limits.

    Args:
        run: A run folder.
        path: The file; by default README.md in the run folder.
        overwrite: Replace a file that is there.
        exported: The file that the card goes with, as `ropaws.export` returns it.

    Returns:
        The path of the card.

    Raises:
        FileExistsError: The file is there already.
    """
    opened = open_run(run)
    path = opened.path / CARD if path is None else Path(path)
    check_place(path, overwrite=overwrite)
    write_text(path, card_text(opened, exported), errors="backslashreplace")
    return path


def card_text(run: Run, exported: ExportedFile | None = None) -> str:
    """The card as text."""
    evaluation = read_evaluation(run.path)
    name = run.path.resolve().name or "model"
    parts = [
        _front_matter(run, evaluation, name),
        f"# {_plain(name)}",
        _summary(run),
        *_section("Data and labels", _data(run, evaluation)),
        *_section("Accuracy", _accuracy_lines(run, evaluation)),
        *_section("Calibration", _calibration(evaluation)),
        *_section("Out-of-class images", _out_of_class(run, evaluation)),
        *([] if exported is None else _section("Exported file", _exported(exported))),
        *_section("Limits", _limits(run, evaluation)),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "\n".join(lines)]


# The YAML part


def _front_matter(run: Run, evaluation: Evaluation, name: str) -> str:
    task = _task(run)
    tags = ["semi-supervised-learning", "open-set", "out-of-distribution-detection", method_name(run.method)]
    lines = [
        "---",
        "# license: yours to choose; that of the images and of the pretrained weights may limit the choice",
        "library_name: ropaws",
        f"pipeline_tag: {task}",
        "tags:",
        *(f"- {_text(tag)}" for tag in (task, *tags)),
    ]
    metrics = _metrics(evaluation)
    if metrics:
        lines += [
            "model-index:",
            f"- name: {_text(name)}",
            "  results:",
            "  - task:",
            f"      type: {task}",
            "    dataset:",
            f"      name: {_text(_source(run) + ', test images')}",
            f"      type: {_text(_dataset(run) or 'own-data')}",
            "    metrics:",
        ]
        for kind, words, value in metrics:
            lines += [f"    - type: {kind}", f"      name: {_text(words)}", f"      value: {value:.6g}"]
    return "\n".join([*lines, "---"])


def _metrics(evaluation: Evaluation) -> list[tuple[str, str, float]]:
    """Type, name and value of each figure that was measured on test images."""
    measured = _accuracy(evaluation)
    if measured is None:
        return []
    found: list[tuple[str, str, float | None]] = [
        ("accuracy", "accuracy on in-class test images", measured.value),
        ("ece", "expected calibration error, in-class test images", figure(evaluation.get("ece"))),
        ("auroc", "AUROC, in-class against out-of-class test images", figure(evaluation.get("auroc"))),
        ("fpr95", "false positive rate at 95 % true positive rate", figure(evaluation.get("fpr95"))),
    ]
    return [(kind, words, value) for kind, words, value in found if value is not None]


def _task(run: Run) -> str:
    return "tabular-classification" if run.facts.feature_dims else "image-classification"


# What the parts say


def _summary(run: Run) -> str:
    from ropaws import __version__

    things = "feature vectors" if run.facts.feature_dims else "images"
    return (
        f"Sorts {things} into {len(run.class_names)} classes, and says which belong to none of them. Trained"
        f" from a few labels and a pool of unlabeled {things} by the method {method_name(run.method)} of"
        f" ropaws {__version__}. `ropaws export` makes one file of it for onnxruntime or torch."
    )


def _data(run: Run, evaluation: Evaluation) -> list[str]:
    facts, model = run.facts, run.config.model
    counts = torch.bincount(facts.split.labels, minlength=len(facts.class_names)).tolist()
    unlabeled = f", {facts.images - len(facts.split.indices):,} without" if facts.images else ""
    start = "random weights" if model.init is None else _weights(str(model.init))
    lines = [
        f"- Source: {_source(run)}.",
        f"- {len(facts.split.indices):,} images with a label{unlabeled}.",
        f"- Backbone {_plain(model.backbone)}, from {start}{', frozen' if model.frozen else ''};"
        f" {run.config.train.steps:,} steps, seed {run.config.train.seed}.",
    ]
    pool = evaluation.get("pool") or {}
    share = pool.get("in_class_share") if isinstance(pool, dict) else None
    if isinstance(share, dict):
        estimate, low, high = (figure(share.get(key)) for key in ("estimate", "low", "high"))
        if estimate is not None and low is not None and high is not None:
            lines.append(
                f"- Estimated share of the pool that belongs to the classes: {estimate:.0%}"
                f" ({100 * low:.0f} to {high:.0%})."
            )
    if suspected := len(evaluation.get("label_errors", ())):
        lines.append(f"- {suspected} of the labels are suspected to be wrong, more than chance explains.")
    rows = [f"| {_plain(name)} | {count} |" for name, count in zip(facts.class_names, counts, strict=True)]
    more = [f"| and {len(rows) - MOST_CLASSES} more | |"] if len(rows) > MOST_CLASSES else []
    return [*lines, "", "| class | labels |", "|---|---:|", *rows[:MOST_CLASSES], *more]


def _accuracy_lines(run: Run, evaluation: Evaluation) -> list[str]:
    measured = _accuracy(evaluation)
    if measured is None:
        return [_not_measured(run, evaluation), *_on_labels(evaluation)]
    lines = [f"- On test images: {measured}."]
    features = evaluation.get("features") or {}
    rival = features.get("logistic") if features.get("on") == "test" else None
    if isinstance(rival, dict) and (value := figure(rival.get("accuracy"))) is not None:
        lines.append(f"- Logistic regression on the same features: {value:.1%}.")
    per_class = evaluation.get("per_class") or {}
    shares = {name: figure(per_class.get(name)) for name in run.class_names[:MOST_CLASSES]}
    rows = [f"| {_plain(name)} | {value:.1%} |" for name, value in shares.items() if value is not None]
    return lines + (["", "| class | accuracy |", "|---|---:|", *rows] if rows else [])


def _not_measured(run: Run, evaluation: Evaluation) -> str:
    if not evaluation:
        return f"Not measured. {NOT_EVALUATED}"
    return "Not measured: there are no test images with a class."


def _on_labels(evaluation: Evaluation) -> list[str]:
    """What held-out labels say, where nothing else does."""
    found = evaluation.get("features") or {}
    own = found.get("own")
    if found.get("on") == "labels" and isinstance(own, dict):
        value, low, high = (figure(own.get(name)) for name in ("accuracy", "low", "high"))
        if value is not None and low is not None and high is not None:
            return [
                "",
                f"Labeled images, each judged by a fit without it: {value:.1%} ({low:.0%} to {high:.0%}).",
            ]
    return []


def _calibration(evaluation: Evaluation) -> list[str]:
    ece = figure(evaluation.get("ece"))
    if ece is None:
        return ["Not measured. Probabilities are those of the classifier, and may be too sure."]
    lines = [f"- Expected calibration error on in-class test images: {ece:.1%}."]
    for key, words in (("confidence_in", "in-class"), ("confidence_out", "out-of-class")):
        if (value := figure(evaluation.get(key))) is not None:
            lines.append(f"- Mean confidence on {words} test images: {value:.1%}.")
    return lines


def _out_of_class(run: Run, evaluation: Evaluation) -> list[str]:
    lines = [f"- An in-domain probability below {run.threshold:.3g} means out-of-class."]
    auroc, fpr95 = (figure(evaluation.get(key)) for key in ("auroc", "fpr95"))
    if auroc is None:
        lines.append("- How well that works was not measured: there are no out-of-class test images.")
    else:
        rate = "" if fpr95 is None else f", false positive rate at 95 % true positive rate {fpr95:.1%}"
        lines.append(f"- On test images: AUROC {auroc:.1%}{rate}.")
    pool = evaluation.get("pool")
    outside = figure(pool.get("out_of_class")) if isinstance(pool, dict) else None
    if outside is not None:
        lines.append(f"- {outside:.0%} of the unlabeled images look out-of-class.")
    return lines


def _exported(file: ExportedFile) -> list[str]:
    """How the file differs from the run, as measured when it was written."""
    lines = verification_lines(file.metadata["verification"])
    if int8 := file.metadata.get("int8"):
        same = f"{int8['same_out_of_class']:.1%} stay in-class or out-of-class"
        lines.append(f"In int8 against float32: {cost_sentence(int8)}; {same}")
    return [f"Of {_plain(file.path.name)}:", "", *(f"- {line}." for line in lines)]


def _limits(run: Run, evaluation: Evaluation) -> list[str]:
    counts = torch.bincount(run.facts.split.labels, minlength=len(run.class_names))
    least, most = int(counts.min()), int(counts.max())
    lines = [
        f"- It knows what {most if least == most else f'{least} to {most}'} labels per class and its pool"
        " show; images of another origin, camera or time may be judged worse, and no figure here speaks of"
        " them.",
        "- It gives every image one class; an image that shows several has one of them at best.",
        "- Whether it treats groups of people alike was not measured.",
    ]
    if not run.facts.feature_dims:
        lines.append("- It sees the central square of an image, in"
                     f" {run.config.augment.size} x {run.config.augment.size} pixels.")  # fmt: skip
    measured = _accuracy(evaluation)
    if measured is None:
        lines.append("- Its accuracy is not known.")
    elif measured.images is not None:
        lines.append(
            f"- The accuracy was counted on {measured.images:,} images; the interval covers chance in their"
            " choice, not a difference between them and yours."
        )
    if figure(evaluation.get("auroc")) is None:
        lines.append("- How well it tells out-of-class images apart is not known.")
    return lines


def _accuracy(evaluation: Evaluation) -> Accuracy | None:
    value = figure(evaluation.get("accuracy"))
    if value is None or not 0 <= value <= 1:
        return None
    matrix: Any = evaluation.get("confusion")
    try:
        images = sum(int(count) for row in matrix for count in row)
    except (TypeError, ValueError, OverflowError):
        return Accuracy(value)
    if images < 1:
        return Accuracy(value)
    return Accuracy(value, images, binomial_interval(round(value * images), images))


# Names in YAML and Markdown


def _dataset(run: Run) -> str | None:
    """The name of a dataset that ropaws knows; None for images or features of a person's own."""
    data = run.config.data
    known = data.labeled is None and data.source in (*DATASETS, *MIXES)
    return str(data.source) if known else None


def _source(run: Run) -> str:
    return _dataset(run) or ("own features" if run.facts.feature_dims else "own images")


def _weights(init: str) -> str:
    return "its published weights" if init == "pretrained" else "a weight file"


def _text(value: str) -> str:
    """A string of YAML: that of JSON, in plain ASCII."""
    return json.dumps(printable(value))


def _plain(value: str) -> str:
    """The value in Markdown, without any meaning of its own."""
    return re.sub(r"([\\`*_{}\[\]()<>#|~!])", r"\\\1", printable(value))
