"""The paper's CIFAR-10 tables in small: PAWS against RoPAWS with out-of-class images in the pool.

python benchmarks/paper_small.py --data FOLDER [--work FOLDER] [--only main steps] [--share 1/2]

FOLDER as in feature_collections.py. Trained from scratch, the effect needs a hundred thousand steps of a
WRN-28-2. Here the features of a frozen network that was trained on ImageNet are computed once, and a linear
head that starts as their principal components is trained on cached views, by PAWS or RoPAWS with the paper's
settings, and by RoPAWS with the prior from the pool. A run takes seconds on one core. Every run is a file
below --work, so it can be interrupted, and shared among processes (--share). Writes results/paper_small.json.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feature_collections import _cifar10
from feature_tasks import TABLE, Data, load
from method_heads import start_encoder, train_head
from timing import write_results
from torch import Tensor, nn

from ropaws.classify import head
from ropaws.classify.head import LabeledRows
from ropaws.classify.propagation import pool_posterior
from ropaws.core.features import FeatureRows, main_directions, principal_components
from ropaws.core.files import write_json
from ropaws.insight.baselines import fit_sskde
from ropaws.insight.metrics import evaluation_figures
from ropaws.methods import PAWS, LabeledEmbeddings, Method, RoPAWS

CLASSES = 10
STEPS = head.STEPS
SEEDS = (0, 1, 2)
MIXES = {
    "none": "CIFAR-10",
    "cifar100": "CIFAR-10 + CIFAR-100",
    "tiny": "CIFAR-10 + Tiny-ImageNet",
    "svhn": "CIFAR-10 + rebuilt SVHN",
}
PAPER = RoPAWS(prior_temperature=0.1)
POOL = RoPAWS(prior="pool", regression_share=0.0)  # the embedding alone, as in the paper
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
    "prior from the pool": POOL,
    "prior from the pool, me-max over all": replace(POOL, reweight_entropy=False),
}
MAIN = ("paws", "ropaws", "prior from the pool")
ANALYZED = {
    ("none", 25),
    ("cifar100", 25),
    ("svhn", 4),
}  # mix, labels: propagation and SSKDE take time


@dataclass(frozen=True)
class Job:
    """One run."""

    mix: str
    labels: int  # per class
    variant: str
    steps: int = STEPS
    seed: int = 0

    @property
    def file(self) -> str:
        words = f"{self.mix}-{self.labels}-{self.variant}-{self.steps}-seed{self.seed}"
        return words.replace(" ", "_").replace(",", "") + ".json"


def jobs(parts: list[str]) -> list[Job]:
    """All that is asked for; a run that two tables share is there once."""
    found: list[Job] = []
    for seed in SEEDS:
        if "main" in parts:
            found += [
                Job(mix, labels, variant, seed=seed)
                for labels in (4, 25)
                for mix in MIXES
                for variant in MAIN
            ]
        if "ablation" in parts:
            found += [Job("svhn", 4, variant, seed=seed) for variant in VARIANTS]
        if "steps" in parts:
            found += [
                Job("svhn", 4, variant, steps=steps, seed=seed)
                for steps in (100, 300, 1000)
                for variant in MAIN
            ]
    return sorted(dict.fromkeys(found), key=lambda job: (job.seed, job.mix))  # one mix at a time is in memory


def run_job(job: Job, data: Data) -> dict[str, Any]:
    """Train, test; figures at the start and at the end."""
    views = None if data.views is None else torch.from_numpy(data.views)
    features = FeatureRows(torch.from_numpy(data.features), views)
    rows = torch.from_numpy(data.draw(job.labels, job.seed))
    labeled = LabeledRows(rows, torch.from_numpy(data.truth)[rows], CLASSES)
    analyses = (job.mix, job.labels) in ANALYZED and job.variant in MAIN and job.steps == STEPS
    began = time.perf_counter()
    encoder, method = start_encoder(features), VARIANTS[job.variant]
    start = _test(encoder, features, labeled, data)
    train_head(encoder, features, labeled, method, steps=job.steps, seed=job.seed)
    return {
        **asdict(job),
        "seconds": time.perf_counter() - began,
        "start": start,
        "end": _test(encoder, features, labeled, data),
        **(_analyses(encoder, features, labeled, data) if analyses else {}),
    }


def projected(data: Data) -> Data:
    """In the main directions of the pool, once for all runs."""
    rows = torch.from_numpy(data.features)
    mean, components = (part.float() for part in principal_components(FeatureRows(rows), head.DIMS))

    def project(part: np.ndarray) -> np.ndarray:
        blocks = torch.from_numpy(part).split(1024)
        return torch.cat([main_directions(block.float(), mean, components) for block in blocks]).numpy()

    views = None if data.views is None else project(data.views)
    return data._replace(features=project(data.features), views=views, test=project(data.test))


@torch.no_grad()
def _embed(encoder: nn.Module, rows: Tensor) -> Tensor:
    embedded: Tensor = encoder([rows])[0].h
    return embedded


def _support(encoder: nn.Module, features: FeatureRows, labeled: LabeledRows) -> LabeledEmbeddings:
    return LabeledEmbeddings(_embed(encoder, features[labeled.rows]), labeled.labels, CLASSES)


def _test(encoder: nn.Module, features: FeatureRows, labeled: LabeledRows, data: Data) -> dict[str, float]:
    """By the soft nearest-neighbor classifier and the similarity to labels, whatever the training was."""
    outputs = PAWS().classify(
        _embed(encoder, torch.from_numpy(data.test)), _support(encoder, features, labeled)
    )
    return evaluation_figures(outputs, torch.from_numpy(data.test_truth))


def _analyses(encoder: nn.Module, features: FeatureRows, labeled: LabeledRows, data: Data) -> dict[str, Any]:
    """Label propagation step by step (the paper's Tables 11 and 14), and SSKDE (Table 9)."""
    test, support = _embed(encoder, torch.from_numpy(data.test)), _support(encoder, features, labeled)
    truth = torch.from_numpy(data.test_truth)
    known = truth >= 0
    kernel = PAWS().kernel(support)
    table = []
    for iterations in (1, 2, 3, None):
        probs = pool_posterior(
            test, support.embeddings, support.one_hot, kernel, iterations=iterations, voters=None
        ).probs
        confidence, predicted = probs.max(dim=1)
        row = {
            "iterations": iterations,
            "accuracy": float((predicted[known] == truth[known]).double().mean()),
            "confidence_in": float(confidence[known].mean()),
        }
        if not known.all():
            row["confidence_out"] = float(confidence[~known].mean())
        table.append(row)
    some = _embed(encoder, features.center)[::4]
    density = fit_sskde(support.embeddings, labeled.labels, some, classes=CLASSES)
    sskde = density(test[known]).argmax(dim=1)
    return {"propagation": table, "sskde": float((sskde == truth[known]).double().mean())}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and deviation over seeds of every setting."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(f"{row['mix']}/{row['labels']}/{row['variant']}/{row['steps']}", []).append(row)
    return {key: _summary(group) for key, group in sorted(groups.items())}


def _summary(group: list[dict[str, Any]]) -> dict[str, Any]:
    found = {
        "seeds": len(group),
        "start": _spread([row["start"]["accuracy"] for row in group]),
        **{name: _spread([row["end"][name] for row in group]) for name in group[0]["end"]},
        "seconds": statistics.mean(row["seconds"] for row in group),
    }
    if "sskde" not in group[0]:
        return found
    tables = [row["propagation"] for row in group]
    return {
        **found,
        "sskde": _spread([row["sskde"] for row in group]),
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


def random_linear_sskde(data: Path, work: Path) -> list[float]:
    """SSKDE on a random linear map of the pixels to 128 dimensions, 25 labels: the paper has 13.9 %."""
    images = _cifar10(data, work)
    train, test = (torch.from_numpy(part).flatten(1).float() / 255 for part in images[::2])
    truth, labels = torch.from_numpy(images.test_labels), images.labels
    found = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        linear = nn.Linear(train.shape[1], 128)
        random = np.random.default_rng(seed)
        chosen = np.concatenate(
            [random.permutation(np.flatnonzero(labels == c))[:25] for c in range(CLASSES)]
        )
        with torch.no_grad():
            known, pool, queries = linear(train[chosen]), linear(train[::4]), linear(test)
        density = fit_sskde(known, torch.from_numpy(labels[chosen]), pool, classes=CLASSES)
        found.append(float((density(queries).argmax(dim=1) == truth).double().mean()))
    return _spread(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/features"))
    parser.add_argument("--only", nargs="+", default=["main", "ablation", "steps"])
    parser.add_argument("--share", default="1/1", help="this process does the i-th of n shares")
    options = parser.parse_args()
    torch.set_num_threads(1)
    number, shares = map(int, options.share.split("/"))
    wanted = jobs(options.only)
    folder = options.work / "paper-small"
    folder.mkdir(parents=True, exist_ok=True)
    mixes: dict[str, Data] = {}
    for count, job in enumerate(wanted):
        path = folder / job.file
        if path.exists() or count % shares != number - 1:
            continue
        if job.mix not in mixes:
            data = load(TABLE[MIXES[job.mix]], options.data, options.work)
            mixes = {job.mix: projected(data)}  # one at a time in memory
        row = run_job(job, mixes[job.mix])
        write_json(path, row)
        print(
            f"{count + 1}/{len(wanted)} {path.stem}: {row['start']['accuracy']:.1%} ->"
            f" {row['end']['accuracy']:.1%}, AUROC {row['end'].get('auroc', float('nan')):.1%}",
            flush=True,
        )
    rows = [json.loads((folder / job.file).read_text()) for job in wanted if (folder / job.file).exists()]
    if len(rows) < len(wanted):
        print(f"{len(wanted) - len(rows)} runs are left to other processes")
        return
    settings = {"backbone": "EfficientNet-Lite0, ImageNet, frozen, 96 px", "batch": head.BATCH}
    write_results(
        "paper_small",
        {
            "settings": settings,
            "groups": summarize(rows),
            "sskde_on_random_linear": random_linear_sskde(options.data, options.work),
        },
    )


if __name__ == "__main__":
    main()
