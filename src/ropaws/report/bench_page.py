"""`ropaws bench`: all cells on one page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropaws.report.charts import LINES, line_chart
from ropaws.report.page import esc, page, plain, table, write_page

COLUMNS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "C+1 accuracy",
    "auroc": "AUROC",
    "auroc_unseen": "AUROC unseen",
    "fpr95": "FPR95",
    "ece": "ECE",
    "confidence_in": "conf. in",
    "confidence_out": "conf. out",
    "selected": "selected",
    "purity": "purity",
}
EXPLANATION = """<p class="dim">Percent on unseen test images, mean and standard deviation over draws of
labels. Accuracy counts in-class images; C+1 accuracy is the mean over the known classes and out-of-class
images as one more class; AUROC and FPR95 say how well each method's own score tells in-class from
out-of-class images, of the kinds in the pool and of kinds that were never in it (unseen); ECE is the
calibration error in-class; selected is the share of the unlabeled batch that is learned from in the last
tenth of training, purity the share of that which is in-class. Images are views that the network was shown in
training, in thousands. The difference is accuracy minus that of {reference} on the same draws, in points,
with its 95 % interval.</p>"""


def write_bench_page(path: Path, content: Mapping[str, Any]) -> None:
    """One self-contained page of results.json."""
    reference = content["reference"]
    body = [
        "<h1>Methods on equal terms</h1>",
        f'<p class="verdict">{esc(_verdict(content))}</p>',
        f"<p>{esc(content['fairness'])} {esc(_budget(content))}</p>",
        EXPLANATION.format(reference=esc(reference)),
    ]
    for setting in content["tables"]:
        body += [
            f"<h2>{esc(setting['data'])}, {setting['labels']} labels per class</h2>",
            f"<p>{esc(_data(content['data'].get(setting['data'], {})))}</p>",
            setting_table(setting, reference),
            _charts(setting, reference),
        ]
    body += [_control(content), _published(content), _given(content)]
    if content["failures"]:
        lines = "".join(f"<li>{esc(line)}</li>" for line in content["failures"])
        body.append(f'<div class="missing"><h2>Failed</h2><ul>{lines}</ul></div>')
    write_page(path, page("Benchmark - ropaws", "\n".join(body)))


def _verdict(content: Mapping[str, Any]) -> str:
    """How often each method is first."""
    first: dict[str, int] = {}
    for setting in content["tables"]:
        best = max(setting["rows"], key=lambda row: row["figures"]["accuracy"]["mean"])
        first[best["method"]] = first.get(best["method"], 0) + 1
    if not first:
        return "No cell has ended yet."
    listed = ", ".join(f"{name} {count}" for name, count in sorted(first.items(), key=lambda item: -item[1]))
    return f"First in accuracy, by number of settings: {listed}."


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


def setting_table(setting: Mapping[str, Any], reference: str) -> str:
    rows = ordered_rows(setting)
    keys = [key for key in COLUMNS if any(key in row["figures"] for row in rows)]
    head = ["method", *(COLUMNS[key] for key in keys), "images", "seconds", "difference", "draws"]
    own = next((number for number, row in enumerate(rows) if row["method"] == reference), None)
    return table(head, ([*row_cells(row, keys)] for row in rows), own=own)


def row_cells(row: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """A row of a table as text."""
    return [
        row["method"],
        *(shown(row["figures"].get(key)) for key in keys),
        f"{row['images'] / 1000:,.0f}",
        f"{row['seconds']:.0f}",
        difference(row),
        str(len(row["seeds"])),
    ]


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


def _charts(setting: Mapping[str, Any], reference: str) -> str:
    """Accuracy against images seen, selected share and purity over training, of the best methods."""
    best = [row for row in ordered_rows(setting) if row["curve"]][: len(LINES)]
    if (own := next((row for row in setting["rows"] if row["method"] == reference), None)) is not None:
        best = best if own in best or not own["curve"] else [*best[:-1], own]
    curves = {row["method"]: [(x / 1000, 100 * y) for x, y in row["curve"]] for row in best}
    charts = []
    if any(curves.values()):
        charts.append(line_chart(curves, x_label="images seen, thousands", y_label="accuracy"))
    choosers = [row for row in ordered_rows(setting) if row["selection"]][: len(LINES)]
    for column, label in ((1, "selected share of the pool"), (2, "in-class share of the selected")):
        series = {
            row["method"]: [
                (100 * point[0], 100 * point[column])
                for point in row["selection"]
                if point[column] is not None
            ]
            for row in choosers
        }
        if any(series.values()):
            charts.append(line_chart(series, x_label="percent of training", y_label=label, y=(0, 100)))
    return f'<div class="columns">{"".join(f"<figure>{chart}</figure>" for chart in charts)}</div>'


def _control(content: Mapping[str, Any]) -> str:
    """Accuracy against the number of out-of-class images, where the in-class part stays the same."""
    parts = []
    for labels in sorted({setting["labels"] for setting in content["tables"]}):
        found = [setting for setting in content["tables"] if setting["labels"] == labels]
        facts = [content["data"].get(setting["data"], {}) for setting in found]
        fixed = len({fact.get("in_class") for fact in facts}) == 1
        amounts = [fact.get("out_of_class") for fact in facts]
        if len(found) < 3 or not fixed or len(set(amounts)) < 3:
            continue
        series: dict[str, list[tuple[float, float]]] = {}
        for setting, amount in sorted(zip(found, amounts, strict=True), key=lambda item: item[1]):
            for row in ordered_rows(setting):
                times = amount / facts[0]["in_class"]
                mean = 100 * row["figures"]["accuracy"]["mean"]
                series.setdefault(row["method"], []).append((times, mean))
        names = sorted(series, key=lambda name: -series[name][-1][1])
        chart = line_chart(
            {name: series[name] for name in names[: len(LINES)]},
            x_label="out-of-class images per in-class image",
            y_label="accuracy",
        )
        changes = {name: points[-1][1] - points[0][1] for name, points in series.items()}
        rows = [[name, *(f"{y:.1f}" for _, y in series[name]), f"{changes[name]:+.1f}"] for name in names]
        times = sorted({point[0] for points in series.values() for point in points})
        head = ["method", *(f"{x:g}x" for x in times), "change"]
        parts.append(
            f"<h2>More out-of-class images, {labels} labels per class</h2>"
            f"<p>The in-class part of the pool stays the same.</p><figure>{chart}</figure>{table(head, rows)}"
        )
    return "".join(parts)


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
