"""The sections of a report with figures and tables. Each reads a run's files, or raises MissingError."""

from collections.abc import Sequence

from ropaws.report.charts import histogram, line_chart, reliability_diagram
from ropaws.report.page import esc, facts, percent, table
from ropaws.report.rivals import on_features
from ropaws.report.run_files import MissingError, RunFiles
from ropaws.report.verdict import share_of
from ropaws.runs.layout import ENVIRONMENT

POINTS = 300  # of a training curve at most


def key_figures(files: RunFiles) -> str:
    evaluation = files.evaluation
    pool, share, rival = evaluation.get("pool", {}), share_of(files), on_features(evaluation)
    on_tests = rival if rival and rival.on == "test" else None
    cards = [
        (evaluation.get("accuracy"), "accuracy on in-class test images"),
        (
            on_tests.logistic.accuracy if on_tests else None,
            "accuracy of logistic regression on the same features",
        ),
        (evaluation.get("auroc"), "AUROC, in- against out-of-class"),
        (on_tests.logistic.auroc if on_tests else None, "AUROC of logistic regression"),
        (evaluation.get("ece"), "calibration error (ECE)"),
        (evaluation.get("confidence_in"), "mean confidence in-class"),
        (evaluation.get("confidence_out"), "mean confidence out-of-class"),
        *_held_out_cards(files),
        (share.estimate if share else None, f"of the pool belongs to your classes ({share})"),
        (None if share else pool.get("out_of_class"), "of the pool looks out-of-class"),
        (pool.get("accuracy"), "pseudo-labels right on the pool"),
    ]
    shown = [(value, words) for value, words in cards if value is not None]
    if not shown:
        raise MissingError("evaluation.json has no figures")
    tiles = "".join(
        f'<div class="card"><b>{percent(value)} %</b><span>{esc(words)}</span></div>'
        for value, words in shown
    )
    return f'<div class="cards">{tiles}</div>'


def _held_out_cards(files: RunFiles) -> list[tuple[float | None, str]]:
    """The labels, each judged by others: in folds where that was done, else one by one."""
    rival = on_features(files.evaluation)
    if rival is None or rival.on != "labels":
        words = "of the labeled images are classified correctly by the others (leave-one-out)"
        return [(files.evaluation.get("leave_one_out"), words)]
    return [
        (rival.own.accuracy, "of held-out labels are classified correctly"),
        (rival.logistic.accuracy, "of them by logistic regression on the same features"),
    ]


def pool(files: RunFiles) -> str:
    pool = files.found("pool")
    seen = f"{pool['seen']:,} of {pool['size']:,}" if pool["seen"] < pool["size"] else f"{pool['size']:,}"
    rows: list[Sequence[object]] = [[name, f"{count:,}"] for name, count in pool["classes"].items()]
    rows.append(["out-of-class", f"{round(pool['out_of_class'] * pool['seen']):,}"])
    known = ""
    if "accuracy" in pool:
        known = (
            f"<p>The true class of {pool['known']:,} of them is known (for research; training did not"
            f" see it)."
            f" The classifier labels {percent(pool['accuracy'])} % of these correctly, and"
            f" {percent(pool['accuracy_propagated'])} % with label propagation through the pool."
        )
        if "auroc" in pool:
            known += f" The AUROC of in-class against out-of-class images is {percent(pool['auroc'])} %."
        known += "</p>"
    chart = histogram(
        {"unlabeled images": pool["in_domain"]}, x_label="in-domain probability", threshold=pool["threshold"]
    )
    share = share_of(files)
    estimate = (
        f"<p><b>About {share.estimate:.0%} of them belong to your classes</b> ({esc(share)}: where 90 of"
        " 100 other choices of as many labels would put it). This is an estimate for the pool as a whole,"
        " from how similar its images are to the labeled ones. The counts below are of single images, by a"
        " threshold, and need not agree with it.</p>"
        if share
        else ""
    )
    return (
        f"{estimate}<p>{seen} unlabeled images. Those left of the threshold are {_left_of(share)}. They are"
        " counted as out-of-class.</p>"
        f'{known}<div class="columns"><div>{table(["looks like", "images"], rows)}</div>'
        f"<figure>{chart}</figure></div>"
    )


def _left_of(share: object) -> str:
    """What the threshold means: with an estimated share, the in-domain probability is one in earnest."""
    if share:
        return "more likely out-of-class than in-class"
    return "farther from every labeled image than 95 % of the labeled images are from their own class"


def confidence(files: RunFiles) -> str:
    found = files.found("histograms")
    words = {"in": "in-class", "out": "out-of-class"}
    charts = [
        histogram({words[kind]: found[kind]["confidence"] for kind in found}, x_label="confidence"),
        histogram(
            {words[kind]: found[kind]["in_domain"] for kind in found},
            x_label="in-domain probability",
            threshold=files.found("threshold"),
        ),
    ]
    evaluation = files.evaluation
    told = ""
    if "auroc" in evaluation:
        told = table(
            ["AUROC", "FPR at 95 % TPR", "AUPR in", "AUPR out"],
            [[percent(evaluation.get(name)) for name in ("auroc", "fpr95", "aupr_in", "aupr_out")]],
        )
    figures = "".join(f"<figure>{chart}</figure>" for chart in charts)
    return (
        "<p>A good model is confident on in-class test images, and not on out-of-class ones.</p>"
        f'<div class="columns">{figures}</div>{told}'
    )


def calibration(files: RunFiles) -> str:
    chart = reliability_diagram(files.found("reliability"))
    return (
        "<p>A calibrated model is right in 80 of 100 cases where its confidence is 80 %: its bars end on the"
        " dashed line. Pale bars hold few images. The expected calibration error (ECE, 15 bins) is"
        f" {percent(files.found('ece'))} %.</p>"
        f'<div class="columns"><figure>{chart}</figure></div>'
    )


def propagation(files: RunFiles) -> str:
    rows = [
        [
            _iterations(row["iterations"]),
            percent(row["accuracy"]),
            percent(row["confidence_in"]),
            percent(row.get("confidence_out")),
        ]
        for row in files.found("propagation")
    ]
    head = ["iterations", "accuracy", "conf. in", "conf. out"]
    text = (
        "<p>Labels propagate among the test images, step by step, to the fixed point of Eq. (12). All figures"
        " are in percent. The first row is the plain classifier.</p>"
    )
    return text + table(head, rows) + _over_training(files)


def _over_training(files: RunFiles) -> str:
    kept = files.evaluation.get("over_training")
    if not kept:
        return ""
    names = [_iterations(row["iterations"]) for row in kept[0]["propagation"]]
    rows = [
        [
            f"{item['steps']:,}",
            *(percent(row["accuracy"]) for row in item["propagation"]),
            percent(item.get("auroc")),
        ]
        for item in kept
    ]
    return "<h3>Over training: accuracy by number of iterations</h3>" + table(["step", *names, "AUROC"], rows)


def _iterations(count: int | None) -> str:
    if count is None:
        return "∞"
    return "0 (soft-NN)" if count == 0 else str(count)


def confusion(files: RunFiles) -> str:
    """The matrix as a heat map; with many classes only the accuracies."""
    names, matrix = files.class_names, files.found("confusion")
    accuracies = files.found("per_class")
    ranked = sorted(accuracies.items(), key=lambda item: 2.0 if item[1] is None else item[1])
    per_class = table(["class", "accuracy, %"], [[name, percent(value)] for name, value in ranked[:40]])
    if len(names) > 30:
        return f"<p>The classes with the lowest accuracy:</p>{per_class}"
    head = "".join(f"<th>{esc(name)}</th>" for name in names)
    body = ""
    for name, counts in zip(names, matrix, strict=True):
        total = sum(counts) or 1
        cells = "".join(
            f'<td style="background:color-mix(in srgb, var(--one) {90 * n / total:.0f}%, transparent)">'
            f"{n:,}</td>"
            for n in counts
        )
        body += f"<tr><td>{esc(name)}</td>{cells}</tr>"
    heat = f'<div class="wide"><table class="heat"><thead><tr><th>true \\ predicted</th>{head}</tr></thead>'
    return f"{heat}<tbody>{body}</tbody></table></div>{per_class}"


def curves(files: RunFiles) -> str:
    metrics = files.metrics
    groups = [
        ("loss", ["loss", "consistency", "mean_entropy"]),
        ("mean weight of a sample (in-domain posterior)", ["weight"]),
        ("temperature of the prior", ["prior_temperature"]),
        ("learning rate", ["learning_rate"]),
    ]
    charts = []
    for title, names in groups:
        series = {name.replace("_", " "): _thinned(metrics, name) for name in names}
        if any(series.values()):
            charts.append(f"<figure>{line_chart(series, x_label='step', y_label=title)}</figure>")
    last = metrics[-1]
    seconds = last.get("seconds", 0)
    text = f"<p>{last['step'] + 1:,} steps in {seconds:,.0f} seconds. A loss below zero is normal.</p>"
    return f'{text}<div class="columns">{"".join(charts)}</div>'


def _thinned(metrics: list[dict[str, float]], name: str) -> list[tuple[float, float]]:
    """Means of neighboring steps, so that a long run draws no more than a few hundred points."""
    rows = [(row["step"], row[name]) for row in metrics if isinstance(row.get(name), int | float)]
    size = -(-len(rows) // POINTS) or 1
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [
        (sum(step for step, _ in group) / len(group), sum(value for _, value in group) / len(group))
        for group in groups
    ]


def settings(files: RunFiles) -> str:
    return facts(files.config.items())


def data(files: RunFiles) -> str:
    labeled = files.data["labeled"]
    counts: dict[str, int] = {}
    for number in labeled["labels"]:
        name = files.class_names[number]
        counts[name] = counts.get(name, 0) + 1
    pairs: list[tuple[str, object]] = [
        ("classes", len(files.class_names)),
        ("labeled images", len(labeled["labels"])),
        ("labels per class", counts),
        ("digest of the training images", files.data["digest"]),
    ]
    return facts(pairs)


def environment(files: RunFiles) -> str:
    found = files.read(ENVIRONMENT)
    choices = found.pop("choices", [])
    lines = "".join(f"<li>{esc(line)}</li>" for line in choices)
    why = f'<p class="dim">Why the settings are as they are:</p><ul>{lines}</ul>' if lines else ""
    return facts(found.items()) + why
