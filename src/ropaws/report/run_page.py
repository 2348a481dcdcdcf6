"""`ropaws report`: one run folder as one page.

Each section reads a run's files and fills its part of templates/sections.html, or raises MissingError.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from ropaws.core.run_layout import ENVIRONMENT, REPORT
from ropaws.report import rivals
from ropaws.report.charts import class_color, error_chart, histogram, line_chart, reliability_diagram, scatter
from ropaws.report.page import fill, percent, section, write_page
from ropaws.report.rivals import no_better_than_chance, share_of, verdict
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


def doubling_sentence(found: Doubling) -> str:
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
        sentence=doubling_sentence(doubling) if doubling else "",
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


POINTS = 300  # of a training curve at most
CURVES = {
    "loss": ["loss", "consistency", "mean_entropy"],
    "mean weight of a sample (in-domain posterior)": ["weight"],
    "temperature of the prior": ["prior_temperature"],
    "learning rate": ["learning_rate"],
}
KINDS = {"in": "in-class", "out": "out-of-class"}
WORST = 40  # classes in the table of accuracies


def write_report(
    run: Path | str, out: Path | str | None = None, *, baseline: Path | str | None = None
) -> Path:
    """Write one self-contained page from a run folder alone.

    What is missing or damaged in the folder costs its section, and is listed at the end of the page.

    Args:
        run: The run folder.
        out: The page; by default RUN/report.html.
        baseline: A run of the supervised baseline to compare with; by default RUN/supervised, if it is there.

    Returns:
        The path of the page.
    """
    run = Path(run)
    if not run.is_dir():
        raise FileNotFoundError(f"no run folder at {run}; `ropaws train` makes one")
    files = RunFiles(run, None if baseline is None else Path(baseline))
    path = run / REPORT if out is None else Path(out)
    write_page(path, render(files))
    return path


def render(files: RunFiles) -> str:
    missing: dict[str, str] = {}
    found = {
        title: _guarded(title, content, files, missing)
        for title, content in {"verdict": verdict, "key figures": key_figures, **SECTIONS}.items()
    }
    return fill(
        "run.html",
        name=files.run.resolve().name,
        about=_about(files),
        verdict=found.pop("verdict"),
        key_figures=found.pop("key figures"),
        sections={title: content for title, content in found.items() if content},
        missing=missing,
    )


def _guarded(title: str, content: Callable[[RunFiles], str], files: RunFiles, missing: dict[str, str]) -> str:
    try:
        return content(files)
    except MissingError as reason:
        missing[title] = str(reason)
    except Exception as error:  # whatever a damaged file leads to: it costs this section and no other
        missing[title] = f"its part of the run folder is damaged ({type(error).__name__}: {error})"
    return ""


def _about(files: RunFiles) -> str:
    try:
        method, train = files.config["method"]["name"], files.config["train"]
        return f"{method}, {train['steps']:,} steps, batch {train['batch']}, seed {train['seed']}"
    except Exception:  # whatever a damaged file leads to
        return "a run of ropaws"


def key_figures(files: RunFiles) -> Markup:
    evaluation = files.evaluation
    pool, share, rival = evaluation.get("pool", {}), share_of(files), rivals.on_features(evaluation)
    on_tests = rival.logistic if rival and rival.on == "test" else rivals.Row("", None)
    cards = [
        (evaluation.get("accuracy"), "accuracy on in-class test images"),
        (on_tests.accuracy, "accuracy of logistic regression on the same features"),
        (evaluation.get("auroc"), "AUROC, in- against out-of-class"),
        (on_tests.auroc, "AUROC of logistic regression"),
        (evaluation.get("ece"), "calibration error (ECE)"),
        (evaluation.get("confidence_in"), "mean confidence in-class"),
        (evaluation.get("confidence_out"), "mean confidence out-of-class"),
        *_held_out_cards(files),
        (share.estimate if share else None, f"of the pool belongs to your classes ({share})"),
        (None if share else pool.get("out_of_class"), "of the pool looks out-of-class"),
        (pool.get("accuracy"), "pseudo-labels right on the pool"),
    ]
    shown = [card for card in cards if card[0] is not None]
    if not shown:
        raise MissingError("evaluation.json has no figures")
    return section("key_figures", cards=shown)


def _held_out_cards(files: RunFiles) -> list[tuple[float | None, str]]:
    """The labels, each judged by a fit that has not seen it; no figure of labels that were learned."""
    rival = rivals.on_features(files.evaluation)
    if rival is None or rival.on != "labels":
        return []
    return [
        (rival.own.accuracy, f"of held-out labels are classified correctly ({rival.own.interval})"),
        (
            rival.logistic.accuracy,
            f"of them by logistic regression on the same features ({rival.logistic.interval})",
        ),
    ]


def pool(files: RunFiles) -> Markup:
    pool = files.found("pool")
    rows = [[name, f"{count:,}"] for name, count in pool["classes"].items()]
    rows.append(["out-of-class", f"{round(pool['out_of_class'] * pool['seen']):,}"])
    chart = histogram(
        {"unlabeled images": pool["in_domain"]}, x_label="in-domain probability", threshold=pool["threshold"]
    )
    return section(
        "pool", pool=pool, share=share_of(files), rows=rows, chart=chart, frequencies=_frequencies(pool)
    )


def _frequencies(pool: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How frequent the classes are, the most frequent first; none where they are taken for equal."""
    found = [{"name": name, **shares} for name, shares in (pool.get("class_prior") or {}).items()]
    return sorted(found, key=lambda each: -each["estimate"])


def suggestions(files: RunFiles) -> Markup:
    found = files.found("suggestions")
    return section(
        "suggestions",
        run=shlex.quote(str(files.run)),
        images=bool(files.thumbnails),
        found=found,
        expected=_expected(found or []),
        thumbnail=files.thumbnail,
    )


def new_classes(files: RunFiles) -> Markup:
    found = files.found("new_classes")
    return section(
        "new_classes",
        run=shlex.quote(str(files.run)),
        images=bool(files.thumbnails),
        found=found,
        thumbnail=files.thumbnail,
    )


def write_groups_page(
    path: Path, name: str, groups: Sequence[Mapping[str, Any]], thumbnails: Mapping[int, str], *, images: int
) -> None:
    """The groups of likely new classes alone, as one self-contained page.

    thumbnails: data URIs by position; images: how many were looked at
    """
    content = section(
        "new_classes",
        run=None,
        images=True,
        found=groups,
        thumbnail=lambda key: thumbnails.get(int(key.split("/")[1])),
    )
    about = f"likely new classes among {images:,} images"
    write_page(path, fill("groups.html", name=name, about=about, content=content))


def _expected(found: Sequence[Mapping[str, Any]]) -> float | None:
    """How many of a list belong to a class; None of lists of 0.1.0, which held new classes, too."""
    likely = [figure(item.get("in_domain")) for item in found if item.get("kind") == "in-class"]
    known = [value for value in likely if value is not None]
    return sum(known) if len(known) == len(found) else None


def confidence(files: RunFiles) -> Markup:
    found, evaluation = files.found("histograms"), files.evaluation
    shown, inside = (
        {KINDS[kind]: values[name] for kind, values in found.items()} for name in ("confidence", "in_domain")
    )
    charts = [
        histogram(shown, x_label="confidence"),
        histogram(inside, x_label="in-domain probability", threshold=files.found("threshold")),
    ]
    measures = ("auroc", "fpr95", "aupr_in", "aupr_out") if "auroc" in evaluation else ()
    return section(
        "confidence", charts=charts, detection=[percent(evaluation.get(name)) for name in measures]
    )


def calibration(files: RunFiles) -> Markup:
    chart = reliability_diagram(files.found("reliability"))
    return section("calibration", ece=files.found("ece"), chart=chart)


def projection(files: RunFiles) -> Markup:
    """A map of the embedding; hovering or tapping a point shows its image."""
    found, names = files.gallery["projection"], files.class_names
    if found is None:
        raise MissingError("there are too few images for a t-SNE")
    labels = found["labels"]
    used = sorted(set(labels), key=lambda number: (number < 0, number))
    return section(
        "projection",
        of=found["of"],
        classes=[(n, names[n] if n >= 0 else "out-of-class", class_color(n)) for n in used],
        map=scatter(found["points"], labels, label="t-SNE of the embeddings"),
        tips={
            "thumbnails": [files.thumbnail(key) for key in found["keys"]],
            "lines": [_tip(found, names, i) for i in range(len(labels))],
        },
    )


def _tip(found: Mapping[str, Any], names: Sequence[str], i: int) -> list[str]:
    label = found["labels"][i]
    truth = names[label] if label >= 0 else "out-of-class"
    known = "is" if found["of"] == "test" else "looks"
    return [
        f"{known} {truth}",
        f"predicted {names[found['predicted'][i]]}, {found['confidence'][i]:.0%}",
        f"in-domain {found['in_domain'][i]:.0%}",
    ]


def propagation(files: RunFiles) -> Markup:
    measures = ("accuracy", "confidence_in")
    rows = [
        [_iterations(row), *(percent(row[name]) for name in measures), percent(row.get("confidence_out"))]
        for row in files.found("propagation")
    ]
    return section("propagation", rows=rows, snapshots=_over_training(files))


def _over_training(files: RunFiles) -> tuple[list[str], list[list[str]]] | None:
    """Head and rows: accuracy at the snapshots that the run has kept, by number of iterations."""
    kept = files.evaluation.get("over_training")
    if not kept:
        return None
    rows = [
        [
            f"{item['steps']:,}",
            *(percent(row["accuracy"]) for row in item["propagation"]),
            percent(item.get("auroc")),
        ]
        for item in kept
    ]
    return ["step", *map(_iterations, kept[0]["propagation"]), "AUROC"], rows


def _iterations(row: Mapping[str, Any]) -> str:
    count = row["iterations"]
    if count is None:
        return "∞"
    return "0 (soft-NN)" if count == 0 else str(count)


def confusion(files: RunFiles) -> Markup:
    names, matrix, accuracies = files.class_names, files.found("confusion"), files.found("per_class")
    ranked = sorted(accuracies.items(), key=lambda item: 2.0 if item[1] is None else item[1])
    return section(
        "confusion",
        names=names,
        matrix=list(zip(names, matrix, strict=True)),
        per_class=[[name, percent(value)] for name, value in ranked[:WORST]],
    )


def confident(files: RunFiles) -> Markup:
    return section("confident", found=files.gallery["confident"], thumbnail=files.thumbnail)


def neighbors(files: RunFiles) -> Markup:
    found = files.gallery["neighbors"]
    groups = {kind: [query for query in found if query["kind"] == kind] for kind in KINDS.values()}
    if not any(groups.values()):
        raise MissingError("there are no query images")
    return section("neighbors", groups=groups, thumbnail=files.thumbnail)


def outside(files: RunFiles) -> Markup:
    return section("outside", found=files.gallery["outside"], thumbnail=files.thumbnail)


def label_errors(files: RunFiles) -> Markup:
    chance = no_better_than_chance(files, files.evaluation.get("leave_one_out", 1.0))
    found = files.found("label_errors")
    check = files.evaluation.get("label_check", {})
    return section("label_errors", found=found, check=check, chance=chance, thumbnail=files.thumbnail)


def curves(files: RunFiles) -> Markup:
    series = {
        title: {name.replace("_", " "): _thinned(files.metrics, name) for name in names}
        for title, names in CURVES.items()
    }
    charts = [
        line_chart(lines, x_label="step", y_label=title)
        for title, lines in series.items()
        if any(lines.values())
    ]
    return section("curves", last=files.metrics[-1], charts=charts)


def _thinned(metrics: list[dict[str, float]], name: str) -> list[tuple[float, float]]:
    """Means of neighboring steps, so that a long run draws no more than a few hundred points."""
    rows = [(row["step"], row[name]) for row in metrics if isinstance(row.get(name), int | float)]
    size = -(-len(rows) // POINTS) or 1
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [
        (sum(step for step, _ in group) / len(group), sum(value for _, value in group) / len(group))
        for group in groups
    ]


def settings(files: RunFiles) -> Markup:
    return section("pairs", found=files.config)


def data(files: RunFiles) -> Markup:
    names, labels = files.class_names, files.data["labeled"]["labels"]
    found = {
        "classes": len(names),
        "labeled images": len(labels),
        "labels per class": dict(Counter(names[number] for number in labels)),
        "digest of the training images": files.data["digest"],
    }
    return section("pairs", found=found)


def environment(files: RunFiles) -> Markup:
    found = files.read(ENVIRONMENT)
    return section("environment", choices=found.pop("choices", []), found=found)


SECTIONS: dict[str, Callable[[RunFiles], Markup]] = {
    "Against simpler classifiers": rivals.comparison,
    "The unlabeled pool": pool,
    "Would more labels help?": learning_curve,
    "Label these next": suggestions,
    "Likely new classes": new_classes,
    "Confidence, in-class and out-of-class": confidence,
    "Calibration": calibration,
    "The embedding": projection,
    "Label propagation step by step": propagation,
    "Confusion matrix": confusion,
    "Most confident images per class": confident,
    "Nearest labeled images": neighbors,
    "Most out-of-class images": outside,
    "Suspected label errors": label_errors,
    "Training": curves,
    "Settings": settings,
    "Data": data,
    "Environment": environment,
}
