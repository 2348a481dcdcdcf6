"""Write the tables of the README and docs from benchmarks/results/, so that no figure is typed by hand.

python scripts/readme_tables.py           writes them
python scripts/readme_tables.py --check   exit code 1 if a page is not what the results say
"""

import json
import re
import sys
from pathlib import Path

from ropaws.report import bench_page
from ropaws.report.tables import COLUMNS, comparison_rows

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def comparison(name: str, columns: dict[str, str] = COLUMNS) -> str:
    head = [["method", *columns.values()], ["---", *["---:"] * len(columns)]]
    rows = comparison_rows(read(name)["methods"], columns)
    return "\n".join(f"| {' | '.join(row)} |" for row in head + rows)


def ablation() -> str:
    return comparison("demo_ablation", {key: name for key, name in COLUMNS.items() if key != "seconds"})


def speed() -> str:
    small, large = (read("augment")[size] for size in ("32px", "96px"))
    step, loading = read("step_time"), read("loading")
    pools = read("propagation")["sizes"]
    ten, million = pools["generated 10000"], pools["generated 1000000"]["ropaws"]
    rival = pools["generated 50000"]["LabelSpreading knn"]
    plain, cached = (
        [loading[f"{size}px"]["speedup"][way] for size in (96, 224)] for way in ("ropaws", "ropaws, cache")
    )
    wait = max(way["share_of_loader"] for way in loading["training"].values())
    cifar, imagenet = (step[key]["ratio_to_paws"]["ropaws"] for key in ("cifar_step", "imagenet_loss"))
    return "\n".join(
        [
            f"- Augmentation is batched: {small['speedup']} times Pillow image by image at 32 px"
            f" ({large['speedup']} times at 96 px).",
            f"- JPEGs of about 500 x 375 are read {plain[0]} times as fast as by a plain Dataset and"
            f" DataLoader for views of 96 px ({plain[1]} times for 224), and {cached[0]} ({cached[1]}) times"
            f" from the cache; training on this CPU waits for images at most {wait:.1%} of the time.",
            f"- A RoPAWS step costs {cifar:.2f} times a PAWS step in the paper's CIFAR setting;"
            f" the loss part alone, at the paper's ImageNet size, {imagenet:.2f} times.",
            f"- On Linux CPUs a step of the demo is {step['keep_freed_memory_speedup']} times as fast"
            " because freed memory is kept.",
            '- Label propagation alone (`RoPAWSClassifier` of 0.1.0, now with `head=None, prior="distance",'
            f" regression_share=0`) labels 50,000 rows {rival['times ours']:.0f} times as fast as"
            " scikit-learn's LabelSpreading on its nearest-neighbor graph"
            f" ({ten['LabelSpreading knn']['times ours']:.1f} times at 10,000;"
            f" {ten['LabelSpreading rbf']['times ours']:.0f} times its rbf kernel), and a million rows of 128"
            f" in {million['seconds']:.0f} seconds and {million['megabytes']} MB beside the data.",
        ]
    )


def posterior() -> str:
    results = read("posterior")
    head = ["supports, classes", "M", "exact", "iterative", "inverse", "memory exact", "memory iterative"]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for setting in ("cifar", "imagenet"):
        group = results[setting]
        for points, row in group.items():
            if points.isdigit():
                seconds, memory = row["seconds"], row["memory_gb"]
                times = [f"{seconds[way]:.3g}" if way in seconds else "-" for way in head[2:5]]
                held = [f"{memory[way]:.2f}" for way in ("exact", "iterative")]
                rows.append([f"{group['supports']}, {group['classes']}", points, *times, *held])
    ratios = [results[s]["4096"]["times_as_fast_as_inverse"]["iterative"] for s in ("cifar", "imagenet")]
    ending = f"At M = 4096 the iteration is {ratios[0]} and {ratios[1]} times as fast as the inverse."
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{ending}"


def communication() -> str:
    table = read("communication")["megabytes_sent_a_step"]
    names = list(table["64"])
    rows = [["", *table], ["---", *["---:"] * len(table)]]
    rows += [[name, *(f"{row[name]:,.1f}" for row in table.values())] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def scaling() -> str:
    results = read("scaling")
    gains = results["times_one_process"]
    return (
        f"training the demo's network, two processes are {gains['two processes']} times as fast as one of one"
        f" thread; a second thread makes it {gains['one process of two threads']} times"
        " (`python benchmarks/scaling.py`)."
    )


def soak() -> str:
    results = read("soak")
    same = results["losses_equal_the_quiet_run"] and results["weights_equal_the_quiet_run"]
    return (
        f"`python benchmarks/soak.py`: {results['steps_done']} steps with {results['kills_survived']} kills"
        f" at random moments, corrupt images ({results['corrupt_images_listed']} listed) and a slow disk;"
        f" {results['steps_taken_again']} steps since a checkpoint were taken again,"
        f" {results['steps_lost_beyond_a_checkpoint']} were lost, and the losses and weights of the quiet run"
        f" were {'met to the bit' if same else 'not met'}."
    )


def table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: list[float] | None) -> str:
    """[61.2, 3.4] as '61.2±3.4'"""
    return "-" if values is None else f"{values[0]:.1f}±{values[1]:.1f}"


MIX_NAMES = {
    "none": "no extra",
    "cifar100": "+ CIFAR-100",
    "tiny": "+ Tiny-ImageNet",
    "svhn": "+ SVHN (rebuilt)",
}
STEPS = 300  # of the main comparison
MAIN = ("paws", "ropaws", "prior from the pool")
MEASURES = ("accuracy", "auroc", "confidence_in", "confidence_out", "ece")


def paper_main() -> str:
    groups = read("paper_small")["groups"]
    head = ["CIFAR-10", "labels", "start", "method", "accuracy", "AUROC", "conf. in", "conf. out", "ECE"]
    rows = [head]
    for mix, name in MIX_NAMES.items():
        for labels in (4, 25):
            for method in MAIN:
                found = groups[f"{mix}/{labels}/{method}/{STEPS}"]
                cells = [spread(found.get(key)) for key in MEASURES]
                shown = f"ropaws, {method}" if method.startswith("prior") else method
                rows.append([name, str(labels), spread(found["start"]), shown, *cells])
    return table(rows)


def paper_ablation() -> str:
    groups = read("paper_small")["groups"]
    rows = [["variant", "accuracy", "AUROC", "conf. in", "conf. out", "ECE"]]
    mine = {key.split("/")[2]: found for key, found in groups.items() if key.startswith("svhn/4/")}
    order = ["paws", *(name for name in mine if name not in ("paws", "ropaws")), "ropaws"]
    for name in order:
        found = groups.get(f"svhn/4/{name}/{STEPS}")
        if found is not None:
            shown = "ropaws (tau_prior 0.1, k 1)" if name == "ropaws" else name
            rows.append([shown, *(spread(found.get(key)) for key in MEASURES)])
    return table(rows)


def paper_steps() -> str:
    groups = read("paper_small")["groups"]
    found = {key: group for key, group in groups.items() if key.startswith("svhn/4/paws/")}
    names = ("PAWS", "RoPAWS", "prior from the pool")
    rows = [["steps", *names, *(f"AUROC {name}" for name in names)]]
    for steps in sorted(int(key.split("/")[3]) for key in found):
        runs = [groups[f"svhn/4/{method}/{steps}"] for method in MAIN]
        rows.append([f"{steps:,}", *(spread(group[key]) for key in ("accuracy", "auroc") for group in runs)])
    start = spread(groups[f"svhn/4/paws/{STEPS}"]["start"])
    rows.insert(1, ["0 (the features)", *[start] * 3, *[""] * 3])
    return table(rows)


def paper_propagation() -> str:
    results = read("paper_small")
    rows = [["CIFAR-10", "labels", "iteration", "accuracy", "conf. in", "conf. out"]]
    for mix, labels in (("cifar100", 25), ("svhn", 4)):
        found = results["groups"][f"{mix}/{labels}/ropaws/{STEPS}"]
        measures = ("accuracy", "confidence_in", "confidence_out")
        rows.append([MIX_NAMES[mix], str(labels), "0", *(spread(found[key]) for key in measures)])
        for row in found["propagation"]:
            count = "∞" if row["iterations"] is None else str(row["iterations"])
            rows.append([MIX_NAMES[mix], str(labels), count, *(spread(row.get(key)) for key in measures)])
    sskde = [["embedding, 25 labels", "soft-NN", "SSKDE"]]
    for method in ("paws", "ropaws"):
        found = results["groups"][f"none/25/{method}/{STEPS}"]
        sskde.append([method, spread(found["accuracy"]), spread(found["sskde"])])
    sskde.append(["random linear map of the pixels", "-", spread(results["sskde_on_random_linear"])])
    return f"{table(rows)}\n\n{table(sskde)}"


def suggest() -> str:
    found = read("suggest")
    before, retrained = found["before"], found["retrained"]
    columns = [(method, way) for method in ("supervised", "ropaws") for way in ("random", "suggested")]
    names = {"supervised": "supervised baseline", "ropaws": "RoPAWS"}
    rows = [["labels", *(f"{names[method]}, {way}" for method, way in columns)]]
    rows.append([str(found["labels_before"]), *(spread(before[method]) for method, _ in columns)])
    rows += [
        [str(found["labels_before"] + int(n)), *(spread(retrained[m][way][n]) for m, way in columns)]
        for n in retrained["ropaws"]["random"]
    ]
    shares = ", ".join(f"{way} {spread(found['in_class_share'][way])}" for way in ("random", "suggested"))
    return (
        "Accuracy in percent on the embedded data after labeling more images and training anew, mean and"
        f" deviation over {found['seeds']} seeds (`python benchmarks/suggest.py`):\n\n{table(rows)}\n\n"
        f"Share of the labels spent on images that belong to a class, in percent: {shares}."
    )


def propagation() -> str:
    sizes = read("propagation")["sizes"]
    rows = [["rows", "method", "seconds", "times ours", "memory, MB", "accuracy", "AUROC"]]
    for name, methods in sizes.items():
        shown = name if name == "embedded" else f"{int(name.split()[1]):,}"
        for method, found in methods.items():
            ratio = f"{found['times ours']:.1f}" if "times ours" in found else ""
            figures = [f"{100 * found[key]:.1f}" for key in ("accuracy", "auroc")]
            memory = f"{found['megabytes']:,}"
            rows.append([shown, method, f"{found['seconds']:.2f}", ratio, memory, *figures])
    return table(rows)


OURS = "RoPAWSClassifier"
SHORT = {
    "logistic regression": "LR",
    "class mean": "mean",
    "LabelSpreading": "LS",
    "LabelPropagation": "LP",
    "SelfTraining": "self-tr.",
    "RoPAWS, paper": "RoPAWS",
    OURS: "ours",
}


def feature_rows() -> list[tuple[str, str, dict]]:
    """Setting, labels per class, figures."""
    return [(*key.rsplit(", ", 1), found) for key, found in read("features")["rows"].items()]


def feature_table(figure: str) -> str:
    """One figure of all methods; the best rival is in italics, ours is bold where it is at least as good."""
    rows: list[list[str]] = []
    for name, labels, found in feature_rows():
        methods = found["methods"]
        if figure not in methods[OURS]:
            continue
        if not rows:
            rows.append(["setting", "labels", *(SHORT.get(method, method) for method in methods)])
        best = max(methods[method][figure] for method in methods if method != OURS)
        cells = []
        for method, values in methods.items():
            value = values[figure]
            shown = f"{value:.1f}"
            if method == OURS:
                shown = f"**{shown}**" if value >= best else shown
            elif value == best:
                shown = f"*{shown}*"
            cells.append(shown)
        rows.append([name, labels, *cells])
    return table(rows)


def feature_calibration() -> str:
    """ECE of ours and of logistic regression, FPR95, estimated against true share, seconds."""
    head = ["setting", "labels", "ECE ours", "ECE LR", "FPR95 ours", "best FPR95", "share", "true", "seconds"]
    rows = [head]
    for name, labels, found in feature_rows():
        methods = found["methods"]
        ours = methods[OURS]
        rivals = [v["fpr95"] for m, v in methods.items() if m != OURS and "fpr95" in v]
        rows.append(
            [
                name,
                labels,
                f"{ours['ece']:.1f}",
                f"{methods['logistic regression']['ece']:.1f}",
                f"{ours['fpr95']:.1f}" if "fpr95" in ours else "-",
                f"{min(rivals):.1f}" if rivals else "-",
                spread([ours["share"], ours["share_deviation"]]),
                f"{ours['true_share']:.0f}",
                f"{ours['seconds']:.0f}",
            ]
        )
    return table(rows)


def feature_bar() -> str:
    """How often ours is ahead of, or level with, the best of nine rivals."""
    lines = []
    for labels in ("1", "4", "25"):
        mine = [found["best_rival"] for _, k, found in feature_rows() if k == labels]
        accuracy = [row["accuracy"]["ahead"] for row in mine]
        auroc = [row["auroc"]["ahead"] for row in mine if "auroc" in row]
        over = [
            found["methods"][OURS]["accuracy"] - found["methods"]["logistic regression"]["accuracy"]
            for _, k, found in feature_rows()
            if k == labels
        ]
        lines.append(
            f"| {labels} | {_signed(over)} | {_signed(accuracy)} |"
            f" {sum(a >= -0.5 for a in accuracy)} of {len(accuracy)} |"
            f" {sum(a >= 2 for a in accuracy)} of {len(accuracy)} | {_signed(auroc)} |"
            f" {sum(a >= -0.5 for a in auroc)} of {len(auroc)} |"
        )
    head = (
        "| labels per class | accuracy over LR | accuracy over the best rival | at most 0.5 behind it |"
        " 2 or more ahead | AUROC over the best rival | at most 0.5 behind it |"
    )
    return "\n".join([head, "| ---: " * 7 + "|", *lines])


def _signed(values: list[float]) -> str:
    return f"{sum(values) / len(values):+.1f} ({min(values):+.1f} to {max(values):+.1f})"


def trials() -> str:
    found = read("head_trials")["variants"]
    columns = {"accuracy, 4": "accuracy", "auroc, 4": "AUROC", "ece, 4": "ECE", "worst ece, 4": "worst ECE"}
    rows = [["variant", *columns.values()]]
    for name, row in found.items():
        rows.append([name, *(f"{row[column]:.1f}" for column in columns)])
    return table(rows)


def scratch() -> str:
    found = read("prior_scratch")
    names = {
        "demo": "the demo: prior by distance, automatic temperature",
        "random": "random weights",
        "same labels": "the demo's own run",
        "other labels": "a demo run on other labels",
    }
    columns = {
        "share": "share",
        "prior_auroc": "AUROC of the prior",
        "accuracy": "accuracy",
        "auroc": "AUROC",
    }
    rows = [["features of", *columns.values()]]
    for key, name in names.items():
        values = [found[key].get(column) for column in columns]
        rows.append([name, *("-" if v is None else f"{sum(v) / len(v):.1f}" for v in values)])
    return table(rows)


SECTIONS = {
    "scratch": scratch,
    "features-accuracy": lambda: feature_table("accuracy"),
    "features-auroc": lambda: feature_table("auroc"),
    "features-calibration": feature_calibration,
    "features-bar": feature_bar,
    "trials": trials,
    "demo": lambda: comparison("demo"),
    "ablation": ablation,
    "speed": speed,
    "posterior": posterior,
    "communication": communication,
    "scaling": scaling,
    "soak": soak,
    "paper-main": paper_main,
    "paper-ablation": paper_ablation,
    "paper-steps": paper_steps,
    "paper-propagation": paper_propagation,
    "suggest": suggest,
    "propagation": propagation,
}


BENCH_COLUMNS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "C+1",
    "auroc": "AUROC",
    "auroc_unseen": "unseen",
    "fpr95": "FPR95",
    "ece": "ECE",
    "confidence_in": "conf. in",
    "confidence_out": "conf. out",
}


def bench(name: str) -> str:
    """A table for each setting, best accuracy first."""
    results, parts = read(name), []
    for setting in results["tables"]:
        rows = bench_page.ordered_rows(setting)
        keys = [key for key in BENCH_COLUMNS if any(key in row["figures"] for row in rows)]
        best = {key: max(rows, key=lambda row: _mean(row, key)) for key in ("accuracy", "auroc")}
        body = []
        for row in rows:
            cells = [
                _bold(bench_page.shown(row["figures"].get(key)), key in best and _near(row, best[key], key))
                for key in keys
            ]
            images, seconds = f"{row['images'] / 1000:,.0f}k", f"{row['seconds']:.0f}"
            draws = str(len(row["seeds"]))
            body.append([f"`{row['method']}`", *cells, images, seconds, bench_page.difference(row), draws])
        facts = results["data"][setting["data"]]
        title = (
            f"**{setting['data']}, {setting['labels']} labels per class** ({facts['in_class']:,} in-class and"
            f" {facts['out_of_class']:,} out-of-class images)"
        )
        head = ["method", *(BENCH_COLUMNS[key] for key in keys), "images", "seconds", "difference", "draws"]
        parts.append(f"{title}\n\n{table([head, *body])}")
    if results["failures"]:
        parts.append("Failed: " + "; ".join(results["failures"]))
    return "\n\n".join(parts)


def _mean(row: dict, key: str) -> float:
    return row["figures"][key]["mean"] if key in row["figures"] else -1.0


def _near(row: dict, best: dict, key: str) -> bool:
    """The best, or within one standard deviation of it."""
    spread = best["figures"].get(key, {}).get("deviation") or 0.0
    return _mean(row, key) >= _mean(best, key) - spread


def _bold(text: str, strong: bool) -> str:
    return f"**{text}**" if strong and text != "-" else text


def bench_control() -> str:
    """Accuracy against the number of out-of-class images."""
    results = read("bench_control")
    settings = sorted(results["tables"], key=lambda s: results["data"][s["data"]]["out_of_class"])
    found: dict[str, list[str]] = {}
    for setting in settings:
        for row in setting["rows"]:
            found.setdefault(row["method"], []).append(bench_page.shown(row["figures"]["accuracy"]))
    last = {row["method"]: _mean(row, "accuracy") for row in settings[-1]["rows"]}
    first = {row["method"]: _mean(row, "accuracy") for row in settings[0]["rows"]}
    names = sorted(found, key=lambda name: -last.get(name, 0))
    counts = [results["data"][s["data"]] for s in settings]
    head = ["method", *(f"{c['out_of_class'] / c['in_class']:g}x" for c in counts), "change"]
    rows = [[f"`{n}`", *found[n], f"{100 * (last[n] - first[n]):+.1f}"] for n in names]
    return table([head, *rows])


def bench_shift() -> str:
    """Selected share, purity, AUROC and accuracy of OpenMatch and others."""
    rows = [["pool", "labels", "method", "selected", "purity", "AUROC", "accuracy"]]
    results = read("bench_shift")
    for setting in results["tables"]:
        for row in setting["rows"]:
            figures = [
                bench_page.shown(row["figures"].get(key))
                for key in ("selected", "purity", "auroc", "accuracy")
            ]
            rows.append([setting["data"], str(setting["labels"]), f"`{row['method']}`", *figures])
    return table(rows)


def methods_cost() -> str:
    costs = read("step_time")["methods"]
    plain = costs["fixmatch"]["seconds"]
    rows = [["method", "seconds per step", "times FixMatch", "loss and heads, % of the step"]]
    for name, cost in sorted(costs.items()):
        times = f"{cost['seconds'] / plain:.2f}"
        rows.append([f"`{name}`", f"{cost['seconds']:.2f}", times, f"{100 * cost['loss_share']:.1f}"])
    return table(rows)


def hostile() -> str:
    """Readers in groups, and the total."""
    found = read("hostile")
    groups: dict[str, list[dict]] = {}
    for name, result in found["readers"].items():
        group = next((text for start, text in HOSTILE.items() if name.startswith(start)), name)
        groups.setdefault(group, []).append(result)
    rows = [["files", "cases", "refused", "tracebacks", "hangs", "outside", "most memory, MB"]]
    for group, results in [*groups.items(), ("all", list(found["readers"].values()))]:
        count = {
            outcome: sum(result["outcomes"].get(outcome, 0) for result in results)
            for outcome in ("refused", "traceback", "died", "hang", "outside")
        }
        rows.append(
            [
                group,
                f"{sum(result['cases'] for result in results):,}",
                f"{count['refused']:,}",
                str(count["traceback"] + count["died"]),
                str(count["hang"]),
                str(count["outside"]),
                f"{max(result['megabytes'] for result in results):,.0f}",
            ]
        )
    return table(rows)


HOSTILE = {  # beginning of a reader's name: row of the table
    "config.json": "`config.json`, then the network is built and used",
    "page: ": "any JSON file of a run, shown by `report` and `compare`",
    "image ": "images: PNG, JPEG, WebP, GIF, BMP, TIFF",
    "weights ": "weight files for `--init`",
    "features ": "feature files",
    "table ": "tables, `.csv` and `.parquet`",
    "commands": "whole commands, also with pipes, devices, links and holes",
}


BENCHES = {
    "hostile": hostile,
    "bench-features": lambda: bench("bench_features"),
    "bench-garments": lambda: bench("bench_garments"),
    "bench-scratch": lambda: bench("bench_scratch"),
    "bench-control": bench_control,
    "bench-shift": bench_shift,
    "methods-cost": methods_cost,
}


def fill(text: str) -> str:
    for name, section in {**SECTIONS, **BENCHES}.items():
        if f"<!-- {name}: " not in text:
            continue
        pattern = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
        content = section()
        text = pattern.sub(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
    return text


if __name__ == "__main__":
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        old = page.read_text()
        new = fill(old)
        if "--check" in sys.argv and new != old:
            sys.exit(f"{page.name} does not show benchmarks/results; run python scripts/readme_tables.py")
        page.write_text(new)
