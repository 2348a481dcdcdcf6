"""Training from scratch in a given time: our settings beside the supervised baseline.

python benchmarks/scratch_budget.py [--work FOLDER] [--only WORD ...] [--report]

Images: those of `ropaws demo --from-scratch`, at 14 px with the small network at half its channels, because
a step then costs a fifth, and for the shortest budget also at 28 px with the whole network. Budgets are
steps: the demo's 250, which fit into 2 minutes at 28 px on one busy core, stand for 2 minutes, and 5 and 30
times as many for 10 and 60. The results have the processor time of a step.

supervised is the baseline with the judge, and with the milder crops that suit it; it learns from labels
alone, whose steps are cheaper, and gets twice as many. ropaws is `ropaws demo --from-scratch`. The draws of
the labels, seeds 10 to 14, were not looked at when settings were chosen (on seeds 100 to 102). Every run is a
folder below --work, and the same command continues. Writes results/scratch_budget.json.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from long_schedule import RESULT, garments, trained
from timing import write_results

from ropaws import recipes
from ropaws.bench.entries import SUPPORT_ROWS, Data, Task
from ropaws.core.files import write_json
from ropaws.core.hardware import keep_freed_memory
from ropaws.embedding.backbones import ModelConfig
from ropaws.insight.metrics import evaluation_figures
from ropaws.methods import Method, RoPAWS, Supervised
from ropaws.run.config import RunConfig, with_method, with_steps

SEEDS = (10, 11, 12, 13, 14)
BUDGETS = {10: 1250, 2: 250, 60: 7500}  # minutes: steps of ours
OURS = recipes.demo().method
assert isinstance(OURS, RoPAWS)
METHODS: dict[str, Method] = {
    "supervised": Supervised(judge="pool"),
    "ropaws": OURS,
    "ropaws with supervised loss": replace(OURS, supervised_weight=1.0),
}
NETWORKS = {14: "small-16", 28: "small"}  # pixels per side: network
FEW, MANY = 10, 40  # steps, of which the difference is timed


@dataclass(frozen=True)
class Cell:
    labels: int  # per class
    minutes: int
    method: str
    seed: int
    size: int = 14  # pixels per side

    @property
    def name(self) -> str:
        of = "" if self.size == 14 else f"{self.size}px-"
        return f"{of}{self.labels}-{self.minutes}min-{self.method.replace(' ', '_')}-seed{self.seed}"


def cells() -> list[Cell]:
    """In the order of what they can tell for their cost."""
    shown = [(4, 10, 14), (4, 2, 28), (25, 10, 14), (4, 2, 14), (25, 2, 14), (4, 60, 14), (25, 60, 14)]
    return [
        Cell(labels, minutes, method, seed, size)
        for labels, minutes, size in shown
        for seed in SEEDS
        for method in METHODS
    ]


def settings(cell: Cell, data: Data, task: Task) -> RunConfig:
    base, supervised = recipes.demo(), cell.method == "supervised"
    per_class = min(cell.labels, 8)
    views = max(1, round(SUPPORT_ROWS / (len(task.corpus.class_names) * per_class)))
    augment = recipes.scratch().augment if supervised else base.augment
    base = replace(
        base,
        model=ModelConfig(backbone=NETWORKS[cell.size]),
        data=replace(data.config(), labels_per_class=cell.labels),
        augment=replace(augment, size=cell.size, small_crops=0),
        support=replace(base.support, images_per_class=per_class, views=views),
        train=replace(base.train, seed=cell.seed, threads=1),
    )
    return with_method(with_steps(base, BUDGETS[cell.minutes] * (1 + supervised)), METHODS[cell.method])


def run_cell(cell: Cell, work: Path) -> dict[str, Any]:
    task = (data := pool(work, cell.size)).load()
    config, began = settings(cell, data, task), time.process_time()
    run = trained(config, work / cell.name / "run", task)
    found = evaluation_figures(run.outputs(task.corpus.test_images), task.corpus.test_labels)
    seconds = time.process_time() - began
    return {**asdict(cell), "steps": config.train.steps, "cpu_seconds": round(seconds), **found}


def step_seconds(work: Path, size: int, method: str) -> float:
    """Processor time of a step, on one thread."""
    task = (data := pool(work, size)).load()
    config, took = settings(Cell(4, 2, method, 0, size), data, task), []
    for steps in (FEW, MANY):
        began = time.process_time()
        short = replace(with_steps(config, steps), method=replace(config.method, judge="embedding"))
        trained(short, work / f"rate-{size}-{method}-{steps}", task)
        took.append(time.process_time() - began)
    return (took[1] - took[0]) / (MANY - FEW)


def pool(work: Path, size: int) -> Data:
    source = work / f"garments-{size}.npz"
    if not source.exists():
        work.mkdir(parents=True, exist_ok=True)
        garments(None, source, outside=2500, small=size == 14, per_class=500)
    return Data(source=str(source))


def rates(work: Path) -> dict[str, float]:
    """Measured once."""
    path = work / "rates.json"
    if not path.exists():
        found = {
            f"{method}, {size} px": step_seconds(work, size, method)
            for method in ("ropaws", "supervised")
            for size in NETWORKS
        }
        write_json(path, found)
    return json.loads(path.read_text())


def report(work: Path) -> None:
    paths = [(cell, work / cell.name / RESULT) for cell in cells()]
    rows = [json.loads(path.read_text()) for _, path in paths if path.exists()]
    waiting = [cell.name for cell, path in paths if not path.exists()]
    write_results("scratch_budget", {"step_seconds": rates(work), "rows": rows, "waiting": waiting})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/scratch-budget"))
    parser.add_argument("--only", nargs="+", help="cells whose names contain one of these words")
    parser.add_argument("--report", action="store_true", help="only summarize what is finished")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for cell in [] if options.report else cells():
        path = options.work / cell.name / RESULT
        if path.exists() or (options.only and not any(word in cell.name for word in options.only)):
            continue
        result = run_cell(cell, options.work)
        write_json(path, result)
        print(cell.name, result["cpu_seconds"], f"{result['accuracy']:.3f} {result['auroc']:.3f}", flush=True)
    report(options.work)


if __name__ == "__main__":
    main()
