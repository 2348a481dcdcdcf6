"""Which part of RoPAWS does what on the embedded data: variants of the method, three seeds each.

python benchmarks/demo_ablation.py [--seeds 3] [--runs runs/demo-ablation]

With the demo's images, network and steps. About ten minutes on two cores. Finished runs are used
again, so it can be interrupted. Writes results/demo_ablation.json.
"""

import argparse
import importlib
from dataclasses import replace
from pathlib import Path

from contrast_alone import ContrastAlone
from rich.console import Console
from timing import write_results

from ropaws import Run, recipes, resume, train
from ropaws.bench.workers import run_all
from ropaws.core.cores import available_cores
from ropaws.core.run_layout import CONFIG, EVALUATION, MODEL
from ropaws.core.terminal import Terminal
from ropaws.methods import PAWS, Method, RoPAWS, Supervised
from ropaws.report.page import COLUMNS, comparison_rows
from ropaws.run.config import RunConfig
from ropaws.run.results import read_evaluation

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


def measured(job: tuple[RunConfig, Path]) -> dict[str, float]:
    """Train and test one variant; what an earlier call has done is used again."""
    config, folder = job
    if not (folder / MODEL).exists():
        quiet = Terminal(quiet=True)
        if (folder / CONFIG).exists():
            resume(folder, console=quiet)
        else:
            train(config, folder, console=quiet)
    run = Run(folder, console=Terminal(quiet=True))
    return read_evaluation(folder) if (folder / EVALUATION).exists() else run.evaluate()


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
        (recipes.with_seed(VARIANTS[name], seed), options.runs / f"variant{numbers[name]}-seed{seed}")
        for name, seed in named
    ]
    work = importlib.import_module("demo_ablation").measured  # by a name that other processes can import
    for done in run_all(work, jobs, workers=available_cores(), started=lambda _number: None):
        if done.result is None:
            raise RuntimeError(f"{named[done.number]} failed: {done.reason}")
        console.print(named[done.number], f"{len(jobs)} runs in all")
    for (name, _), job in zip(named, jobs, strict=True):
        figures = measured(job)
        for key, values in methods[name].items():
            values.append(figures[key])
    for row in comparison_rows(methods):
        console.print("  ".join(row))
    write_results("demo_ablation", {"seeds": options.seeds, "methods": methods})


if __name__ == "__main__":
    main()
