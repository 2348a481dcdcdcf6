"""Write the tables of the README and docs from benchmarks/results/, so that no figure is typed by hand.

python scripts/readme_tables.py           writes them
python scripts/readme_tables.py --check   exit code 1 if a page is not what the results say
"""

import json
import re
import sys
from pathlib import Path

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
            f" from the cache; training on this CPU waits for pictures at most {wait:.1%} of the time.",
            f"- A RoPAWS step costs {cifar:.2f} times a PAWS step in the paper's CIFAR setting;"
            f" the loss part alone, at the paper's ImageNet size, {imagenet:.2f} times.",
            f"- On Linux CPUs a step of the demo is {step['keep_freed_memory_speedup']} times as fast"
            " because freed memory is kept.",
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
        f" at random moments, corrupt pictures ({results['corrupt_images_listed']} listed) and a slow disk;"
        f" {results['steps_taken_again']} steps since a checkpoint were taken again,"
        f" {results['steps_lost_beyond_a_checkpoint']} were lost, and the losses and weights of the quiet run"
        f" were {'met to the bit' if same else 'not met'}."
    )


SECTIONS = {
    "demo": lambda: comparison("demo"),
    "ablation": ablation,
    "speed": speed,
    "posterior": posterior,
    "communication": communication,
    "scaling": scaling,
    "soak": soak,
}


def fill(text: str) -> str:
    for name, section in SECTIONS.items():
        if f"<!-- {name}: " not in text:
            continue
        pattern = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
        content = section()
        text = pattern.sub(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
    return text


if __name__ == "__main__":
    for page in (ROOT / "README.md", ROOT / "docs/scale.md"):
        old = page.read_text()
        new = fill(old)
        if "--check" in sys.argv and new != old:
            sys.exit(f"{page.name} does not show benchmarks/results; run python scripts/readme_tables.py")
        page.write_text(new)
