"""Write the tables of the README and docs from benchmarks/results/, so that no figure is typed by hand.

python scripts/readme_tables.py           writes them
python scripts/readme_tables.py --check   exit code 1 if a page is not what the results say
"""

import json
import re
import statistics
import sys
from pathlib import Path

from ropaws.insight.accuracy_estimate import audit_half_width
from ropaws.report import bench_page
from ropaws.report.page import COLUMNS, comparison_rows

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def comparison(name: str, columns: dict[str, str] = COLUMNS) -> str:
    head = [["method", *columns.values()], ["---", *["---:"] * len(columns)]]
    rows = comparison_rows(read(name)["methods"], columns)
    return "\n".join(f"| {' | '.join(row)} |" for row in head + rows)


DEMO_NAMES = {
    "logistic": "logistic regression",
    "label-spreading": "LabelSpreading (scikit-learn)",
    "paws": "PAWS",
    "ropaws-paper": "RoPAWS as in the paper",
    "ropaws": "**ropaws**",
}


def demo_table() -> str:
    """The table of `ropaws demo`."""
    (setting,) = read("demo")["tables"]
    found = {row["method"]: row["figures"] for row in setting["rows"]}
    keys = ("accuracy", "auroc", "ece")
    rows = [["", *(BENCH_COLUMNS[key] for key in keys)]]
    for method, name in DEMO_NAMES.items():
        figures = [_bold(bench_page.shown(found[method][key]), method == "ropaws") for key in keys]
        rows.append([name, *figures])
    return table(rows)


def ablation() -> str:
    return comparison("demo_ablation", {key: name for key, name in COLUMNS.items() if key != "seconds"})


def many_files() -> str:
    many = read("many_files")
    check, predict = many["check"], many["predict"]
    count = str(many["files"])
    megabytes = [f"{command[count]['megabytes']:,}" for command in (check, predict)]
    kilobytes = [f"{command['bytes_more_per_file'] / 1000:.1f}" for command in (check, predict)]
    return (
        f"- Of {many['files']:,} small files `check` looks at {check['files_per_second']:,} per second and"
        f" `predict` with a small network at {predict['files_per_second']:,}. They take"
        f" {' and '.join(megabytes)} MB with their worker processes, and each further file"
        f" {' and '.join(kilobytes)} kB: its name, and in `check` a thumbnail."
    )


def reading_ways() -> str:
    """What single steps of reading an image take."""
    kept = {"decode, Pillow": "yes", "resize, torch": "for whole images", "resize, Pillow": "for squares"}
    rows = [["step", "ms per image", "used"], ["---", "---:", "---"]]
    rows += [[way, f"{ms:.2f}", kept.get(way, "no")] for way, ms in sorted(read("loading")["ways"].items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


GRAPHS = ("LabelSpreading knn", "LabelPropagation knn")  # of benchmarks/propagation.py


def speed() -> str:
    small, large = (read("augment")[size] for size in ("32px", "96px"))
    step, loading = read("step_time"), read("loading")
    pools, scale = read("propagation")["sizes"], read("propagation")["scale"]
    graph = [
        f"{min(row[name]['times ours'] for name in GRAPHS):.1f} times as fast at {int(size):,}"
        for size, row in sorted(pools.items(), key=lambda item: item[0].zfill(9))
        if size.isdigit()
    ]
    alone, most = (scale[name]["rows"][LARGEST] for name in ("propagation alone", "RoPAWSClassifier()"))
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
            many_files(),
            f"- A RoPAWS step costs {cifar:.2f} times a PAWS step in the paper's CIFAR setting;"
            f" the loss part alone, at the paper's ImageNet size, {imagenet:.2f} times.",
            f"- On Linux CPUs a step of the demo is {step['keep_freed_memory_speedup']} times as fast"
            " because freed memory is kept.",
            '- Label propagation alone (`RoPAWSClassifier(head=None, prior="distance", regression_share=0)`)'
            " is, against the faster of scikit-learn's LabelSpreading and LabelPropagation on a"
            " nearest-neighbor graph,"
            f" {', '.join(graph)} rows, and labels"
            f" ten million memory-mapped rows of 128 in {alone['cpu_seconds']:.0f} seconds of CPU and"
            f" {alone['megabytes']} MB beside the data; the default, which trains a head, in"
            f" {most['cpu_seconds']:.0f} seconds and {most['megabytes']} MB.",
        ]
    )


def view_worth() -> str:
    """Mean accuracy by what a head learns from, on two networks."""
    found = read("view_worth")["mean_accuracy"]
    shown = {"0 views": "the center view alone", "center and 1 view": "the center view and 1 random view"}
    shown |= {"1 view": "1 random view alone", "2 views": "2 random views", "4 views": "4 random views"}
    shown |= {"noise 0.5": "the row with noise", "shifted 0.2": "moved by 0.2", "shifted 0.4": "moved by 0.4"}
    networks = ("efficientnet-lite0", "dinov2-small")
    rows = [[words, *(f"{found[f'{n}, {name}']:.1f}" for n in networks)] for name, words in shown.items()]
    return table([["learned from", *networks], *rows])


def plain_way() -> str:
    """Folder to labels, ours against a plain script."""
    found = read("plain_way")
    cpu, right = found["cpu_seconds"], found["accuracy"]
    rows = [["", "CPU seconds", "times the plain way", "by the clock", "accuracy"]]
    rows.append(["plain script", f"{cpu['plain']:.0f}", "1", "1", f"{right['plain']:.1%}"])
    for name in ("cold", "warm"):
        ratios = (found[key][name] for key in ("times_its_cpu_seconds", "times_the_plain_way"))
        figures = [f"{ratio:.2f}" for ratio in ratios]
        rows.append([f"ours, {name}", f"{cpu[name]:.0f}", *figures, f"{right['ours']:.1%}"])
    views = f"{found['views']} random view{'s' * (found['views'] != 1)}"
    size = f"{found['images']:,} images at {found['size']} px, {views} of each"
    return f"{table(rows)}\n\n{size}; turns: {found['turns']}, on a busy machine."


def backbone_views() -> str:
    """Accuracy of DINOv2-S with few labels, by the size of views and the kind of features."""
    found = {key: value for key, value in read("backbone_views").items() if key != "machine"}
    rows = [["images", "view", "class token", "class token and mean of patches"]]
    for key, values in found.items():
        name, size = key.split()
        kinds = (values[kind] for kind in ("class token", "with patches"))
        rows.append([name, f"{size} px", *(" / ".join(f"{share:.1f}" for share in kind) for kind in kinds)])
    return table(rows)


def reference_step() -> str:
    """The step against the plain way, its parts, and what compiling it brings."""
    results = read("reference_step")
    loads = {"0 beside": "quiet machine", "1 beside": "one program beside"}
    ways = {"ours fp32": "ours, float32", "ours": "ours, bf16", "ours compiled": "ours, bf16, compiled"}
    ratios = {load: results[load]["times_as_fast_as_plain"] for load in loads}
    rows = [
        [name, *(f"{found[way]:.2f}" if way in found else "-" for found in ratios.values())]
        for way, name in ways.items()
    ]
    parts = {name: results[f"parts of {way}"] for way, name in (("ours", "bf16"), ("ours fp32", "float32"))}
    kinds = list(parts["bf16"]["percent_by_kind"])
    shares = [
        [name, *(f"{part['percent_by_kind'][kind]:.1f}" for kind in kinds)] for name, part in parts.items()
    ]
    views, loss = (parts["bf16"]["percent_by_part"][part] for part in ("views", "optimizer"))
    compiled = results["compilation"]
    pays = compiled["pays_after_steps"]
    after = "so it never pays" if pays is None else f"so it pays after {pays:,} steps"
    return (
        f"{table([['times as fast as the plain way', *loads.values()], *rows])}\n\n"
        f"{table([['percent of our step', *kinds], *shares])}\n\n"
        f"Making the views is {views:.1f}% of the step in bf16, the optimizer {loss:.1f}%. `--train.compile`"
        f" makes the step {compiled['times_as_fast']:.2f} times as fast, costs"
        f" {compiled['seconds_at_the_start']:.0f} seconds at the start, {after} on this CPU."
    )


def busy() -> str:
    """Speed of each way of waiting, against torch's default."""
    results = read("busy")
    loads = {"0": "quiet", "1": "one beside", "2": "two beside", "training": "a training beside"}
    ways = [way for way in results["demo, 0 beside"]["times_default"] if way != "default"]
    rows = [
        [f"{name}, {words}", *(f"{results[key]['times_default'][way]:.2f}" for way in ways)]
        for task, name in (("demo", "small network"), ("head", "head on features"))
        for load, words in loads.items()
        if (key := f"{task}, {load} beside") in results
    ]
    return table([["times as fast as torch's default", *ways], *rows])


def busy_command() -> str:
    """Speed of `ropaws train` beside another training, with the number of threads chosen and without."""
    found = read("busy")["the command, training beside"]
    rows = [["steps per second, median", "alone", "a training beside", "of the fair share"]]
    for way, share in found["of_fair_share"].items():
        speeds = (found["steps_per_second"][f"{way}, {load} beside"] for load in ("0", "training"))
        rows.append([way, *(f"{statistics.median(speed):.2f}" for speed in speeds), f"{share:.0%}"])
    return f"{table(rows)}\n\nTurns: {found['turns']}, on a machine with other load."


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
    budgets, ours, rows = found["budgets"], found["ours"], found["rows"]
    cells = [(name, judge, ways) for name, judges in rows.items() for judge, ways in judges.items()]
    ways = list(next(iter(cells))[2])
    gains = [["pool, out-of-class", "judge", *(f"{budget}" for budget in budgets), "area"]]
    areas = [["pool, out-of-class", "judge", *ways]]
    for name, judge, by in cells:
        mine = [*by[ours]["over_random"], by[ours]["area_over_random"]]
        gains.append([name, judge, *(f"{mean:+.1f} ({low:+.1f} to {high:+.1f})" for mean, low, high in mine)])
        best = max(by[way]["area"] for way in ways)
        areas.append([name, judge, *(_bold(f"{by[w]['area']:.1f}", by[w]["area"] == best) for w in ways)])
    spent = [["pool, out-of-class", "strategy", *(f"{budget}" for budget in budgets)]]
    for name, judges in rows.items():
        by = next(iter(judges.values()))
        for way in dict.fromkeys(("random", found["verdict"]["best_rival"], ours)):
            shares = zip(by[way]["in_class"], by[way]["classes"], strict=True)
            spent.append([name, way, *(f"{inside:.0f} / {classes:.0f}" for inside, classes in shares)])
    return (
        "Accuracy over random choice in points, at 1 to 16 answers per class, and of the area under the"
        f" curve; mean and 95 % interval of {found['seeds']} paired pools"
        " (`python benchmarks/suggest.py`):\n\n"
        f"{table(gains)}\n\nArea under the curve (mean accuracy over the five budgets), in percent:\n\n"
        f"{table(areas)}\n\nAnswers that name a class / classes that have a label, in percent:\n\n"
        f"{table(spent)}\n\n{_suggest_verdict(found['verdict'], ours)}"
        f"\n\nOf the last {found['fresh']['seeds']} pools alone: {_suggest_verdict(found['fresh'], ours)}"
    )


def suggest_tuning() -> str:
    """The settings on which the choice was tuned: these figures flatter it, and still show where it fails."""
    found = read("suggest")["tuning"]
    ours, rival = found["ours"], found["verdict"]["best_rival"]
    rows = [
        ["pool, out-of-class", *map(str, found["budgets"]), f"area, {ours}", f"area, {rival}", "area, random"]
    ]
    for name, judges in found["rows"].items():
        (by,) = judges.values()
        gains = [f"{mean:+.1f} ({low:+.1f} to {high:+.1f})" for mean, low, high in by[ours]["over_random"]]
        rows.append([name, *gains, *(f"{by[way]['area']:.1f}" for way in (ours, rival, "random"))])
    return f"{table(rows)}\n\n{_suggest_verdict(found['verdict'], ours)}"


def _bold(text: str, yes: bool) -> str:
    return f"**{text}**" if yes else text


def _suggest_verdict(found: dict, ours: str) -> str:
    missed, below = found["not_ahead_early"], found["below_random"]
    means, rival = found["mean_area"], found["best_rival"]
    ahead = f"{found['early_cells'] - len(missed)} of {found['early_cells']}"
    where = f" (not at: {'; '.join(missed)})" if missed else ""
    return (
        f"With 1, 2 and 4 answers per class it is ahead of random choice, with an interval above zero, in"
        f" {ahead} cells{where}, and significantly below it in {len(below) or 'none'}"
        f"{' (' + '; '.join(below) + ')' if below else ''}. Mean area: {ours} {means[ours]:.1f}, the best"
        f" rival ({rival}) {means[rival]:.1f}, random {means['random']:.1f}."
    )


def propagation() -> str:
    sizes = read("propagation")["sizes"]
    rows = [["rows", "method", "seconds", "times ours", "memory, MB", "accuracy", "AUROC"]]
    for name in sorted(sizes, key=lambda name: (name.isdigit(), name.zfill(9))):
        shown = f"{int(name):,}" if name.isdigit() else name
        for method, found in sizes[name].items():
            ratio = f"{found['times ours']:.1f}" if "times ours" in found else ""
            figures = [f"{100 * found[key]:.1f}" for key in ("accuracy", "auroc")]
            memory = f"{found['megabytes']:,}"
            rows.append([shown, method, f"{found['seconds']:.3f}", ratio, memory, *figures])
    return table(rows)


LARGEST = "10000000"


def large_pools() -> str:
    rows = [["task", "rows", "seconds of CPU", "per million rows", "seconds", "memory, MB"]]
    for task, found in read("propagation")["scale"].items():
        for size, row in found["rows"].items():
            cpu, wall = row["cpu_seconds"], row["seconds"]
            figures = [f"{cpu:.1f}", f"{cpu / int(size) * 1e6:.1f}", f"{wall:.1f}", str(row["megabytes"])]
            rows.append([task, f"{int(size):,}", *figures])
    return table(rows)


def many_classes() -> str:
    rows = [["classes", "rows", "seconds", "seconds of CPU", "accuracy", "AUROC"]]
    for count, found in read("propagation")["classes"].items():
        figures = [f"{found['seconds']:.0f}", f"{found['cpu_seconds']:.0f}"]
        figures += [f"{100 * found[key]:.1f}" for key in ("accuracy", "auroc")]
        rows.append([f"{int(count):,}", f"{found['rows']:,}", *figures])
    return table(rows)


def real_pools() -> str:
    found = read("propagation")["real"]
    methods = [name for name in max(found.values(), key=len) if name != "rows"]
    rows = [["setting", "labels", "rows", *methods]]
    for name, row in found.items():
        setting, labels = name.rsplit(", ", 1)
        figures = [f"{100 * row[method]['accuracy']:.1f}" if method in row else "-" for method in methods]
        rows.append([setting, labels, f"{row['rows']:,}", *figures])
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


LITE0, DINOV2 = "features", "features_dinov2-small"  # results of the benchmark of features, by backbone


def feature_rows(results: str) -> list[tuple[str, str, dict]]:
    """Setting, labels per class, figures."""
    return [(*key.rsplit(", ", 1), found) for key, found in read(results)["rows"].items()]


def feature_table(figure: str, results: str = LITE0) -> str:
    """One figure of all methods; the best rival is in italics, ours is bold where it is at least as good."""
    rows: list[list[str]] = []
    for name, labels, found in feature_rows(results):
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


def feature_calibration(results: str = LITE0) -> str:
    """ECE of ours and of logistic regression, FPR95, estimated against true share, seconds."""
    head = ["setting", "labels", "ECE ours", "ECE LR", "FPR95 ours", "best FPR95", "share", "true", "seconds"]
    rows = [head]
    for name, labels, found in feature_rows(results):
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
                f"{ours['share']:.1f}"
                if found.get("draws") == 1
                else spread([ours["share"], ours["share_deviation"]]),
                f"{ours['true_share']:.0f}",
                f"{ours['seconds']:.0f}",
            ]
        )
    return table(rows)


def feature_bar(results: str = LITE0) -> str:
    """How often ours is ahead of, or level with, the best of nine rivals."""
    lines = []
    for labels in ("1", "4", "25"):
        mine = [found["best_rival"] for _, k, found in feature_rows(results) if k == labels]
        if not mine:  # not measured yet
            continue
        accuracy = [row["accuracy"]["ahead"] for row in mine]
        auroc = [row["auroc"]["ahead"] for row in mine if "auroc" in row]
        over = [
            found["methods"][OURS]["accuracy"] - found["methods"]["logistic regression"]["accuracy"]
            for _, k, found in feature_rows(results)
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


def small_data() -> str:
    """Ours against the plain ways on raw rows; bold where it is not behind."""
    rows = [["rows", "LR", "nearest label", "ours", "AUROC, LR", "cosine", "ours"]]
    for name, found in read("small_data")["rows"].items():
        cells = [name]
        for figure in ("accuracy", "auroc"):
            values = [found.get(f"{method}_{figure}") for method in ("regression", "cosine", "ours")]
            if None in values:
                cells += ["-"] * 3
                continue
            *rivals, mine = (spread([value["mean"], value["deviation"]]) for value in values)
            ahead = values[2]["mean"] >= max(value["mean"] for value in values[:2])
            cells += [*rivals, _bold(mine, ahead)]
        rows.append(cells)
    return table(rows)


def _signed(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{sum(values) / len(values):+.1f} ({min(values):+.1f} to {max(values):+.1f})"


def both_backbones() -> str:
    """Logistic regression, the best rival and ours on both networks, by the same code on the same labels."""
    results = {"DINOv2-S": DINOV2, "Lite0": "features_one_view"}
    found = {name: {row[:2]: row[2] for row in feature_rows(result)} for name, result in results.items()}
    columns = ("LR", "best rival", "ours")
    rows = [["setting", "labels", *(f"{column}, {name}" for name in found for column in columns)]]
    for key in dict.fromkeys(key for each in found.values() for key in each):
        cells: list[str] = []
        for each in found.values():
            cells += ["-"] * len(columns) if key not in each else _against_the_best(each[key])
        rows.append([*key, *cells])
    return table(rows)


def _against_the_best(found: dict) -> list[str]:
    methods, rival = found["methods"], found["best_rival"]["accuracy"]["rival"]
    ours, best = (methods[name]["accuracy"] for name in (OURS, rival))
    words = f"{best:.1f} {SHORT.get(rival, rival)}"
    return [f"{methods['logistic regression']['accuracy']:.1f}", words, _bold(f"{ours:.1f}", ours >= best)]


def two_backbones() -> str:
    """Accuracy of two networks alone and together."""
    found = read("two_backbones")["rows"]
    ways = list(next(iter(found.values())))
    rows = [["network", *(f"{way}, 1 / 4 / 25 labels" for way in ways)]]
    for name, row in found.items():
        rows.append([name, *(" / ".join(f"{value:.1f}" for value in row[way]) for way in ways)])
    return table(rows)


def embed_speed() -> str:
    """Images per second of `ropaws embed` and of the plain ways."""
    rows = [["network", "way", "images per CPU second", "ours is times as fast", "by CPU seconds"]]
    for name, found in read("embed_speed").items():
        for way, speed in found.get("images_per_cpu_second", {}).items() if isinstance(found, dict) else ():
            ratios = (found[key].get(way) for key in ("ours_times_as_fast", "ours_times_as_fast_by_cpu"))
            rows.append([name, way, f"{speed:.1f}", *("" if r is None else f"{r:.2f}" for r in ratios)])
    return table(rows)


def rival_trials() -> str:
    """Accuracy of linear classifiers by how they were trained; and what FixMatch selected."""
    pools = {name: cells for name, cells in read("rival_trials").items() if name != "machine"}
    rows = [["", *pools]]
    for way in next(iter(pools.values())):
        if way != "draws" and not way.endswith("selected"):
            shares = [cells.get(f"{way}, selected") for cells in pools.values()]
            figures = [f"{cells[way]:.1f}" for cells in pools.values()]
            words = ("" if share is None else f" ({share:.0f} %)" for share in shares)
            rows.append([way, *(figure + word for figure, word in zip(figures, words, strict=True))])
    return table(rows)


def trials() -> str:
    found = read("head_trials")["variants"]
    columns = {"accuracy, 4": "accuracy", "auroc, 4": "AUROC", "ece, 4": "ECE", "worst ece, 4": "worst ECE"}
    rows = [["variant", *columns.values()]]
    for name, row in found.items():
        rows.append([name, *(f"{row[column]:.1f}" for column in columns)])
    return table(rows)


IMBALANCE = {
    "logistic regression": "LR",
    "the same, balanced": "LR, balanced",
    "the same, with EM": "LR, EM",
    "class means": "class means",
    "LabelSpreading": "LabelSpreading",
    "SelfTraining": "SelfTraining",
    "OSLO": "OSLO",
    "RoPAWSClassifier, uniform": "uniform",
    "RoPAWSClassifier": "**auto**",
    "RoPAWSClassifier, true frequencies": "true",
}
IMBALANCE_LR = tuple(name for name, title in IMBALANCE.items() if title.startswith("LR"))
IMBALANCE_OURS, IMBALANCE_TRUE = "RoPAWSClassifier", "RoPAWSClassifier, true frequencies"


def _imbalance_head(name: str) -> list[str]:
    network, inside, junk, ratio, kind, _ = name.split(", ")
    return [
        network,
        f"{COLLECTION_NAMES.get(inside, inside)}, {junk}",
        ratio if ratio != "0" else "as it is",
        kind,
    ]


def imbalance() -> str:
    rows = [["features", "pool, out-of-class", "ratio", "labels", *IMBALANCE.values(), "draws"]]
    for name, row in read("imbalance")["settings"].items():
        figures = [f"{row[method]['accuracy']:.1f}" if method in row else "-" for method in IMBALANCE]
        rows.append([*_imbalance_head(name), *figures, str(row["draws"])])
    return table(rows)


def imbalance_more() -> str:
    """What accuracy does not show: of ours, and of the best form of logistic regression."""
    figures = {"balanced": "balanced accuracy", "rare": "recall of the rarest third", "auroc": "AUROC"}
    columns = [f"{title}, {who}" for title in figures.values() for who in ("best LR", "**auto**")]
    rows = [["features", "pool, out-of-class", "ratio", "labels", *columns, "share, error", "without label"]]
    for name, row in read("imbalance")["settings"].items():
        ours, found = row[IMBALANCE_OURS], []
        for key in figures:
            rivals = [row[method][key] for method in IMBALANCE_LR if key in row[method]]
            found += [f"{max(rivals):.1f}", f"{ours[key]:.1f}"] if key in ours else ["-", "-"]
        rest = [f"{ours['share_error']:+.0f}", f"{ours['unknown']:.0f} %"]
        rows.append([*_imbalance_head(name), *found, *rest])
    return table(rows)


def imbalance_bar() -> str:
    """How often ours is behind logistic regression, and how far it is from the true frequencies."""
    settings = read("imbalance")["settings"]
    ahead = {
        name: row[IMBALANCE_OURS]["accuracy"] - max(row[method]["accuracy"] for method in IMBALANCE_LR)
        for name, row in settings.items()
    }
    rows = [
        [
            "labels",
            "settings",
            "ahead of the best LR, mean",
            "least",
            "behind by more than 0.5",
            "behind true",
        ]
    ]
    for kind in ("as the pool", "equal", "reversed"):
        names = [name for name in ahead if name.split(", ")[4] == kind]
        if not names:
            continue
        gaps = [
            settings[name][IMBALANCE_TRUE]["accuracy"] - settings[name][IMBALANCE_OURS]["accuracy"]
            for name in names
            if IMBALANCE_TRUE in settings[name]
        ]
        leads = [ahead[name] for name in names]
        mean = f"{sum(leads) / len(leads):+.1f}"
        behind = f"{sum(gaps) / len(gaps):.1f}" if gaps else "-"
        rows.append(
            [
                kind,
                str(len(names)),
                mean,
                f"{min(leads):+.1f}",
                str(sum(lead < -0.5 for lead in leads)),
                behind,
            ]
        )
    return table(rows)


FLAG_COLUMNS = {
    "draws": "draws",
    "covers": "interval holds",
    "width": "its width",
    "share bias": "share, bias",
    "auroc": "AUROC",
    "outside_flagged": "out-of-class flagged",
    "inside_flagged": "in-class flagged",
    "one_sided": "one-sided",
    "one_sided_silent": "without a line",
    "apart": "AUROC of 99 or more",
    "apart_outside_flagged": "out-of-class flagged there",
    "apart_inside_flagged": "in-class flagged there",
}


def flag_and_share() -> str:
    rows = [["pools", *FLAG_COLUMNS.values()]]
    for name, row in read("flag_and_share")["groups"].items():
        values = ["-" if row[key] is None else f"{row[key]:.0f}" for key in FLAG_COLUMNS]
        rows.append([name, *values])
    return table(rows)


def discover() -> str:
    """Found and true number of kinds, and accuracy beside k-means with the true number and HDBSCAN."""
    head = ["images, features", "out-of-class", "kinds", "found, by draw"]
    rows = [[*head, "accuracy", "k-means, true number", "HDBSCAN finds", "HDBSCAN"]]
    for name, found in read("discover")["settings"].items():
        for way in ("told", "judged"):
            row = found[way]
            kinds = ", ".join(map(str, row["kinds"]))
            ours, given = (f"{100 * row[key]:.1f}" for key in ("accuracy", "k-means"))
            dense = [f"{row['hdbscan kinds median']:g}", f"{100 * row['hdbscan']:.1f}"]
            rows.append([name, way, str(found["true"]), kinds, ours, given, *dense])
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


COLLECTION_NAMES = {"cifar10": "CIFAR-10", "garments": "garments", "solar": "solar cells", "xrays": "X-rays"}
FLIPS = ("10, any", "20, any", "10, similar", "20, similar")


def label_errors() -> str:
    """AUPRC and precision of our ranking, and how far it is ahead of the best of cleanlab's."""
    rows = read("label_errors")["rows"]
    parts = [_ranking_means(rows)]
    for figure, title in (("auprc", "AUPRC"), ("precision", "Precision at the number of errors")):
        found: dict[tuple[str, str], dict[str, str]] = {}
        verdicts = {"ahead": 0, "level": 0, "behind": 0}
        for key, row in rows.items():
            name, labels, flip = key.split(", ", 2)
            mean, low, high = (100 * value for value in row["cleanlab"][figure]["ahead"])
            verdicts["ahead" if low > 0 else "behind" if high < 0 else "level"] += 1
            ours = 100 * row["rankings"]["ours"][figure]
            text = f"{ours:.1f}, {mean:+.1f} ({low:+.1f} to {high:+.1f})"
            found.setdefault((name, labels), {})[flip] = _bold(text, low > 0)
        head = ["collection", "labels", *(f"{flip.replace(', ', ' % to ')}" for flip in FLIPS)]
        body = [
            [COLLECTION_NAMES.get(name, name), labels, *(cells.get(flip, "-") for flip in FLIPS)]
            for (name, labels), cells in found.items()
        ]
        counts = ", ".join(f"{word} in {count}" for word, count in verdicts.items())
        parts.append(f"**{title}**: {counts} of {len(rows)} settings.\n\n{table([head, *body])}")
    return "\n\n".join(parts)


def label_checks() -> str:
    """Labels that are named as suspected errors, and how many of them are wrong; sums over collections."""
    rows = [
        [
            "labels per class",
            "flipped",
            "labels",
            "wrong",
            "contradicted",
            "by chance",
            "named",
            "wrong of these",
        ]
    ]
    collections = read("label_checks")["collections"].values()
    for group in zip(*collections, strict=True):
        sums = [sum(row[key] for row in group) for key in CHECKED]
        share = f"{100 * group[0]['rate']:.0f} %"
        rows.append([str(group[0]["per class"]), share, *(f"{value:.1f}" for value in sums)])
    return table(rows)


CHECKED = ("labels", "wrong", "contradicted", "by chance", "named", "named and wrong")


def _ranking_means(rows: dict) -> str:
    """Every ranking, mean over all settings with so many labels per class."""
    counts = sorted({key.split(", ")[1] for key in rows}, key=int)
    names = list(next(iter(rows.values()))["rankings"])
    shown = {"ours": "ours", "former": "soft nearest neighbors, as before"}
    figures = {"auprc": "AUPRC", "precision": "precision", "f1": "F1 of the list"}
    body = []
    for name in names:
        cells = [
            [row["rankings"][name][figure] for key, row in rows.items() if key.split(", ")[1] == count]
            for figure in figures
            for count in counts
        ]
        label = shown.get(name, f"cleanlab, {name.replace('_', ' ')}")
        body.append([label, *(f"{100 * sum(values) / len(values):.1f}" for values in cells)])
    return table([["ranking", *(f"{f}, {count}" for f in figures.values() for count in counts)], *body])


def accuracy_estimate(figure: str) -> str:
    """Bias and coverage over all pools, by how labels were chosen and how many."""
    results = read("accuracy_estimate")
    groups = results["groups"]
    head = ["labels chosen", "labels", "true"]
    head += ["naive: bias", "holds", "corrected: bias", "holds", "width", "audit: bias", "holds", "width"]
    body = []
    for choice in ("random", "k-means", "suggested", "all"):
        budgets = ("20", "40", "80", "160") if choice != "all" else ("all",)
        for budget in budgets:
            naive, corrected, audit = (
                groups.get(f"all; {choice}; {budget}; {figure}, {way}")
                for way in ("naive", "corrected", "audit")
            )
            cells = [*_coverage(naive)[:2], *_coverage(corrected), *_coverage(audit)]
            body.append([choice, budget, f"{audit['truth']:.0f}", *cells])
    return table([head, *body])


def _coverage(group: dict | None) -> list[str]:
    if group is None:
        return ["-"] * 3
    return [f"{group['bias']:+.1f}", f"{group['holds']:.0f} %", f"{group['width']:.0f}"]


def audit_size(within: float, expected: float) -> int:
    """The number of labels from which on audit_half_width stays at or below `within`."""
    # Rounding to whole answers lets the half-width rise a little now and then: look back from far enough.
    n = round(1 / within**2) + round(2 / within)
    while n > 1 and audit_half_width(n - 1, expected) <= within:
        n -= 1
    return n


def audit_sizes() -> str:
    """How many labels are enough, and how far 30 of them reach, at some accuracies."""
    shares = (0.5, 0.7, 0.8, 0.9, 0.95)
    head = ["share of right answers", *(f"{share:.0%}" for share in shares)]
    sizes = [
        [f"labels to know it to within {within:.0%}", *(str(audit_size(within, share)) for share in shares)]
        for within in (0.05, 0.10, 0.15)
    ]
    widths = [
        [f"half-width of {n} labels", *(f"{audit_half_width(n, share):.1%}" for share in shares)]
        for n in (30, 50, 100)
    ]
    return table([head, *sizes, *widths])


def explore_map() -> str:
    found = read("explore_map")
    views = {"whole_map": "whole map", "while_moving": "while it is moved", "half_selected": "half selected"}
    ways = {"canvas": "pixels that the page writes", "webgl": "WebGL2, computed by the processor"}
    rows = [["images", "drawn by", *views.values(), "frames per second while it is moved"]]
    for points, times in found["milliseconds"].items():
        for way, name in ways.items():
            if drawn := times[way]:
                cells = [
                    f"{drawn[view]['draw']['median']:g} ({drawn[view]['draw']['least']:g})" for view in views
                ]
                gaps = drawn["while_moving"]["between_frames"]
                frames = f"{1000 / gaps['median']:.0f} ({1000 / gaps['least']:.0f})"
                rows.append([f"{int(points):,}", name, *cells, frames])
    width, height = found["pixels"]
    head = (
        f"Milliseconds of a frame at {width} x {height} pixels, median (fastest), in {found['browser']}, on"
        f" {found['cores']} cores with a load average of {found['load_average']} from other programs (`python"
        " web-check/map_speed.py`). A graphics card was not measured:"
    )
    whats = {
        "filter": "a filter",
        "recolor": "other colors",
        "names": "names of classes",
        "contours": "contours",
        "hover": "the image below the cursor",
    }
    rest = [["images", *whats.values()]]
    rest += [
        [f"{int(points):,}", *(f"{times[what]:g}" for what in whats)]
        for points, times in found["milliseconds"].items()
    ]
    return f"{head}\n\n{table(rows)}\n\nMilliseconds of what the page computes besides:\n\n{table(rest)}"


def million() -> str:
    found = read("million")["images"]
    stages = ("check", "embed", "train", "predict", "suggest", "explore")
    shown = [stage for stage in stages if any(stage in measured for measured in found.values())]
    rows = [["", *(f"{int(images):,} images" for images in found)]]
    for stage in shown:
        cells = (measured.get(stage) for measured in found.values())
        rows.append([f"`{stage}`", *map(_million_cell, cells)])
    sums = [
        [measured.get(stage, {}).get("cpu_seconds") for stage in stages[:5]] for measured in found.values()
    ]
    if any(None not in parts for parts in sums):
        whole = ("-" if None in parts else f"{sum(parts) / 60:.0f} min" for parts in sums)
        rows.append(["all but `explore`", *whole])
    loads = [cell["load_average"] for measured in found.values() for cell in measured.values()]
    return (
        "Processor seconds of each command with its workers (not counted in all rows), seconds by the clock"
        " in parentheses, peak memory: JPEGs of 32 pixels in tar shards, small network, two cores beside"
        f" other programs (load average {min(loads):.0f} to {max(loads):.0f}); `python"
        f" benchmarks/million.py`:\n\n{table(rows)}"
    )


def _million_cell(cell: dict[str, float] | None) -> str:
    if cell is None:
        return "-"
    computed = f"{cell['cpu_seconds']:,.0f} s " if "cpu_seconds" in cell else ""
    return f"{computed}({cell['seconds']:,.0f} s), {cell['megabytes']:,} MB"


def near_duplicates() -> str:
    rows = [["rows", "near duplicates", "recall", "by all pairs", "neighbors by the index", "recall"]]
    for count, found in read("near_duplicates")["rows"].items():
        seconds = (
            f"{found[key]:g}" if key in found else "-" for key in ("near_duplicates", "all_pairs", "index")
        )
        shares = (f"{found[key]:.1%}" if key in found else "-" for key in ("recall", "index_recall"))
        took, pairs, index = seconds
        recall, index_recall = shares
        rows.append([f"{int(count):,}", took, recall, pairs, index, index_recall])
    return (
        "Seconds of one core (`python benchmarks/near_duplicates.py`, 256 dimensions). Up to 100,000 images"
        " near duplicates, and neighbors in tables, are exact; above that both come from an index:\n\n"
        + table(rows)
    )


def pool_sources() -> str:
    found = read("pool_sources")
    rows = [["source", "images per second", "per second of CPU"]]
    for name, speed in found["sources"].items():
        rows.append([name, f"{speed['images_per_second']:,}", f"{speed['per_cpu_second']:,}"])
    return (
        f"Listing, decoding and scaling {found['images']:,} JPEGs of 256 x 192 in one process, the fastest of"
        f" three turns on two cores beside other programs (load average {found['load_average']:.0f}), and the"
        " loaders of webdataset and datasets on the same files (`python benchmarks/pool_sources.py`):\n\n"
        + table(rows)
    )


def ray_scale() -> str:
    found = read("ray_scale")
    rows = [["", "images per second", "seconds from start to end"]]
    for way, took in found["ways"].items():
        whole = f"{took['seconds']:.0f}" if "seconds" in took else "-"
        rows.append([way, f"{took['images_per_second']:,}", whole])
    return (
        f"{found['images']:,} small images on two cores (load average"
        f" {found['load_average']:.0f}; `python benchmarks/ray_scale.py`):\n\n" + table(rows)
    )


BILLION, WORKERS = 1_000_000_000, 64
PRICES = {"a CPU core": 0.05, "a GPU": 1.0}  # dollars an hour, assumed


def billion() -> str:
    """Arithmetic alone: nothing of it is measured."""
    costs = [f"dollars, {worker} at {price:g} an hour" for worker, price in PRICES.items()]
    rows = [["images per second of a worker", "worker hours", f"hours of {WORKERS} workers", *costs]]
    for speed in (50, 500, 5000):
        hours = BILLION / speed / 3600
        dollars = (f"{hours * price:,.0f}" for price in PRICES.values())
        rows.append([f"{speed:,}", f"{hours:,.0f}", f"{hours / WORKERS:.1f}", *dollars])
    features, labels = BILLION * 384 * 2 / 1e12, BILLION * 100 / 1e12
    return (
        f"{table(rows)}\n\nFeatures of 384 numbers in half precision take {features:.2f} TB, labels of about"
        f" 100 bytes {labels:.1f} TB."
    )


def explore_refit() -> str:
    found = read("explore_refit")
    names = ("first suggestions", "refit", "accuracy estimate", "map")
    rows = [["images", *names, "page of a filter, ms"]]
    for images, times in found["seconds"].items():
        computed = found["cpu_seconds"].get(images, {})
        cells = [
            "-" if name not in times
            else f"{times[name]:g}" + (f" ({computed[name]:g})" if name in computed else "")
            for name in names
        ]  # fmt: skip
        answers = found["milliseconds"].get(images, {}).get("answers")
        rows.append([f"{int(images):,}", *cells, "-" if answers is None else f"{answers:.0f}"])
    return table(rows)


def time_to_accuracy() -> str:
    """Seconds to the accuracy that the paper's settings end with, means over the seeds."""
    names = {"garments": "garments, from scratch", "features": "CIFAR-10 + CIFAR-100, head on features"}
    results = read("time_to_accuracy")
    head = ["", "paper: accuracy at its end", "steps", "seconds", "first touched after",
            "ours: reached after", "times as fast as its whole schedule", "as its first touch",
            "ours: accuracy at its end", "steps", "seconds"]  # fmt: skip
    rows = [head]
    for key, name in names.items():
        found, seeds = results[key], results[key]["seeds"]

        def mean(column: str, seeds: list = seeds) -> float:
            return statistics.mean(seed[column] for seed in seeds)

        reached = all(seed["ours"] is not None for seed in seeds)
        whole, touch = (
            ", ".join("never" if seed[key] is None else f"{seed[key]:.1f}" for seed in seeds)
            for key in ("times_whole", "times")
        )
        rows.append(
            [
                name,
                f"{100 * mean('target'):.1f}",
                f"{found['steps']['paper']:,}",
                f"{mean('paper_end'):.1f}",
                f"{mean('paper_first'):.1f} s",
                f"{mean('ours'):.1f} s" if reached else "not by every seed",
                whole,
                touch,
                f"{100 * mean('final'):.1f}",
                f"{found['steps']['ours']:,}",
                f"{mean('ours_end'):.1f}",
            ]
        )
    extra = results["features"]
    whole, once = extra["whole_network"], extra["extraction"]
    hours = whole["seconds"] * whole["steps"] / 3600
    words = (
        f"On the features both begin after the {once['seconds']:.0f} seconds in which those of"
        f" {once['images']:,} images in five views each are computed; they are not in the table. The paper's"
        f" own way, all weights on eight views, would take {whole['seconds']:.0f} seconds per step:"
        f" {hours:.0f} hours for as many steps."
    )
    return f"{table(rows)}\n\n{words}"


SECTIONS = {
    "time-to-accuracy": time_to_accuracy,
    "explore-map": explore_map,
    "explore-refit": explore_refit,
    "million": million,
    "near-duplicates": near_duplicates,
    "pool-sources": pool_sources,
    "ray-scale": ray_scale,
    "billion": billion,
    "label-errors": label_errors,
    "label-checks": label_checks,
    "accuracy-in-class": lambda: accuracy_estimate("in-class"),
    "accuracy-overall": lambda: accuracy_estimate("overall"),
    "audit-sizes": audit_sizes,
    "scratch": scratch,
    "discover": discover,
    "imbalance": imbalance,
    "imbalance-more": imbalance_more,
    "imbalance-bar": imbalance_bar,
    "flag-and-share": flag_and_share,
    "features-accuracy": lambda: feature_table("accuracy"),
    "features-auroc": lambda: feature_table("auroc"),
    "features-calibration": feature_calibration,
    "features-bar": feature_bar,
    "both-backbones": both_backbones,
    "dinov2-accuracy": lambda: feature_table("accuracy", DINOV2),
    "dinov2-auroc": lambda: feature_table("auroc", DINOV2),
    "dinov2-calibration": lambda: feature_calibration(DINOV2),
    "dinov2-bar": lambda: feature_bar(DINOV2),
    "two-backbones": two_backbones,
    "embed-speed": embed_speed,
    "trials": trials,
    "rival-trials": rival_trials,
    "demo": demo_table,
    "ablation": ablation,
    "speed": speed,
    "reference-step": reference_step,
    "plain-way": plain_way,
    "view-worth": view_worth,
    "backbone-views": backbone_views,
    "busy": busy,
    "busy-command": busy_command,
    "posterior": posterior,
    "soak": soak,
    "paper-main": paper_main,
    "paper-ablation": paper_ablation,
    "paper-steps": paper_steps,
    "paper-propagation": paper_propagation,
    "suggest": suggest,
    "suggest-tuning": suggest_tuning,
    "propagation": propagation,
    "large-pools": large_pools,
    "many-classes": many_classes,
    "real-pools": real_pools,
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


def export_files() -> str:
    results = read("export")
    speed, sizes, command = results["times_as_fast"], results["megabytes"], results["command"]
    verified = results["verification"]
    own, apart = verified.get("run_precision", {}), max(verified["differences"].values())
    rows = [["", "times as fast", "MB"]]
    rows += [
        [name, f"{value:.2f}", f"{sizes[name]:.1f}" if name in sizes else ""] for name, value in speed.items()
    ]
    return (
        f"{table(rows)}\n\nLabeling {command['images']} JPEGs of no class, everything from the start of the"
        f" program on, the script takes 1/{command['script_times_as_fast']:.2f} of the time of"
        f" `ropaws predict`, and {command['same_answer']:.1%} of the answers are the same. The run computes"
        f" in {own.get('type', 'float32')} here, the file in float32; in float32 both differ by at most"
        f" {apart:.1e} ({verified['on']})."
    )


def export_int8() -> str:
    results = read("export")
    rows = [["int8", "accuracy", "float32", "same label", "same side of the threshold"]]
    for name, found in results["int8"].items():
        shares = (found[key] for key in ("accuracy", "accuracy_fp32", "same_label", "same_out_of_class"))
        rows.append([name, *(f"{share:.1%}" for share in shares)])
    images = next(iter(results["int8"].values()))["images"]
    kept = "kept" if results["int8_kept"] else "refused"
    return f"{table(rows)}\n\nOn {images} test images; with the limit of half a point this file is {kept}."


HOSTILE = {  # beginning of a reader's name: row of the table
    "config.json": "`config.json`, then the network is built and used",
    "page: ": "any JSON file of a run, shown by `report` and `compare`",
    "image ": "images: PNG, JPEG, WebP, GIF, BMP, TIFF",
    "not an image ": "other formats under the names of images",
    "weights ": "weight files for `--init`",
    "features ": "feature files",
    "table ": "tables, `.csv` and `.parquet`",
    "commands": "whole commands, also with pipes, devices, links and holes",
}


SCHEDULED = {
    "supervised": "supervised",
    "paws": "PAWS",
    "ropaws-paper": "RoPAWS, as in the paper",
    "ropaws": "RoPAWS, our settings from scratch",
}


SCHEDULE_MEASURES = (*MEASURES, "pseudo_accuracy", "weight_in", "weight_out")
MEASURE_HEADS = (
    "accuracy",
    "AUROC",
    "conf. in",
    "conf. out",
    "ECE",
    "pseudo-labels",
    "weight in",
    "weight out",
)


def scheduled_cells() -> list[dict]:
    """By pool, labels and epochs."""
    cells = read("long_schedule")["cells"]
    pools = list(dict.fromkeys(cell["data"] for cell in cells))
    return sorted(cells, key=lambda cell: (pools.index(cell["data"]), -cell["labels"], cell["epochs"]))


def long_schedule() -> str:
    """The end of every finished run; means over seeds where there are several."""
    groups: dict[tuple, list[dict]] = {}
    for cell in scheduled_cells():
        groups.setdefault((cell["data"], cell["labels"], cell["epochs"], cell["entry"]), []).append(cell)
    rows = [["pool", "labels", "epochs", "steps", "method", "seeds", *MEASURE_HEADS]]
    for (data, labels, epochs, entry), cells in groups.items():
        ends = [cell["curve"][-1] for cell in cells]
        name = SCHEDULED.get(entry, entry)
        shown = [f"{cells[0]['steps']:,}", name, str(len(cells)), *_at_the_end(ends)]
        rows.append([data, str(labels), str(epochs), *shown])
    return table(rows) if groups else "No run is finished yet."


def _at_the_end(ends: list[dict]) -> list[str]:
    """Means over seeds. A method that takes all images whole has no weights to show."""
    known = set(ends[0]) - ({"weight_in", "weight_out"} if ends[0].get("selected") == 1 else set())
    return [
        _mean_percent([end[name] for end in ends]) if name in known else "-" for name in SCHEDULE_MEASURES
    ]


def long_schedule_gain() -> str:
    """RoPAWS as in the paper minus PAWS, seed by seed."""
    ends: dict[tuple, dict[str, dict[int, dict]]] = {}
    for cell in scheduled_cells():
        schedule = ends.setdefault((cell["data"], cell["labels"], cell["epochs"]), {})
        schedule.setdefault(cell["entry"], {})[cell["seed"]] = cell["curve"][-1]
    measures = {"accuracy": "accuracy", "auroc": "AUROC", "confidence_out": "conf. out"}
    measures["pseudo_accuracy"] = "pseudo-labels"
    rows = [["pool", "labels", "epochs", "seeds", *measures.values()]]
    for (data, labels, epochs), entries in ends.items():
        plain, robust = entries.get("paws", {}), entries.get("ropaws-paper", {})
        if seeds := sorted(set(plain) & set(robust)):
            gains = [
                [robust[seed][name] - plain[seed][name] for seed in seeds if name in plain[seed]]
                for name in measures
            ]
            shown = [_gain(values) if values else "-" for values in gains]
            rows.append([data, str(labels), str(epochs), str(len(seeds)), *shown])
    return table(rows) if len(rows) > 1 else "No pair is finished yet."


PARTS = {
    "no density": "without semi-supervised density",
    "no prior": "without in-domain prior: density alone",
    "no reweighting": "density and prior, without reweighting",
    "weighted me-max": "with weighted me-max (ours)",
    "tau_prior 0.5": "tau_prior 0.5",
    "tau_prior auto": "tau_prior auto (ours)",
}


def long_schedule_parts() -> str:
    """RoPAWS with one change each beside what it changes, on the draws that all rows of a schedule share."""
    ends: dict[tuple, dict[str, dict[int, dict]]] = {}
    for cell in scheduled_cells():
        schedule = ends.setdefault((cell["data"], cell["labels"], cell["epochs"]), {})
        schedule.setdefault(cell["entry"], {})[cell["seed"]] = cell["curve"][-1]
    rows = [["pool", "labels", "epochs", "method", "seeds", *MEASURE_HEADS]]
    shown = {"paws": SCHEDULED["paws"], "ropaws-paper": SCHEDULED["ropaws-paper"], **PARTS}
    for (data, labels, epochs), entries in ends.items():
        if not set(PARTS) & set(entries):
            continue
        seeds = set.intersection(*(set(entries[entry]) for entry in shown if entry in entries))
        for entry in shown:
            if entry in entries:
                figures = _at_the_end([entries[entry][seed] for seed in sorted(seeds)])
                rows.append([data, str(labels), str(epochs), shown[entry], str(len(seeds)), *figures])
    return table(rows) if len(rows) > 1 else "No change is finished yet."


def _gain(values: list[float]) -> str:
    """Points, and those of each seed where there are several."""
    mean = f"{100 * statistics.mean(values):+.1f}"
    each = ", ".join(f"{100 * value:+.1f}" for value in values)
    return mean if len(values) == 1 else f"{mean} ({each})"


def _mean_percent(values: list[float]) -> str:
    mean = 100 * statistics.mean(values)
    return f"{mean:.1f}" if len(values) == 1 else f"{mean:.1f}±{100 * statistics.stdev(values):.1f}"


def long_schedule_left() -> str:
    found = read("long_schedule")
    begun = ", ".join(f"`{name}` ({steps:,} steps)" for name, steps in found["begun"].items()) or "none"
    done = len(found["cells"])
    total = done + len(found["begun"]) + len(found["waiting"])
    return f"{done} of {total} runs are finished. Begun: {begun}. The other {len(found['waiting'])} wait."


BUDGET_MEASURES = {"accuracy": "accuracy", "auroc": "AUROC", "confidence_out": "conf. out", "ece": "ECE"}


def scratch_budget() -> str:
    """Each method of each budget, and what it is ahead of the supervised baseline on the draws of both."""
    found: dict[tuple, dict[str, dict[int, dict]]] = {}
    for row in read("scratch_budget")["rows"]:
        methods = found.setdefault((row["size"], row["minutes"], row["labels"]), {})
        methods.setdefault(row["method"], {})[row["seed"]] = row
    head = ["pixels", "minutes", "labels", "method", "steps", "seconds", "draws", *BUDGET_MEASURES.values()]
    rows = [[*head, "accuracy, minus supervised"]]
    for key, methods in sorted(found.items()):
        for method, by_seed in methods.items():
            ends = list(by_seed.values())
            seconds = f"{statistics.mean(end['cpu_seconds'] for end in ends):.0f}"
            shown = [method, f"{ends[0]['steps']:,}", seconds, str(len(ends))]
            figures = [_mean_percent([end[name] for end in ends]) for name in BUDGET_MEASURES]
            gain = _gain_over(by_seed, methods.get("supervised", {})) if method != "supervised" else "-"
            rows.append([*map(str, key), *shown, *figures, gain])
    return table(rows)


def _gain_over(ours: dict[int, dict], plain: dict[int, dict]) -> str:
    """In accuracy, on the draws of both."""
    values = [ours[seed]["accuracy"] - plain[seed]["accuracy"] for seed in sorted(set(ours) & set(plain))]
    return _gain(values) if values else "-"


def scratch_budget_left() -> str:
    found = read("scratch_budget")
    seconds = ", ".join(f"{value:.3f} s ({name})" for name, value in found["step_seconds"].items())
    done, left = len(found["rows"]), len(found["waiting"])
    return f"A step takes {seconds} of one thread. {done} of {done + left} runs are finished."


def full_scale() -> str:
    """A row for each kind of step, with the recipes that have it."""
    found = read("full_scale")
    gpus = list(found["published"])
    head = ["recipes", "processes", "unlabeled", "supports", "memory, GB", "TFLOP", "messages", "MB"]
    rows = [[*head, "steps", *(f"at least, {gpu}" for gpu in gpus), "at SwAV's pace"]]
    for row in found["rows"].values():
        first, *more = row["recipes"]
        names = f"`{first}`" + (
            f" and {len(more)} more" if len(more) > 1 else "".join(f", `{m}`" for m in more)
        )
        steps, hours = row["steps"].values(), row["hours"].values()
        rows.append(
            [
                names,
                str(row["processes"]),
                f"{row['unlabeled']} x {row['views']}",
                f"{row['labeled']:,}",
                f"{row['memory_gb']:.1f}",
                f"{row['tflops']:.1f}",
                str(row["messages"]) if row["processes"] > 1 else "-",
                f"{row['received_mb']:.0f}" if row["processes"] > 1 else "-",
                _from_to([f"{value:,}" for value in sorted(steps)]),
                *(
                    _from_to([f"{value:.1f}" for value in sorted(each[gpu] for each in hours)])
                    for gpu in gpus
                ),
                _from_to([f"{value:.0f}" for value in sorted(row["hours_like_swav"].values())] or ["-"]),
            ]
        )
    return table(rows)


def full_scale_hours() -> str:
    """Of every recipe; those of one kind and length share a row."""
    found = read("full_scale")
    rows = [["recipes", "steps", *(f"at least, {gpu}" for gpu in found["published"]), "at SwAV's pace"]]
    for row in found["rows"].values():
        for steps in sorted(set(row["steps"].values())):
            names = [name for name in row["recipes"] if row["steps"][name] == steps]
            hours, pace = row["hours"][names[0]], row["hours_like_swav"].get(names[0])
            shown = [f"{hours[gpu]:.1f}" for gpu in found["published"]]
            listed = ", ".join(f"`{name}`" for name in names)
            rows.append([listed, f"{steps:,}", *shown, "-" if pace is None else f"{pace:.0f}"])
    return table(rows)


def _from_to(values: list[str]) -> str:
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


BENCHES = {
    "hostile": hostile,
    "small-data": small_data,
    "bench-features": lambda: bench("bench_features"),
    "bench-garments": lambda: bench("bench_garments"),
    "bench-scratch": lambda: bench("bench_scratch"),
    "bench-control": bench_control,
    "bench-shift": bench_shift,
    "methods-cost": methods_cost,
    "reading-ways": reading_ways,
    "export-files": export_files,
    "export-int8": export_int8,
    "long-schedule": long_schedule,
    "long-schedule-gain": long_schedule_gain,
    "long-schedule-parts": long_schedule_parts,
    "long-schedule-left": long_schedule_left,
    "scratch-budget": scratch_budget,
    "scratch-budget-left": scratch_budget_left,
    "full-scale": full_scale,
    "full-scale-hours": full_scale_hours,
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
