"""Is a suggested label worth more than a random one? Accuracy against the number of labels, embedded data.

python benchmarks/suggest.py [--seeds 3] [--runs runs/suggest] [--retrain 20]

Starts from the demo's RoPAWS runs with 4 labels for each of five classes. So many more images are labelled
by their true class: those that `ropaws suggest` names, or random ones (mean of five draws). Half of the pile
belongs to no class; labelling such an image is a label spent, which adds nothing. First with the network as
it is, the new labels joining its support; then, for --retrain more labels, trained anew with all labels, for
which a third way is measured: only the most doubtful images (least confidence). Finished runs are used
again. Writes results/suggest.json.
"""

import argparse
import statistics
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
from ropaws.evaluation.soft_nn import evaluate_soft_nn, predict_probs
from ropaws.evaluation.truth import embedded_truth
from ropaws.material import Material, load_material

COUNTS = (5, 10, 20, 40, 80, 160)
DRAWS = 5


def truth_of(images: Tensor, classes: int) -> Tensor:
    """True class of training images, -1 for those of none."""
    labels = embedded_truth().labels[images]
    return torch.where(labels < classes, labels, -1)


def accuracy_with(material: Material, places: list[int]) -> float:
    """With more labels: images of the pool at these places join the support by their true class."""
    truth = truth_of(material.embedded.pool_index[places], material.classes)
    known = truth >= 0
    support = torch.cat([material.support.embeddings, material.embedded.pool[places][known]])
    labels = torch.cat([material.support.labels, truth[known]])
    return evaluate_soft_nn(
        material.embedded.test,
        material.embedded.test_labels,
        support,
        labels,
        classes=material.classes,
        temperature=material.temperature,
    )["accuracy"]


def suggested(material: Material, count: int) -> list[int]:
    place_of = {int(image): place for place, image in enumerate(material.embedded.pool_index)}
    return [place_of[item["image"]] for item in suggestions(material, count)]


def least_confident(material: Material, count: int) -> list[int]:
    probs = predict_probs(
        material.embedded.pool,
        *material.support,
        classes=material.classes,
        temperature=material.temperature,
    )
    places: list[int] = probs.amax(dim=1).argsort()[:count].tolist()
    return places


def at_random(material: Material, count: int, draw: int) -> list[int]:
    random = torch.Generator().manual_seed(1000 + draw)
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/suggest"))
    parser.add_argument(
        "--retrain", type=int, default=20, help="labels more for training anew; 0: not at all"
    )
    options = parser.parse_args()
    console = Console()
    frozen: dict[str, dict[int, list[float]]] = {
        way: {n: [] for n in (0, *COUNTS)} for way in ("suggested", "least confident", "random")
    }
    in_class: dict[str, list[float]] = {"suggested": [], "least confident": [], "random": []}
    anew: dict[str, list[float]] = {"as before": [], "suggested": [], "least confident": [], "random": []}
    for seed in range(options.seeds):
        folder = options.runs / f"seed{seed}"
        before = train_once(recipes.with_seed(recipes.demo(), seed), folder, console)["accuracy"]
        material = load_material(folder)
        for way, counts in frozen.items():
            counts[0].append(before)
            for n in COUNTS:
                draws = (
                    [suggested(material, n)]
                    if way == "suggested"
                    else [least_confident(material, n)]
                    if way == "least confident"
                    else [at_random(material, n, draw) for draw in range(DRAWS)]
                )
                counts[n].append(statistics.mean(accuracy_with(material, places) for places in draws))
        n = options.retrain or 20
        ways = {
            "suggested": suggested(material, n),
            "least confident": least_confident(material, n),
            "random": at_random(material, n, seed),
        }
        for way, places in ways.items():
            truth = truth_of(material.embedded.pool_index[places], material.classes)
            in_class[way].append(float((truth >= 0).double().mean()))
            if options.retrain:
                name = way.replace(" ", "-")
                anew[way].append(
                    retrained(material, places, options.runs / f"seed{seed}-{name}-{n}", console)
                )
        anew["as before"].append(before)
    results = {
        "seeds": options.seeds,
        "labels_before": 20,
        "frozen": {way: {str(n): _spread(v) for n, v in counts.items()} for way, counts in frozen.items()},
        "in_class_share": {way: _spread(values) for way, values in in_class.items()},
    }
    if options.retrain:
        results["retrained"] = {
            "more_labels": options.retrain,
            **{way: _spread(values) for way, values in anew.items()},
        }
    write_results("suggest", results)


def _spread(values: list[float]) -> list[float]:
    """Mean and standard deviation, in percent."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return [round(100 * statistics.mean(values), 1), round(100 * deviation, 1)]


if __name__ == "__main__":
    main()
