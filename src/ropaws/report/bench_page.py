"""`ropaws bench`: all cells on one page."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ropaws.report.charts import class_color, line_chart
from ropaws.report.page import fill, plain, write_page

COLUMNS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "C+1 accuracy",
    "auroc": "AUROC",
    "auroc_unseen": "AUROC unseen",
    "ece": "ECE",
}
MORE_COLUMNS = {
    "fpr95": "FPR95",
    "fpr95_unseen": "FPR95 unseen",
    "confidence_in": "conf. in",
    "confidence_out": "conf. out",
    "selected": "selected",
    "purity": "purity",
}
LEVEL = 5e-4  # difference in accuracy below which methods are level
SHOWN = 8  # lines of a chart at most
CONTROL = re.compile(r"(.*?)-?(\d+)x")  # data that differ in the number of out-of-class images alone
FAILURE = ("method", "data", "labels", "seed", "reason", "file")  # what is told of one


def write_bench_page(path: Path, content: Mapping[str, Any]) -> None:
    """One self-contained page of results.json."""
    colors = _colors(content)
    text = fill(
        "bench.html",
        content=content,
        verdict=_verdict(content),
        settings=[_setting(content, setting, colors) for setting in content["tables"]],
        shown=SHOWN,
        controls=_controls(content, colors),
        published=_published(content.get("protocol")),
        given=_given(content),
        failures=[[failure[key] for key in FAILURE] for failure in content["failures"]],
    )
    write_page(path, text)


def _setting(
    content: Mapping[str, Any], setting: Mapping[str, Any], colors: Mapping[str, str]
) -> dict[str, Any]:
    """One kind of data with one number of labels, as the template shows it."""
    data, labels, reference = setting["data"], setting["labels"], content["reference"]
    failed = [f for f in content["failures"] if (f["data"], f["labels"]) == (data, labels)]
    return {
        "data": data,
        "labels": labels,
        "table": setting_table(setting, reference, failed),
        "charts": _charts(setting, reference, colors),
        "more": more_table(setting),
    }


def _colors(content: Mapping[str, Any]) -> dict[str, str]:
    """A color for every method, the same in all charts."""
    names = dict.fromkeys(row["method"] for setting in content["tables"] for row in ordered_rows(setting))
    return {name: class_color(number) for number, name in enumerate(names)}


def _verdict(content: Mapping[str, Any]) -> str:
    """How often each method is first, or level with the first; those with fewer draws do not count."""
    first: dict[str, int] = {}
    for setting in content["tables"]:
        draws = max(len(row["seeds"]) for row in setting["rows"])
        whole = [row for row in setting["rows"] if len(row["seeds"]) == draws]
        best = max(row["figures"]["accuracy"]["mean"] for row in whole)
        for row in whole:
            if row["figures"]["accuracy"]["mean"] >= best - LEVEL:
                first[row["method"]] = first.get(row["method"], 0) + 1
    if not first:
        return "No cell has ended yet."
    listed = ", ".join(f"{name} {count}" for name, count in sorted(first.items(), key=lambda item: -item[1]))
    return f"First in accuracy, or level with the first, in {len(content['tables'])} settings: {listed}."


def ordered_rows(setting: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Best accuracy first."""
    return sorted(setting["rows"], key=lambda row: -row["figures"]["accuracy"]["mean"])


def setting_table(
    setting: Mapping[str, Any], reference: str, failed: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[list[str]], int | None]:
    """Head, rows and the row of the reference: the main figures, best accuracy first.

    A method that failed is a row with its reason.
    """
    rows = ordered_rows(setting)
    keys = [key for key in COLUMNS if any(key in row["figures"] for row in rows)]
    compared = any("difference" in row for row in rows)
    head = ["method", "accuracy", *([f"minus {reference}"] if compared else []), "draws"]
    head += [*(COLUMNS[key] for key in keys[1:]), "images", "seconds"]
    own = next((number for number, row in enumerate(rows) if row["method"] == reference), None)
    cells = [
        [
            row["method"],
            shown(row["figures"]["accuracy"]),
            *([difference(row)] if compared else []),
            str(len(row["seeds"])),
            *(shown(row["figures"].get(key)) for key in keys[1:]),
            images_shown(row),
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    reasons = dict.fromkeys((f["method"], f["reason"]) for f in failed)
    cells += [[method, f"failed: {reason}", *["-"] * (len(head) - 2)] for method, reason in reasons]
    return head, cells, own


def more_table(setting: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: further figures of the same methods."""
    rows = ordered_rows(setting)
    keys = [key for key in MORE_COLUMNS if any(key in row["figures"] for row in rows)]
    cells = [[row["method"], *(shown(row["figures"].get(key)) for key in keys)] for row in rows]
    return ["method", *(MORE_COLUMNS[key] for key in keys)], cells


def images_shown(row: Mapping[str, Any]) -> str:
    """Views that the network was shown: 1,358 or 167k."""
    return f"{row['images'] / 1000:,.0f}k" if row["images"] >= 10_000 else f"{row['images']:,.0f}"


def shown(figure: Mapping[str, float | None] | None) -> str:
    """'61.2±3.4' in percent."""
    if figure is None or (mean := figure["mean"]) is None:
        return "-"
    spread = figure["deviation"]
    return f"{100 * mean:.1f}" if spread is None else f"{100 * mean:.1f}±{100 * spread:.1f}"


def difference(row: Mapping[str, Any]) -> str:
    """'-2.1 (-4.0 to -0.2)' in points."""
    found = row.get("difference", {}).get("accuracy")
    if not found:
        return "-"
    mean = f"{100 * found['mean']:+.1f}"
    return (
        mean if found["low"] is None else f"{mean} ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"
    )


def _charts(setting: Mapping[str, Any], reference: str, colors: Mapping[str, str]) -> list[Markup]:
    """Accuracy against images seen, selected share and purity over training, of the best methods."""
    curves = {
        row["method"]: [(x / 1000, 100 * y) for x, y in row["curve"]]
        for row in _best(setting, "curve", reference)
        if len(row["curve"]) > 1
    }
    charts = []
    if curves:
        charts.append(line_chart(curves, x_label="images seen, thousands", y_label="accuracy", colors=colors))
    for column, label in ((1, "selected share of the batch"), (2, "in-class share of the selected")):
        series = {
            row["method"]: [(100 * p[0], 100 * p[column]) for p in row["selection"] if p[column] is not None]
            for row in _best(setting, "selection", reference)
        }
        if any(series.values()):
            charts.append(
                line_chart(series, x_label="percent of training", y_label=label, y=(0, 100), colors=colors)
            )
    return charts


def _best(setting: Mapping[str, Any], what: str, reference: str) -> list[Mapping[str, Any]]:
    """The most accurate methods that have such points, and the reference among them."""
    having = [row for row in ordered_rows(setting) if row[what]]
    own = [row for row in having if row["method"] == reference]
    return having[:SHOWN] if not own or own[0] in having[:SHOWN] else [*having[: SHOWN - 1], *own]


def _controls(content: Mapping[str, Any], colors: Mapping[str, str]) -> list[dict[str, Any]]:
    """Accuracy against the number of out-of-class images, where the in-class part stays the same."""
    groups: dict[tuple[str, int], list[tuple[float, Mapping[str, Any]]]] = {}
    for setting in content["tables"]:
        facts = content["data"].get(setting["data"], {})
        if (match := CONTROL.fullmatch(setting["data"])) and facts.get("in_class"):
            times = facts["out_of_class"] / facts["in_class"]
            groups.setdefault((match[1], setting["labels"]), []).append((times, setting))
    return [
        {"name": name, "labels": labels, **_control(found, colors)}
        for (name, labels), found in groups.items()
        if len({times for times, _ in found}) > 1
    ]


def _control(found: Sequence[tuple[float, Mapping[str, Any]]], colors: Mapping[str, str]) -> dict[str, Any]:
    """A chart and a table of settings, each with its number of out-of-class images per in-class image."""
    places = sorted({times for times, _ in found})
    series: dict[str, list[tuple[float, float]]] = {}
    for times, setting in sorted(found, key=lambda item: item[0]):
        for row in setting["rows"]:
            series.setdefault(row["method"], []).append((times, 100 * row["figures"]["accuracy"]["mean"]))
    names = sorted(series, key=lambda name: -series[name][-1][1])
    chart = line_chart(
        {name: series[name] for name in names[:SHOWN]},
        x_label="out-of-class images per in-class image",
        y_label="accuracy",
        colors=colors,
    )
    head = ["method", *(f"{times:g}x" for times in places), "change"]
    rows = [[name, *_control_cells(dict(series[name]), places)] for name in names]
    return {"chart": chart, "head": head, "rows": rows}


def _control_cells(points: Mapping[float, float], places: Sequence[float]) -> list[str]:
    cells = [f"{points[place]:.1f}" if place in points else "-" for place in places]
    whole = places[0] in points and places[-1] in points
    return [*cells, f"{points[places[-1]] - points[places[0]]:+.1f}" if whole else "-"]


def _published(protocol: Mapping[str, Any] | None) -> list[list[object]]:
    return [
        [method, labels, value]
        for labels, figures in (protocol or {"published": {}})["published"].items()
        for method, value in figures.items()
    ]


def _given(content: Mapping[str, Any]) -> list[list[str]]:
    """What each method was given."""
    first: dict[str, Mapping[str, Any]] = {}
    for setting in content["tables"]:
        for row in setting["rows"]:
            first.setdefault(row["method"], row)
    return [[method, *_phase_cells(phase)] for method, row in first.items() for phase in row["given"]]


def _phase_cells(phase: Mapping[str, Any]) -> list[str]:
    optim = phase["optim"]
    return [
        phase["phase"],
        f"{phase['steps']:,} x {phase.get('batch', 0)}",
        f"{optim['name']}, rate {optim['peak']:g}" if optim else "",
        ", ".join(f"{role} {kind}" for role, kind in phase["views"].items()),
        plain(phase["method"]),
    ]
