"""`ropaws bench`: all cells on one page."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropaws.report.charts import class_color, line_chart
from ropaws.report.page import esc, page, plain, table, write_page

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
EXPLANATION = """<p class="dim">Percent on unseen test images, mean and standard deviation over draws of
labels. Accuracy counts in-class images; C+1 accuracy is the mean over the known classes and out-of-class
images as one more class; AUROC and FPR95 say how well each method's own score tells in-class from
out-of-class images, of the kinds in the pool and of kinds that were never in it (unseen); ECE is the
calibration error in-class; selected is the share of the unlabeled batch that is learned from in the last
tenth of training, purity the share of that which is in-class. Images are views that the network was shown in
training. The difference is accuracy minus that of {reference} on the same draws, in points, with its 95 %
interval.</p>"""


def write_bench_page(path: Path, content: Mapping[str, Any]) -> None:
    """One self-contained page of results.json."""
    reference, colors = content["reference"], _colors(content)
    body = [
        "<h1>Methods on equal terms</h1>",
        f'<p class="verdict">{esc(_verdict(content))}</p>',
        f"<p>{esc(content['fairness'])} {esc(_budget(content))}</p>",
        EXPLANATION.format(reference=esc(reference)),
    ]
    for setting in content["tables"]:
        failed = [f for f in content["failures"] if (f["data"], f["labels"]) == _key(setting)]
        body += [
            f"<h2>{esc(setting['data'])}, {esc(setting['labels'])} labels per class</h2>",
            f"<p>{esc(_data(content['data'].get(setting['data'], {})))}</p>",
            setting_table(setting, reference, failed),
            _charts(setting, reference, colors),
            f"<details><summary>More figures</summary>{more_table(setting)}</details>",
        ]
    body += [_control(content, colors), _published(content), _given(content), _failures(content)]
    write_page(path, page("Benchmark - ropaws", "\n".join(body)))


def _key(setting: Mapping[str, Any]) -> tuple[str, int]:
    return setting["data"], setting["labels"]


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


def _budget(content: Mapping[str, Any]) -> str:
    budget = content["budget"]
    if content["equal"] == "time":
        return f"Here: {budget['seconds']:g} seconds of training each. Network: {content['network']}."
    return (
        f"Here: as many images as {content['reference']} sees in {budget['steps']:,} steps."
        f" Network: {content['network']}."
    )


def _data(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    return (
        f"{facts['classes']} classes; pool of {facts['in_class']:,} in-class and {facts['out_of_class']:,}"
        f" out-of-class images; tests: {facts['tests']:,} in-class, {facts['out_tests']:,} out-of-class,"
        f" {facts['unseen_tests']:,} of unseen kinds."
    )


def ordered_rows(setting: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Best accuracy first."""
    return sorted(setting["rows"], key=lambda row: -row["figures"]["accuracy"]["mean"])


def setting_table(
    setting: Mapping[str, Any], reference: str, failed: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The main figures, best accuracy first; a method that failed is a row with its reason."""
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
    reasons = {(f["method"], f["reason"]): f for f in failed}
    cells += [[method, f"failed: {reason}", *["-"] * (len(head) - 2)] for method, reason in reasons]
    return f'<div class="figures">{table(head, cells, own=own)}</div>'


def more_table(setting: Mapping[str, Any]) -> str:
    """Further figures of the same rows."""
    rows = ordered_rows(setting)
    keys = [key for key in MORE_COLUMNS if any(key in row["figures"] for row in rows)]
    cells = [[row["method"], *(shown(row["figures"].get(key)) for key in keys)] for row in rows]
    return table(["method", *(MORE_COLUMNS[key] for key in keys)], cells)


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


def _charts(setting: Mapping[str, Any], reference: str, colors: Mapping[str, str]) -> str:
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
    if not charts:
        return ""
    note = f'<p class="dim">Charts show the {SHOWN} most accurate methods that have a curve.</p>'
    return f'<div class="columns">{"".join(f"<figure>{chart}</figure>" for chart in charts)}</div>{note}'


def _best(setting: Mapping[str, Any], what: str, reference: str) -> list[Mapping[str, Any]]:
    """The most accurate methods that have such points, and the reference among them."""
    having = [row for row in ordered_rows(setting) if row[what]]
    own = [row for row in having if row["method"] == reference]
    return having[:SHOWN] if not own or own[0] in having[:SHOWN] else [*having[: SHOWN - 1], *own]


def _control(content: Mapping[str, Any], colors: Mapping[str, str]) -> str:
    """Accuracy against the number of out-of-class images, where the in-class part stays the same."""
    parts = []
    groups: dict[tuple[str, int], list[tuple[float, Mapping[str, Any]]]] = {}
    for setting in content["tables"]:
        facts = content["data"].get(setting["data"], {})
        if (match := CONTROL.fullmatch(setting["data"])) and facts.get("in_class"):
            times = facts["out_of_class"] / facts["in_class"]
            groups.setdefault((match[1], setting["labels"]), []).append((times, setting))
    for (name, labels), found in groups.items():
        places = sorted({times for times, _ in found})
        if len(places) < 2:
            continue
        series: dict[str, list[tuple[float, float]]] = {}
        for times, setting in sorted(found, key=lambda item: item[0]):
            for row in setting["rows"]:
                point = (times, 100 * row["figures"]["accuracy"]["mean"])
                series.setdefault(row["method"], []).append(point)
        names = sorted(series, key=lambda name: -series[name][-1][1])
        rows = [[name, *_control_cells(dict(series[name]), places)] for name in names]
        chart = line_chart(
            {name: series[name] for name in names[:SHOWN]},
            x_label="out-of-class images per in-class image",
            y_label="accuracy",
            colors=colors,
        )
        head = ["method", *(f"{times:g}x" for times in places), "change"]
        parts.append(
            f"<h2>More out-of-class images: {esc(name)}, {esc(labels)} labels per class</h2>"
            f"<p>The in-class part of the pool stays the same.</p><figure>{chart}</figure>{table(head, rows)}"
        )
    return "".join(parts)


def _control_cells(points: Mapping[float, float], places: Sequence[float]) -> list[str]:
    cells = [f"{points[place]:.1f}" if place in points else "-" for place in places]
    whole = places[0] in points and places[-1] in points
    return [*cells, f"{points[places[-1]] - points[places[0]]:+.1f}" if whole else "-"]


def _failures(content: Mapping[str, Any]) -> str:
    if not content["failures"]:
        return ""
    head = ["method", "data", "labels", "seed", "reason", "more in"]
    keys = ("method", "data", "labels", "seed", "reason", "file")
    rows = [[failure[key] for key in keys] for failure in content["failures"]]
    return f'<div class="missing"><h2>Failed</h2>{table(head, rows)}</div>'


def _published(content: Mapping[str, Any]) -> str:
    protocol = content.get("protocol")
    if not protocol or not protocol["published"]:
        return ""
    rows = [
        [method, labels, value]
        for labels, figures in protocol["published"].items()
        for method, value in figures.items()
    ]
    return (
        f"<h2>Published accuracy, {esc(protocol['name'])}</h2>{table(['method', 'labels', 'percent'], rows)}"
    )


def _given(content: Mapping[str, Any]) -> str:
    """What each method was given."""
    rows = []
    seen = set()
    for setting in content["tables"]:
        for row in setting["rows"]:
            if row["method"] in seen:
                continue
            seen.add(row["method"])
            for phase in row["given"]:
                optim = phase["optim"]
                rate = f"{optim['name']}, rate {optim['peak']:g}" if optim else ""
                views = ", ".join(f"{role} {kind}" for role, kind in phase["views"].items())
                settings = plain(phase["method"])
                length = f"{phase['steps']:,} x {phase.get('batch', 0)}"
                rows.append([row["method"], phase["phase"], length, rate, views, settings])
    head = ["method", "phase", "steps x batch", "optimizer", "views", "settings"]
    return f"<h2>What each method was given</h2>{table(head, rows)}"
