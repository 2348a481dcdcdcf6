"""Does the prior from the pool serve training from scratch, too?

python benchmarks/prior_scratch.py [--work FOLDER] [--seeds 2]

On the embedded garments, half of which are out-of-class. The prior is fitted to the features of the demo's
network with random weights, with the weights of the demo's own run (which has learned from these labels), and
with those of a demo run on other labels of the same classes. From each of these starts RoPAWS is trained with
that prior. Estimated share (the truth is 50 %), AUROC of the prior on the pool, accuracy and AUROC of the run
on test images; beside the demo's run, which has the paper's prior with an automatic temperature. Every run is
a folder below --work, so it can be interrupted. Writes results/prior_scratch.json.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from timing import write_results

import ropaws
from ropaws import Run, RunConfig, recipes
from ropaws.core.run_layout import MODEL
from ropaws.insight.metrics import detection
from ropaws.methods import RoPAWS
from ropaws.methods.pool_calibration import pool_prior
from ropaws.pool.datasets.catalog import embedded_truth
from ropaws.run.config import with_steps

STEPS = 400  # what the figures in docs/prior.md were measured with
POOL = RoPAWS(prior="pool")


def trained(config: RunConfig, folder: Path) -> Run:
    if not (folder / MODEL).exists():
        ropaws.train(config, folder)
    return Run(folder)


def figures(run: Run) -> dict[str, float]:
    """Of the prior that this run was trained with, and of the run."""
    prior = pool_prior(run.model)
    inside = embedded_truth().labels < len(run.facts.class_names)
    found = {
        "share": 100 * prior.estimated_share().estimate,
        "prior_auroc": 100 * detection(prior.prior.cpu(), inside).auroc,
    }
    results = run.evaluate(only=["soft-nn"])
    return found | {"accuracy": 100 * results["accuracy"], "auroc": 100 * results["auroc"]}


def measure(seed: int, work: Path) -> dict[str, Any]:
    settings = with_steps(recipes.scratch(), STEPS)
    base = recipes.with_seed(settings, seed)
    other = recipes.with_seed(settings, seed + 100)  # other labels
    demo = trained(base, work / f"demo-{seed}")
    elsewhere = trained(other, work / f"demo-{seed + 100}")
    results = demo.evaluate(only=["soft-nn"])
    found: dict[str, Any] = {
        "demo": {"accuracy": 100 * results["accuracy"], "auroc": 100 * results["auroc"]},
    }
    starts = {"random": None, "same labels": demo, "other labels": elsewhere}
    for name, start in starts.items():
        init = None if start is None else start.path / MODEL
        config = replace(base, method=POOL, model=replace(base.model, init=init))
        found[name] = figures(trained(config, work / f"pool-{name.replace(' ', '-')}-{seed}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/prior-scratch"))
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    rows = [measure(seed, options.work) for seed in range(options.seeds)]
    write_results(
        "prior_scratch",
        {
            name: {key: [round(row[name][key], 1) for row in rows] for key in rows[0][name]}
            for name in rows[0]
        },
    )


if __name__ == "__main__":
    main()
