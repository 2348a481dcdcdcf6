"""Write the tables of the README from benchmarks/results/, so that no figure is typed by hand.

python scripts/readme_tables.py           writes them
python scripts/readme_tables.py --check   exit code 1 if the README is not what the results say
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


SECTIONS = {
    "demo": lambda: comparison("demo"),
    "ablation": ablation,
    "speed": speed,
}


def fill(text: str) -> str:
    for name, section in SECTIONS.items():
        pattern = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
        content = section()
        text = pattern.sub(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = fill(old)
    if "--check" in sys.argv and new != old:
        sys.exit("README.md does not show benchmarks/results; run python scripts/readme_tables.py")
    readme.write_text(new)
