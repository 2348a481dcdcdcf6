"""Is a suggested label worth more than a random one? Accuracy against the number of labels, embedded data.

python benchmarks/suggest.py [--seeds 3] [--runs runs/suggest] [--counts 20 60]

Starts from the demo's RoPAWS runs with 4 labels for each of five classes. So many more images are labeled
by their true class, those that `ropaws suggest` names or random ones, and the run is trained again with all
labels; so is the supervised baseline, which says what the labels are worth without the chance
that a short semi-supervised run loses a class. Half of the pool belongs to no class; labeling such an image
is a label spent, which adds nothing.
Finished runs are used again, so it can be interrupted. Writes results/suggest.json.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from timing import write_results
from torch import Tensor

from ropaws import recipes
from ropaws.analysis.suggest import find_suggestions
from ropaws.bench.demo import train_once
from ropaws.data.datasets.truth import embedded_truth
from ropaws.data.sources import load_corpus
from ropaws.methods import Supervised
from ropaws.runs.run import Run


def truth_of(images: Tensor, classes: int) -> Tensor:
    """True class of training images, -1 for those of none."""
    labels = embedded_truth().labels[images]
    return torch.where(labels < classes, labels, -1)


def suggested(run: Run, count: int) -> Tensor:
    return torch.tensor([item["image"] for item in find_suggestions(run, count)])


def at_random(run: Run, count: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 + run.config.train.seed)
    return run.pool.positions[torch.randperm(len(run.pool.positions), generator=random)[:count]]


def write_pool(source: Path) -> None:
    """The embedded pool with all its true labels, of which a split grants some."""
    corpus = load_corpus(recipes.demo().data)
    np.savez(
        source,
        train_images=np.asarray(corpus.train_images[:])[:, 0],
        train_labels=truth_of(torch.arange(len(corpus.train_images)), len(corpus.class_names)).numpy(),
        test_images=np.asarray(corpus.test_images[:])[:, 0],
        test_labels=corpus.test_labels.numpy(),
        class_names=np.array(corpus.class_names),
    )


def retrained(run: Run, images: Tensor, folder: Path, console: Console) -> dict[str, float]:
    """Accuracy by method, trained again with the old labels and the new ones."""
    source = folder.parent / "pool.npz"
    if not source.exists():
        write_pool(source)
    chosen = images[truth_of(images, len(run.class_names)) >= 0].tolist()
    lines = "".join(f"{index}\n" for index in [*run.facts.split.indices.tolist(), *chosen])
    split = folder.with_suffix(".txt")
    if split.exists() and split.read_text() != lines:
        raise SystemExit(f"{split} names other labels than are chosen now; remove it and {folder}*")
    split.write_text(lines)
    data = replace(run.config.data, source=str(source), split=split)
    config = replace(run.config, data=data)
    return {
        "ropaws": train_once(config, folder, console)["accuracy"],
        "supervised": train_once(
            replace(config, method=Supervised()), folder.with_name(f"{folder.name}-supervised"), console
        )["accuracy"],
    }


WAYS: dict[str, Callable[[Run, int], Tensor]] = {"random": at_random, "suggested": suggested}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/suggest"))
    parser.add_argument("--counts", type=int, nargs="+", default=[20, 60])
    options = parser.parse_args()
    console = Console()
    # method -> way -> labels more -> accuracy a seed
    found: dict[str, dict[str, dict[int, list[float]]]] = {
        method: {way: {n: [] for n in options.counts} for way in WAYS} for method in ("ropaws", "supervised")
    }
    before: dict[str, list[float]] = {method: [] for method in found}
    in_class: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(options.seeds):
        folder = options.runs / f"seed{seed}"
        config = recipes.with_seed(recipes.demo(), seed)
        before["ropaws"].append(train_once(config, folder, console)["accuracy"])
        alone = replace(config, method=Supervised())
        before["supervised"].append(
            train_once(alone, folder.with_name(f"{folder.name}-supervised"), console)["accuracy"]
        )
        run = Run(folder)
        for way, choose in WAYS.items():
            for n in options.counts:
                images = choose(run, n)
                truth = truth_of(images, len(run.class_names))
                in_class[way].append(float((truth >= 0).double().mean()))
                figures = retrained(run, images, options.runs / f"seed{seed}-{way}-{n}", console)
                for method, accuracy in figures.items():
                    found[method][way][n].append(accuracy)
    write_results(
        "suggest",
        {
            "seeds": options.seeds,
            "labels_before": 20,
            "in_class_share": {way: _spread(values) for way, values in in_class.items()},
            "before": {method: _spread(values) for method, values in before.items()},
            "retrained": {
                method: {
                    way: {str(n): _spread(values) for n, values in counts.items()}
                    for way, counts in ways.items()
                }
                for method, ways in found.items()
            },
            "by_seed": found,
        },
    )


def _spread(values: list[float]) -> list[float]:
    """Mean and standard deviation, in percent."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return [round(100 * statistics.mean(values), 1), round(100 * deviation, 1)]


if __name__ == "__main__":
    main()
