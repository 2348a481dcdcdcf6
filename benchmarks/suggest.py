"""Is a suggested label worth more than a random one? Accuracy against the number of labels, embedded data.

python benchmarks/suggest.py [--seeds 3] [--runs runs/suggest] [--counts 20 60]

Starts from the demo's RoPAWS runs with 4 labels for each of five classes. So many more images are labelled
by their true class, those that `ropaws suggest` names or random ones, and the run is trained anew with all
labels. Half of the pile belongs to no class; labelling such an image is a label spent, which adds nothing.
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
from ropaws.analysis import suggestions
from ropaws.data.sources import load_corpus
from ropaws.demo import train_once
from ropaws.evaluation.truth import embedded_truth
from ropaws.material import Material, load_material


def truth_of(images: Tensor, classes: int) -> Tensor:
    """True class of training images, -1 for those of none."""
    labels = embedded_truth().labels[images]
    return torch.where(labels < classes, labels, -1)


def suggested(material: Material, count: int) -> list[int]:
    place_of = {int(image): place for place, image in enumerate(material.embedded.pool_index)}
    return [place_of[item["image"]] for item in suggestions(material, count)]


def at_random(material: Material, count: int) -> list[int]:
    random = torch.Generator().manual_seed(1000 + material.config.train.seed)
    places: list[int] = torch.randperm(len(material.embedded.pool), generator=random)[:count].tolist()
    return places


def retrained(material: Material, places: list[int], folder: Path, console: Console) -> float:
    """Trained anew, with the old labels and the new ones."""
    source = folder.parent / "pile.npz"
    if not source.exists():
        corpus = load_corpus(recipes.demo().data)
        np.savez(
            source,
            train_images=np.asarray(corpus.train_images[:])[:, 0],
            train_labels=truth_of(torch.arange(len(corpus.train_images)), len(corpus.class_names)).numpy(),
            test_images=np.asarray(corpus.test_images[:])[:, 0],
            test_labels=corpus.test_labels.numpy(),
            class_names=np.array(corpus.class_names),
        )
    images = material.embedded.pool_index[places]
    chosen = images[truth_of(images, material.classes) >= 0].tolist()
    split = folder.with_suffix(".txt")
    split.write_text("".join(f"{index}\n" for index in [*material.facts.split.indices.tolist(), *chosen]))
    config = material.config
    config = replace(config, data=replace(config.data, source=str(source), split=split))
    return train_once(config, folder, console)["accuracy"]


WAYS: dict[str, Callable[[Material, int], list[int]]] = {"random": at_random, "suggested": suggested}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/suggest"))
    parser.add_argument("--counts", type=int, nargs="+", default=[20, 60])
    options = parser.parse_args()
    console = Console()
    before: list[float] = []
    accuracy: dict[str, dict[int, list[float]]] = {way: {n: [] for n in options.counts} for way in WAYS}
    in_class: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(options.seeds):
        folder = options.runs / f"seed{seed}"
        before.append(train_once(recipes.with_seed(recipes.demo(), seed), folder, console)["accuracy"])
        material = load_material(folder)
        for way, choose in WAYS.items():
            for n in options.counts:
                places = choose(material, n)
                truth = truth_of(material.embedded.pool_index[places], material.classes)
                in_class[way].append(float((truth >= 0).double().mean()))
                name = f"seed{seed}-{way}-{n}"
                accuracy[way][n].append(retrained(material, places, options.runs / name, console))
    write_results(
        "suggest",
        {
            "seeds": options.seeds,
            "labels_before": 20,
            "in_class_share": {way: _spread(values) for way, values in in_class.items()},
            "retrained": {
                "before": _spread(before),
                **{
                    way: {str(n): _spread(values) for n, values in counts.items()}
                    for way, counts in accuracy.items()
                },
            },
        },
    )


def _spread(values: list[float]) -> list[float]:
    """Mean and standard deviation, in percent."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return [round(100 * statistics.mean(values), 1), round(100 * deviation, 1)]


if __name__ == "__main__":
    main()
