"""The section that says whether more labels would help."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from markupsafe import Markup

from ropaws.report.charts import error_chart
from ropaws.report.page import section
from ropaws.report.run_files import MissingError, RunFiles, figure

NAMES = {"logistic": "logistic regression", "soft_nn": "soft nearest neighbors"}
TITLES = {"test": "On test images", "held_out": "On labeled images that were held out"}
CLEAR = 2.0  # standard errors from which on a difference is taken for one
VAGUE = 0.05  # a gain that is known no better than this could be large or nothing


class Doubling(NamedTuple):
    """What twice as many labels changed, at the end of a curve."""

    fewer: int
    more: int
    gain: float
    error: float
    frozen: bool  # the features have not seen the labels


def last_doubling(evaluation: Mapping[str, Any]) -> Doubling | None:
    """Of logistic regression, on test images where there are some; None where there is no curve."""
    found, features = evaluation.get("learning_curve"), evaluation.get("features")
    curves = found if isinstance(found, dict) else {}
    frozen = isinstance(features, dict) and features.get("frozen") is True
    for name in TITLES:
        try:
            curve = curves[name]
            series, sizes = curve["series"]["logistic"], curve["labels_per_class"]
            gain, error = figure(series["gain"]), figure(series["gain_error"])
            if gain is not None and error is not None:
                return Doubling(int(sizes[-2]), int(sizes[-1]), gain, error, frozen)
        except (KeyError, IndexError, TypeError, ValueError):
            continue
    return None


def sentence(found: Doubling) -> str:
    """Plain words, which end in what to expect of more labels."""
    verb = "lowered" if found.gain < 0 else "raised"
    told = (
        f"Going from {found.fewer} to {found.more} labels per class {verb} the accuracy by"
        f" {100 * abs(found.gain):.1f} points (standard error {100 * found.error:.1f})"
    )
    if found.gain > CLEAR * found.error:
        return f"{told}: more labels are likely to help further."
    if found.gain < -CLEAR * found.error:
        return f"{told}: look for label errors before labeling more."
    if max(0.0, found.gain) + CLEAR * found.error > VAGUE:  # it may well be a large gain
        return f"{told}: there are too few images to tell whether more labels help."
    if found.frozen:
        return f"{told}: more labels of this kind are unlikely to help much."
    # Features that were trained on all labels know the classes, however few of them are learned from.
    return (
        f"{told}: the backbone has learned from all labels already, so this does not say whether more help."
    )


def learning_curve(files: RunFiles) -> Markup:
    found, features = files.found("learning_curve"), files.evaluation.get("features")
    panels = [_panel(title, found[name]) for name, title in TITLES.items() if name in found]
    doubling = last_doubling(files.evaluation)
    return section(
        "learning_curve",
        least=None if panels else int(found["least"]),
        sentence=sentence(doubling) if doubling else "",
        trained=isinstance(features, dict) and features.get("frozen") is False,
        panels=panels,
    )


def _panel(title: str, curve: dict[str, Any]) -> dict[str, Any]:
    sizes = [int(size) for size in curve["labels_per_class"]]
    series = {
        NAMES[name]: [
            (size, 100 * float(value), 100 * float(error))
            for size, value, error in zip(sizes, found["accuracy"], found["error"], strict=True)
        ]
        for name, found in curve["series"].items()
        if name in NAMES
    }
    if not series:
        raise MissingError("evaluation.json names no classifier in its learning curve")
    return {
        "title": title,
        "chart": error_chart(series, x_label="labels per class", y_label="accuracy, %"),
        "head": ["labels per class", *series],
        "rows": [
            [f"{size:,}", *(f"{points[i][1]:.1f} ± {points[i][2]:.1f}" for points in series.values())]
            for i, size in enumerate(sizes)
        ],
        "images": int(curve["images"]),
        "draws": int(curve["draws"]),
    }
