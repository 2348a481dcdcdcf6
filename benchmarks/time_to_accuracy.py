"""Accuracy against seconds of training: our defaults and the paper's settings, turn by turn.

python benchmarks/time_to_accuracy.py --data FOLDER [--work FOLDER] [--only garments features] [--share 1/2]

garments: the embedded images, 4 labels per class, the demo's network from scratch. features: 2,000 images of
CIFAR-10 with 25 labels per class and 2,000 of CIFAR-100 as out-of-class, EfficientNet-Lite0, whose features
are computed once, as `ropaws train --labeled --unlabeled` does (FOLDER has cifar10.npz and cifar100.npz).

The paper's settings are those of its CIFAR recipe with the network of ours: two views and six small crops,
batches of 256 with 128 labeled rows per class, LARS with its learning rates, an MLP head, prior temperature
0.1. Its schedule is shortened (EPOCHS) and keeps its shape. Of the features, the MLP head alone is trained,
for the paper's own way, all weights on eight views, takes too long here: only its steps are measured.

One thread; seconds are the time of the processor in this process, which other programs hardly change, and do
not count the tests. Every run is a file below --work, so it can be interrupted, and shared among processes.
Writes results/time_to_accuracy.json and docs/time_to_accuracy.png.
"""

import argparse
import itertools
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from time_figure import draw
from timing import write_results
from torch import Tensor

from ropaws import recipes
from ropaws.classify import head
from ropaws.classify.soft_nn import LabeledEmbeddings
from ropaws.core.files import write_json
from ropaws.core.hardware import choose_device, keep_freed_memory
from ropaws.core.labels import UNLABELED
from ropaws.core.optimizers import learning_rate
from ropaws.core.terminal import Terminal
from ropaws.embedding.backbones import LITE, PRETRAINED, ModelConfig, cached_view
from ropaws.embedding.pretrained import weights_input
from ropaws.methods import encoder_of
from ropaws.pool.augment import center_view
from ropaws.pool.corpus import Corpus
from ropaws.pool.sources import DataConfig, load_corpus
from ropaws.recipes.paper import cifar
from ropaws.run.config import RunConfig, TrainConfig
from ropaws.run.own_data import HEAD_METHOD, HEAD_OPTIM
from ropaws.run.train_state import TrainState, prepare, stream_of
from ropaws.training.loop import finish, fit

SEEDS = (0, 1, 2)
EPOCHS = {"garments": 20, "features": 30}  # of the paper's 600
SIDE = 96  # pixels of a view: what `ropaws train` chooses for images of 32
IN_CLASS, OUTSIDE, TESTS = 2000, 2000, 1000  # images
POINTS = 40  # tests of a run
PART = 8  # a whole-network step is measured with an eighth of the batch: the whole does not fit into memory
WAYS = ("ours", "paper")


class Setting(NamedTuple):
    """Images, and the two ways to train on them."""

    corpus: Corpus
    configs: dict[str, RunConfig]


def shortened(config: RunConfig, pool: int, epochs: int) -> RunConfig:
    """A recipe of 600 epochs in fewer; 10 of the 600 are warm-up."""
    steps = epochs * (pool // config.train.batch)
    return replace(
        config,
        optim=replace(config.optim, warmup=max(1, steps // 60)),
        train=replace(config.train, steps=steps),
    )


def garments() -> Setting:
    ours = recipes.demo()
    corpus = load_corpus(ours.data)
    pool = len(corpus.train_images)
    paper = replace(cifar("fashion-demo", pool, labels_per_class=4), model=ours.model)
    paper = replace(paper, augment=replace(paper.augment, size=ours.augment.size))
    known = corpus.test_labels >= 0
    corpus = corpus._replace(test_images=corpus.test_images[known], test_labels=corpus.test_labels[known])
    return Setting(corpus, {"ours": ours, "paper": shortened(paper, pool, EPOCHS["garments"])})


def features(data: Path, work: Path) -> Setting:
    labels = 25
    model = ModelConfig(
        backbone=LITE,
        init=PRETRAINED,
        frozen=True,
        frozen_views=head.RANDOM_VIEWS,
        head="linear",
        projection_dims=head.DIMS,
    )
    known = weights_input(model.backbone)
    assert known is not None
    source = DataConfig(source="cifar10", labels_per_class=labels, feature_cache=work / "cache")
    ours = RunConfig(
        method=HEAD_METHOD,
        model=model,
        data=source,
        augment=cached_view(SIDE, known.interpolation),
        support=head.head_support([labels] * 10),
        optim=HEAD_OPTIM,
        train=TrainConfig(steps=head.STEPS, batch=head.BATCH),
    )
    paper = cifar("cifar10", IN_CLASS + OUTSIDE, labels_per_class=labels)
    paper = replace(
        paper,
        model=replace(
            paper.model, backbone=LITE, init=PRETRAINED, frozen=True, frozen_views=model.frozen_views
        ),
        data=source,
        augment=replace(ours.augment, small_crops=paper.augment.small_crops),
    )
    paper = shortened(paper, IN_CLASS + OUTSIDE, EPOCHS["features"])
    return Setting(_mixed(data), {"ours": ours, "paper": paper})


def _mixed(data: Path) -> Corpus:
    """CIFAR-10 with CIFAR-100 in its pool; tests are in-class."""
    with np.load(data / "cifar10.npz") as ten, np.load(data / "cifar100.npz") as hundred:
        truth = ten["train_labels"].astype(np.int64)
        inside = np.sort(np.concatenate([np.flatnonzero(truth == c)[: IN_CLASS // 10] for c in range(10)]))
        outside = np.random.default_rng(0).permutation(len(hundred["train_images"]))[:OUTSIDE]
        pixels = np.concatenate([ten["train_images"][inside], hundred["train_images"][outside]])
        tests, names = ten["test_images"][:TESTS], tuple(map(str, ten["class_names"]))
        test_labels = ten["test_labels"][:TESTS].astype(np.int64)
    labels = np.concatenate([truth[inside], np.full(len(outside), UNLABELED)])
    return Corpus(
        names, _planes(pixels), torch.from_numpy(labels), _planes(tests), torch.from_numpy(test_labels)
    )


def _planes(pixels: Any) -> Tensor:
    """(n, h, w, 3)  ->  (n, 3, h, w)"""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))


def run(setting: Setting, way: str, seed: int) -> dict[str, Any]:
    """Train once: seconds until each test, and the accuracy there."""
    config, corpus = recipes.with_seed(setting.configs[way], seed), setting.corpus
    began = time.process_time()
    parts = prepare(config, corpus, choose_device("cpu"), Terminal(quiet=True), None)
    prepared = time.process_time() - began
    stream, total = stream_of(config, parts), config.train.steps
    tests = _views(config, parts, corpus.test_images)
    every = max(1, total // POINTS)
    curve, seconds, began = [], 0.0, time.process_time()
    steps = fit(
        parts.model,
        config.method,
        stream.batches(0, total),
        parts.optimizer,
        learning_rate(config.optim, total),
        parts.scaler,
        stream.pool_pass,
    )
    for taken in steps:
        done = taken.step + 1
        if done % every and done != total:
            continue
        seconds += time.process_time() - began
        found = _accuracy(config, parts, stream, tests, corpus.test_labels, done)
        curve.append({"step": done, "seconds": round(seconds, 3), "accuracy": found})
        parts.model.train()
        began = time.process_time()
    return {"steps": total, "prepared": round(prepared, 1), "curve": curve}


@torch.no_grad()
def _views(config: RunConfig, parts: TrainState, images: Any) -> Tensor:
    """Test images as the model takes them; of a frozen backbone, their features."""
    view = center_view(images, config.augment.size, parts.facts.normalize, config.augment.interpolation)
    if not config.model.frozen:
        return view
    encoder = encoder_of(parts.model).eval()
    return torch.cat([encoder.features(some) for some in view.split(250)])


@torch.no_grad()
def _accuracy(
    config: RunConfig, parts: TrainState, stream: Any, tests: Tensor, truth: Tensor, step: int
) -> float:
    method, split, pool = config.method, parts.facts.split, stream.whole_pool(step)
    model = finish(parts.model, method, pool)
    labeled = pool.map(lambda views: method.embed(model, views), split.indices)
    support = LabeledEmbeddings(labeled, split.labels, len(parts.facts.class_names))
    probs = torch.cat([method.predict(model, some, support).probs for some in tests.split(500)])
    return float((probs.argmax(dim=1) == truth).double().mean())


def whole_network(setting: Setting) -> dict[str, Any]:
    """Seconds of a step of all weights on the paper's views: an eighth of the batch, times eight."""
    paper = setting.configs["paper"]
    small = round(0.6 * SIDE)
    config = replace(
        paper,
        model=replace(paper.model, frozen=False),
        augment=replace(paper.augment, small_size=small, small_scale=(0.3, 0.75)),
        support=replace(paper.support, images_per_class=paper.support.images_per_class // PART),
        train=replace(paper.train, batch=paper.train.batch // PART),
    )
    parts = prepare(config, setting.corpus, choose_device("cpu"), Terminal(quiet=True), None)
    steps = fit(
        parts.model,
        config.method,
        stream_of(config, parts).batches(0, 4),
        parts.optimizer,
        lambda step: 0.0,
        parts.scaler,
    )
    moments = [time.process_time() for _ in steps]
    seconds = statistics.median(b - a for a, b in itertools.pairwise(moments))
    return {"seconds": round(PART * seconds, 1), "steps": paper.train.steps}


def seconds_to(curve: list[dict[str, float]], accuracy: float) -> float | None:
    """When it was first reached."""
    return next((point["seconds"] for point in curve if point["accuracy"] >= accuracy), None)


def compared(ours: dict[str, Any], paper: dict[str, Any]) -> dict[str, Any]:
    """One seed: seconds of both to the accuracy that the paper's settings end with.

    times: against when these settings first touch it; times_whole: against their whole schedule, which ends
    with it, and without whose end nobody would know it.
    """
    target = paper["curve"][-1]["accuracy"]
    of_paper, of_ours = seconds_to(paper["curve"], target), seconds_to(ours["curve"], target)
    assert of_paper is not None
    return {
        "target": target,
        "final": ours["curve"][-1]["accuracy"],
        "paper_first": of_paper,
        "paper_end": paper["curve"][-1]["seconds"],
        "ours": of_ours,
        "ours_end": ours["curve"][-1]["seconds"],
        "times": None if of_ours is None else round(of_paper / of_ours, 2),
        "times_whole": None if of_ours is None else round(paper["curve"][-1]["seconds"] / of_ours, 2),
    }


def summarize(work: Path, name: str) -> dict[str, Any] | None:
    """The seeds that both ways have; None where there is none."""
    paths = [[work / f"{name}-{way}-seed{seed}.json" for way in WAYS] for seed in SEEDS]
    pairs = [
        [json.loads(path.read_text()) for path in pair]
        for pair in paths
        if all(path.exists() for path in pair)
    ]
    if not pairs:
        return None
    found: dict[str, Any] = {
        "seeds": [compared(*pair) for pair in pairs],
        "steps": {way: run["steps"] for way, run in zip(WAYS, pairs[0], strict=True)},
        "runs": {way: [pair[number]["curve"] for pair in pairs] for number, way in enumerate(WAYS)},
    }
    for extra in ("extraction", "whole_network"):
        if (path := work / f"{name}-{extra}.json").exists():
            found[extra] = json.loads(path.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/time-to-accuracy"))
    parser.add_argument("--only", nargs="+", choices=list(EPOCHS), default=list(EPOCHS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--share", default="1/1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    options.work.mkdir(parents=True, exist_ok=True)
    part, of = map(int, options.share.split("/"))
    for name in options.only:
        setting = garments() if name == "garments" else features(options.data, options.work)
        if name == "features":
            _extras(setting, options.work)
        cells = [(seed, way) for seed in SEEDS for way in options.ways]
        for seed, way in cells[part - 1 :: of]:
            path = options.work / f"{name}-{way}-seed{seed}.json"
            if not path.exists():
                write_json(path, run(setting, way, seed))
    results = {name: found for name in EPOCHS if (found := summarize(options.work, name)) is not None}
    if results:
        write_results("time_to_accuracy", results)
        draw(results, Path(__file__).parent.parent / "docs/time_to_accuracy.png")


def _extras(setting: Setting, work: Path) -> None:
    """What the first run on features has to compute, and what a step of the whole network would cost."""
    path = work / "features-extraction.json"
    if not path.exists():
        began = time.process_time()
        prepare(setting.configs["ours"], setting.corpus, choose_device("cpu"), Terminal(quiet=True), None)
        seconds = round(time.process_time() - began, 1)
        write_json(path, {"seconds": seconds, "images": len(setting.corpus.train_images)})
    path = work / "features-whole_network.json"
    if not path.exists():
        write_json(path, whole_network(setting))


if __name__ == "__main__":
    main()
