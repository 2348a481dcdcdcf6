"""Which part of RoPAWS does what on the embedded data: variants of the method, three seeds each.

python benchmarks/demo_ablation.py [--seeds 3] [--runs runs/demo-ablation]

With the demo's images, network and steps. About ten minutes on two cores. Finished runs are used
again, so it can be interrupted. Writes results/demo_ablation.json.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from contrast_alone import ContrastAlone
from rich.console import Console
from timing import write_results

from ropaws import recipes
from ropaws.bench.side_by_side import Job, default_workers, train_all
from ropaws.config import RunConfig
from ropaws.methods import PAWS, Method, RoPAWS, Supervised
from ropaws.report.tables import COLUMNS, comparison_rows

BASE = recipes.demo()
DEMO = BASE.method
assert isinstance(DEMO, RoPAWS)
METHODS: dict[str, Method] = {
    "supervised, by distances": Supervised(),
    "supervised": Supervised(judge="pool"),
    "contrast alone": ContrastAlone(**vars(DEMO)),
    "paws, without contrast": PAWS(judge="pool"),
    "paws": PAWS(judge="pool", contrast_weight=DEMO.contrast_weight),
    "ropaws as in the paper, without contrast": RoPAWS(prior_temperature=0.1, judge="pool"),
    "ropaws, without contrast": replace(DEMO, contrast_weight=0.0),
    "ropaws, by distances": replace(DEMO, judge="embedding"),
    "ropaws": DEMO,
}
VARIANTS: dict[str, RunConfig] = {
    # The crops of the demo serve the contrast; these serve a baseline without it.
    "supervised, milder crops": replace(
        BASE, method=METHODS["supervised"], augment=recipes.scratch().augment
    ),
    **{name: replace(BASE, method=method) for name, method in METHODS.items()},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/demo-ablation"))
    options = parser.parse_args()
    console = Console()
    methods: dict[str, dict[str, list[float]]] = {name: {key: [] for key in COLUMNS} for name in VARIANTS}
    named = [(name, seed) for seed in range(options.seeds) for name in VARIANTS]
    numbers = {name: number for number, name in enumerate(VARIANTS)}
    jobs = [
        Job(
            recipes.with_seed(VARIANTS[name], seed),
            options.runs / f"variant{numbers[name]}-seed{seed}",
        )
        for name, seed in named
    ]
    found = train_all(jobs, workers=default_workers(len(jobs)), console=console)
    for (name, _), figures in zip(named, found, strict=True):
        for key, values in methods[name].items():
            values.append(figures[key])
    for row in comparison_rows(methods):
        console.print("  ".join(row))
    write_results("demo_ablation", {"seeds": options.seeds, "methods": methods})


if __name__ == "__main__":
    main()
