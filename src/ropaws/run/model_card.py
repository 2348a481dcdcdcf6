"""The model card of a run: what it was trained on, what was measured, and what was not.

README.md in the format of Hugging Face: YAML first, then Markdown. Every figure is one of the run folder; one
that was not measured is not there, and the card says so. No path of this machine is in it.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ropaws.core.files import write_text
from ropaws.core.run_layout import CARD
from ropaws.core.terminal import printable
from ropaws.insight.accuracy_estimate import binomial_interval
from ropaws.methods import method_name
from ropaws.pool.datasets.catalog import DATASETS, MIXES
from ropaws.report.page import fill
from ropaws.report.run_files import figure
from ropaws.run.export_model import ExportedFile, check_place, cost_sentence, verification_lines
from ropaws.run.results import Evaluation, read_evaluation
from ropaws.run.run import Run, open_run

MOST_CLASSES = 100  # that are listed
METRICS = {
    "accuracy": "accuracy on in-class test images",
    "ece": "expected calibration error, in-class test images",
    "auroc": "AUROC, in-class against out-of-class test images",
    "fpr95": "false positive rate at 95 % true positive rate",
}


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
    from ropaws import __version__

    evaluation, facts = read_evaluation(run.path), run.facts
    counts = torch.bincount(facts.split.labels, minlength=len(facts.class_names)).tolist()
    features = evaluation.get("features")
    return fill(
        "card.md",
        **_names(run),
        version=__version__,
        config=run.config,
        threshold=run.threshold,
        images=facts.images,
        labeled=len(facts.split.indices),
        labels=list(zip(facts.class_names, counts, strict=True)),
        most_classes=MOST_CLASSES,
        evaluated=bool(evaluation),
        found=functools.partial(_found, evaluation),
        metrics=METRICS,
        accuracy=_accuracy(evaluation),
        per_class=_per_class(run, evaluation),
        features_on=features.get("on") if isinstance(features, dict) else None,
        suspected=len(evaluation.get("label_errors", ())),
        exported="" if exported is None else exported.path.name,
        verified=[] if exported is None else _verified(exported),
        md=_markdown,
        yaml=_yaml,
    )


def _names(run: Run) -> dict[str, object]:
    """What the run and its parts are called; a dataset has a name if ropaws knows it."""
    data, init, own = run.config.data, run.config.model.init, bool(run.facts.feature_dims)
    dataset = data.source if data.labeled is None and data.source in (*DATASETS, *MIXES) else None
    weights = "random weights" if init is None else "a weight file"
    return {
        "name": run.path.resolve().name or "model",
        "method": method_name(run.method),
        "task": "tabular-classification" if own else "image-classification",
        "things": "feature vectors" if own else "images",
        "dataset": dataset,
        "source": dataset or ("own features" if own else "own images"),
        "start": "its published weights" if str(init) == "pretrained" else weights,
    }


def _found(evaluation: Evaluation, *names: str) -> float | None:
    """A figure of an evaluation, which may be damaged or lack it."""
    value: Any = evaluation
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return figure(value)


def _per_class(run: Run, evaluation: Evaluation) -> list[tuple[str, float]]:
    shares = ((name, _found(evaluation, "per_class", name)) for name in run.class_names[:MOST_CLASSES])
    return [(name, share) for name, share in shares if share is not None]


def _verified(file: ExportedFile) -> list[str]:
    """How the file differs from the run, as measured when it was written."""
    lines = verification_lines(file.metadata["verification"])
    if int8 := file.metadata.get("int8"):
        same = f"{int8['same_out_of_class']:.1%} stay in-class or out-of-class"
        lines.append(f"In int8 against float32: {cost_sentence(int8)}; {same}")
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


def _yaml(value: str) -> str:
    """A string of YAML: that of JSON, in plain ASCII."""
    return json.dumps(printable(value))


def _markdown(value: str) -> str:
    """The value in Markdown, without any meaning of its own."""
    return re.sub(r"([\\`*_{}\[\]()<>#|~!])", r"\\\1", printable(value))
