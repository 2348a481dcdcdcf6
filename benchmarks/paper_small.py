"""The paper's CIFAR-10 tables in small: PAWS against RoPAWS with out-of-class images in the pool.

python benchmarks/paper_small.py --data FOLDER [--runs FOLDER] [--only main steps] [--share 1/2]

FOLDER has cifar10.npz, cifar100.npz, tinyimagenet32.npz and svhn.npz (train_images, train_labels,
test_images, test_labels; 32 px). Trained from scratch, the effect needs a hundred thousand steps of a
WRN-28-2. The cheapest setting found in which it shows is this one: features of a frozen network that was
trained on ImageNet (frozen_features.py), and projection heads that start from a hundred steps on the labeled
images; then PAWS or RoPAWS with the paper's settings. A run takes about 15 seconds on one core, all of
them about an hour. Every run is a file, so it can be interrupted, and shared among processes (--share).
Writes results/paper_small.json.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from frozen_features import VIEWS, Features, frozen_features
from timing import write_results
from torch import Tensor, nn

from ropaws.batch import Batch, Support
from ropaws.data.samplers import SupportConfig, support_indices, unlabeled_indices
from ropaws.data.splits import draw_split
from ropaws.evaluation.figures import evaluation_figures
from ropaws.evaluation.sskde import fit_sskde
from ropaws.methods import PAWS, LabeledEmbeddings, Method, RoPAWS, Supervised
from ropaws.methods.propagation import pool_posterior
from ropaws.models.encoder import Encoder
from ropaws.models.heads import projection_head
from ropaws.runs.atomic import write_json
from ropaws.training.loop import fit
from ropaws.training.optim import LARS
from ropaws.training.schedules import warmup_cosine

CLASSES = 10
BATCH = 256
START_STEPS, START_PEAK = 100, 1.6  # on the labeled images alone
STEPS, PEAK = 300, 0.8
SEEDS = (0, 1, 2)
# extra images -> in-class images per class in the pool: the paper's shares of out-of-class images, about 50 %
# with CIFAR-100, 60 % with SVHN and 67 % with Tiny-ImageNet
MIXES = {"none": 500, "cifar100": 500, "tiny": 208, "svhn": 200}
IN_CLASS = 500
TINY_TESTS = 1000  # Tiny-ImageNet's file has no test images: so many of its images are kept apart

PAPER = RoPAWS(prior_temperature=0.1)
VARIANTS: dict[str, Method] = {
    "paws": PAWS(),
    "prior and reweighting, no density": replace(PAPER, semi_supervised_density=False),
    "density alone": replace(PAPER, in_domain_prior=False, reweighting=False),
    "density and prior, no reweighting": replace(PAPER, reweighting=False),
    "ropaws": PAPER,
    **{f"tau_prior {value:g}": replace(PAPER, prior_temperature=value) for value in (0.05, 0.2, 0.5, 1.0)},
    "tau_prior auto": replace(PAPER, prior_temperature="auto"),
    **{f"k {value:g}": replace(PAPER, reweight_power=value) for value in (2.0, 3.0, 5.0)},
    "self vote": replace(PAPER, self_vote=True),
    "reweighted me-max": replace(PAPER, reweight_entropy=True),
}


@dataclass(frozen=True)
class Job:
    """One run."""

    mix: str
    labels: int  # per class
    variant: str
    steps: int = STEPS
    seed: int = 0
    cold: bool = False  # start from random heads

    @property
    def file(self) -> str:
        words = f"{self.mix}-{self.labels}-{self.variant}-{self.steps}-seed{self.seed}{'-cold' * self.cold}"
        return words.replace(" ", "_").replace(",", "") + ".json"


def jobs(parts: list[str]) -> list[Job]:
    """All that is asked for; a run that two tables share is there once."""
    found = []
    for seed in SEEDS:
        if "main" in parts:
            found += [
                Job(mix, labels, variant, seed=seed)
                for labels in (4, 25)
                for mix in MIXES
                for variant in ("paws", "ropaws")
            ]
        if "ablation" in parts:
            found += [Job("svhn", 4, variant, seed=seed) for variant in VARIANTS]
        if "steps" in parts:
            found += [
                Job("svhn", 4, variant, steps=steps, seed=seed)
                for steps in (100, 300, 1000, 3000)
                for variant in ("paws", "ropaws")
            ]
        if "cold" in parts:
            found += [Job("svhn", 25, variant, seed=seed, cold=True) for variant in ("paws", "ropaws")]
    return list(dict.fromkeys(found))


class Pool(NamedTuple):
    """Training and test features of a mix."""

    views: Tensor  # (n, views, features)
    center: Tensor  # (n, features)
    labels: Tensor  # (n,) class, or -1
    test: Tensor  # (t, features)
    truth: Tensor  # (t,) class, or -1


def load_pool(mix: str, data: Path, runs: Path) -> Pool:
    """Features, brought to mean 0 and deviation 1 over the pool."""
    chosen, labels = _in_class(data, IN_CLASS)
    inside = _features(data, runs, "cifar10", "train", chosen)
    tests = _features(data, runs, "cifar10", "test")
    truth = torch.from_numpy(_array(data, "cifar10", "test_labels").astype(np.int64))
    kept = torch.cat([(labels == c).nonzero().squeeze(1)[: MIXES[mix]] for c in range(CLASSES)])
    views, center, labels = inside.views[kept], inside.center[kept], labels[kept]
    test = tests.center
    if mix != "none":
        extra, others = (_features(data, runs, mix, part) for part in ("train", "test"))
        views, center = torch.cat([views, extra.views]), torch.cat([center, extra.center])
        labels = torch.cat([labels, torch.full((len(extra.center),), -1)])
        test = torch.cat([test, others.center])
        truth = torch.cat([truth, torch.full((len(others.center),), -1)])
    std, mean = torch.std_mean(center.float(), dim=0)
    views, center, test = ((x.float() - mean) / (std + 1e-3) for x in (views, center, test))
    return Pool(views, center, labels, test, truth)


def _in_class(data: Path, count: int) -> tuple[np.ndarray, Tensor]:
    labels = _array(data, "cifar10", "train_labels")
    chosen = np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c in range(CLASSES)]))
    return chosen, torch.from_numpy(labels[chosen].astype(np.int64))


def _array(data: Path, name: str, array: str) -> np.ndarray:
    with np.load(data / f"{name}.npz") as arrays:
        return arrays[array]


def _features(data: Path, runs: Path, name: str, part: str, chosen: np.ndarray | None = None) -> Features:
    cache = runs / "features" / f"{name}-{part}.npz"
    if cache.exists():  # no need to read the images
        return frozen_features(np.empty(0), cache, views=0, seed=0)
    if name == "tiny":
        images = _array(data, "tinyimagenet32", "train_images")
        order = np.random.default_rng(0).permutation(len(images))
        images = images[order[:TINY_TESTS] if part == "test" else order[TINY_TESTS:]]
    else:
        images = _array(data, name, f"{part}_images")
    images = images if chosen is None else images[chosen]
    return frozen_features(
        images, cache, views=VIEWS if part == "train" else 0, seed=0 if part == "train" else 1
    )


def run_job(job: Job, pool: Pool) -> dict[str, Any]:
    """Start on the labeled images, train, test; figures at the start, at the end and in between."""
    split = draw_split(
        pool.labels, tuple(map(str, range(CLASSES))), labels_per_class=job.labels, seed=job.seed
    )
    torch.manual_seed(job.seed)
    model = Encoder(nn.Flatten(), projection_head(pool.views.shape[2], 128, 128), nn.Identity())
    began = time.perf_counter()
    start = 0 if job.cold else START_STEPS
    for _ in _train(model, Supervised(), pool, split.indices, split.labels, job, start, START_PEAK):
        pass
    every = max(1, job.steps // 6)
    method = VARIANTS[job.variant]
    method.build(model, classes=CLASSES, pool=len(pool.views))  # RoPAWS adds a buffer
    steps = _train(model, method, pool, split.indices, split.labels, job, job.steps, PEAK)
    curve = [{"step": 0, **_test(model, pool, split.indices, split.labels)}]
    curve += [
        {"step": step + 1, **_test(model, pool, split.indices, split.labels)}
        for step in steps
        if (step + 1) % every == 0 or step + 1 == job.steps
    ]
    return {
        **asdict(job),
        "seconds": time.perf_counter() - began,
        "curve": curve,
        **_analyses(model, pool, split.indices, split.labels),
    }


def _train(
    model: Encoder,
    method: Method,
    pool: Pool,
    indices: Tensor,
    labels: Tensor,
    job: Job,
    steps: int,
    peak: float,
) -> Iterator[int]:
    optimizer = LARS(model.parameters(), lr=peak, momentum=0.9, weight_decay=1e-6)

    def rate(step: int) -> float:
        return warmup_cosine(step, peak=peak, start=peak / 4, end=peak / 100, warmup=steps // 10, total=steps)

    for taken in fit(model, method, _batches(pool, indices, labels, job, steps), optimizer, rate):
        yield taken.step


def _batches(pool: Pool, indices: Tensor, labels: Tensor, job: Job, steps: int) -> Iterator[Batch]:
    """Views are drawn from those that were computed: two large ones, the others as crops."""
    settings = SupportConfig(images_per_class=min(16, job.labels), views=VIEWS)
    for step in range(steps):
        random = torch.Generator().manual_seed(job.seed * 1_000_003 + step)
        rows = unlabeled_indices(step, batch=BATCH, pool=len(pool.views), seed=job.seed)
        order = torch.rand(BATCH, VIEWS, generator=random).argsort(dim=1)
        views = {f"view{v}": _as_images(pool.views[rows, order[:, v]]) for v in range(VIEWS)}
        positions, classes = support_indices(step, labels, settings, seed=job.seed)
        shown = pool.views[indices[positions]]  # (k, views, features): all views of each
        support = Support(
            _as_images(shown.transpose(0, 1).flatten(0, 1)),
            F.one_hot(classes.repeat(VIEWS), CLASSES).float(),
            positions.repeat(VIEWS),
            labels[positions].repeat(VIEWS),
        )
        yield Batch(step, steps, views, rows, support)


def _as_images(rows: Tensor) -> Tensor:
    """(n, features)  ->  (n, features, 1, 1): what an encoder takes"""
    return rows[:, :, None, None]


@torch.no_grad()
def _embed(model: Encoder, rows: Tensor) -> Tensor:
    model.eval()
    embedded = model([_as_images(rows)])[0].h
    model.train()
    return embedded


def _test(model: Encoder, pool: Pool, indices: Tensor, labels: Tensor) -> dict[str, float]:
    support = LabeledEmbeddings(_embed(model, pool.center[indices]), labels, CLASSES)
    return evaluation_figures(PAWS().classify(_embed(model, pool.test), support), pool.truth)


def _analyses(model: Encoder, pool: Pool, indices: Tensor, labels: Tensor) -> dict[str, Any]:
    """Label propagation step by step (the paper's Tables 11 and 14), and SSKDE (Table 9)."""
    test = _embed(model, pool.test)
    support = LabeledEmbeddings(_embed(model, pool.center[indices]), labels, CLASSES)
    known = pool.truth >= 0
    kernel = PAWS().kernel(support)
    table = []
    for iterations in (1, 2, 3, None):
        probs = pool_posterior(
            test, support.embeddings, support.one_hot, kernel, iterations=iterations, voters=None
        ).probs
        confidence, predicted = probs.max(dim=1)
        row = {
            "iterations": iterations,
            "accuracy": float((predicted[known] == pool.truth[known]).double().mean()),
            "confidence_in": float(confidence[known].mean()),
        }
        if not known.all():
            row["confidence_out"] = float(confidence[~known].mean())
        table.append(row)
    some = _embed(model, pool.center)[::4]
    density = fit_sskde(support.embeddings, labels, some, classes=CLASSES)
    sskde = density(test[known]).argmax(dim=1)
    return {"propagation": table, "sskde": float((sskde == pool.truth[known]).double().mean())}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and deviation over seeds of every setting."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        key = f"{row['mix']}/{row['labels']}/{row['variant']}/{row['steps']}"
        key += "/cold" if row.get("cold") else ""
        groups.setdefault(key, []).append(row)
    return {key: _summary(group) for key, group in sorted(groups.items())}


def _summary(group: list[dict[str, Any]]) -> dict[str, Any]:
    first, last = ([row["curve"][place] for row in group] for place in (0, -1))
    names = [name for name in last[0] if name != "step"]
    tables = [row["propagation"] for row in group]
    return {
        "seeds": len(group),
        "start": _spread([row["accuracy"] for row in first]),
        **{name: _spread([row[name] for row in last]) for name in names},
        "sskde": _spread([row["sskde"] for row in group]),
        "seconds": statistics.mean(row["seconds"] for row in group),
        "curve": [
            {
                "step": point["step"],
                **{
                    name: _spread([row["curve"][place][name] for row in group])
                    for name in ("accuracy", "auroc")
                    if name in point
                },
            }
            for place, point in enumerate(group[0]["curve"])
        ],
        "propagation": [
            {
                "iterations": row["iterations"],
                **{
                    name: _spread([table[place][name] for table in tables])
                    for name in ("accuracy", "confidence_in", "confidence_out")
                    if name in row
                },
            }
            for place, row in enumerate(tables[0])
        ],
    }


def _spread(values: list[float]) -> list[float]:
    """Mean and standard deviation, in percent."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return [round(100 * statistics.mean(values), 1), round(100 * deviation, 1)]


def random_linear_sskde(data: Path) -> list[float]:
    """SSKDE on a random linear map of the pixels to 128 dimensions, 25 labels: the paper has 13.9 %."""
    chosen, labels = _in_class(data, IN_CLASS)
    train = torch.from_numpy(_array(data, "cifar10", "train_images")[chosen]).flatten(1).float() / 255
    test = torch.from_numpy(_array(data, "cifar10", "test_images")).flatten(1).float() / 255
    truth = torch.from_numpy(_array(data, "cifar10", "test_labels").astype(np.int64))
    found = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        linear = nn.Linear(train.shape[1], 128)
        split = draw_split(labels, tuple(map(str, range(CLASSES))), labels_per_class=25, seed=seed)
        with torch.no_grad():
            known, pool, queries = linear(train[split.indices]), linear(train[::4]), linear(test)
        guess = fit_sskde(known, split.labels, pool, classes=CLASSES)(queries).argmax(dim=1)
        found.append(float((guess == truth).double().mean()))
    return _spread(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/paper-small"))
    parser.add_argument("--only", nargs="+", default=["main", "ablation", "steps", "cold"])
    parser.add_argument("--share", default="1/1", help="this process does the i-th of n shares")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    number, shares = map(int, options.share.split("/"))
    wanted = jobs(options.only)
    pools: dict[str, Pool] = {}
    for count, job in enumerate(wanted):
        path = options.runs / job.file
        if path.exists() or count % shares != number - 1:
            continue
        if job.mix not in pools:
            pools = {job.mix: load_pool(job.mix, options.data, options.runs)}  # one at a time in memory
        row = run_job(job, pools[job.mix])
        write_json(path, row)
        start, end = row["curve"][0]["accuracy"], row["curve"][-1]
        print(
            f"{count + 1}/{len(wanted)} {path.stem}: {start:.1%} -> {end['accuracy']:.1%},"
            f" AUROC {end.get('auroc', float('nan')):.1%}, {row['seconds']:.0f} s",
            flush=True,
        )
    rows = [
        json.loads((options.runs / job.file).read_text())
        for job in wanted
        if (options.runs / job.file).exists()
    ]
    if len(rows) < len(wanted):
        print(f"{len(wanted) - len(rows)} runs are left to other processes")
        return
    write_results(
        "paper_small",
        {
            "settings": {
                "backbone": "EfficientNet-Lite0, ImageNet, frozen, 96 px",
                "views": VIEWS,
                "start_steps": START_STEPS,
                "batch": BATCH,
                "mixes": MIXES,
            },
            "groups": summarize(rows),
            "sskde_on_random_linear": random_linear_sskde(options.data),
        },
    )


if __name__ == "__main__":
    main()
