"""What trains the linear classifiers of the rivals best on frozen features (`ropaws bench --network NAME`).

python benchmarks/rival_trials.py --data FOLDER [--work FOLDER] [--pools tiny garments digits]
    [--backbone dinov2-small --init FILE --size 98]

FOLDER has tinyimagenet32.npz (train_images of 32 px, train_labels); garments are embedded, digits are
scikit-learn's. Three pools that are in no table of the bench on features: 20 classes of Tiny-ImageNet, five
kinds of garment and six digits, each with 300 images of other classes; 4 labels per class. Learning rates of
cross-entropy, and rates and thresholds of FixMatch, in as many steps as the bench gives them.
Accuracy on the unlabeled in-class images of the pool, beside logistic regression; FixMatch with the share of
the pool that it selects in the last tenth of its steps. Writes results/rival_trials.json.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from feature_collections import SOURCES, Array
from method_heads import start_encoder
from timing import write_results
from torch import Tensor

import ropaws
from ropaws.classify import head
from ropaws.classify.logistic import fit_logistic
from ropaws.core.features import Features, SeveralKinds
from ropaws.core.optimizers import OptimConfig, build_optimizer, learning_rate
from ropaws.core.terminal import Terminal
from ropaws.methods import CrossEntropy, FixMatch
from ropaws.methods.classifier import FIXMATCH_OPTIM, Averaged, ClassifierMethod
from ropaws.pool.augment import AugmentConfig, Normalization, View
from ropaws.pool.corpus import ImageStack
from ropaws.pool.rand_augment import StrongView, WeakView
from ropaws.run.train_state import in_main_directions
from ropaws.training.loaders import BatchStream, TrainingData
from ropaws.training.loop import fit

LABELS, DRAWS, VIEWS = 4, 1, 2
STEPS = {"cross-entropy": 600, "fixmatch": 430}  # of the bench, where RoPAWS takes 300
PER_CLASS, OTHERS = 60, 300


class Pool(NamedTuple):
    """Features in two kinds of views, and classes; -1 is out-of-class."""

    features: SeveralKinds
    truth: Tensor  # (n,)
    augment: AugmentConfig

    @property
    def classes(self) -> int:
        return int(self.truth.max()) + 1


def _digits() -> tuple[Array, Array]:
    """Enlarged to 32 px, as colors."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    gray = (pixels.reshape(-1, 8, 8) * 15).astype(np.uint8).repeat(4, axis=1).repeat(4, axis=2)
    return gray[..., None].repeat(3, axis=3), labels


def images_of(name: str, data: Path | None, work: Path) -> tuple[Array, Array]:
    """In-class and other images, with classes from 0; -1 for the others."""
    if name == "digits":
        images, labels = _digits()
        inside: Array = np.arange(6)
    else:
        found = SOURCES[name](data, work)
        images, labels = found.images, found.labels
        inside = np.random.default_rng(6).permutation(172)[:20] if name == "tiny" else np.arange(5)
    rows = [np.flatnonzero(labels == c)[:PER_CLASS] for c in inside]
    others = np.flatnonzero(~np.isin(labels, inside))
    others = np.random.default_rng(0).permutation(others)[: min(OTHERS, sum(map(len, rows)))]
    truth = np.concatenate([np.full(len(part), number) for number, part in enumerate([*rows, others])])
    return images[np.concatenate([*rows, others])], np.where(truth == len(rows), -1, truth)


def pool_of(name: str, options: argparse.Namespace) -> Pool:
    images, truth = images_of(name, options.data, options.work)
    path = options.work / f"{name}-rivals.npz"
    np.savez(path, images=images)
    embedder = ropaws.Embedder(
        options.backbone, init=options.init, size=options.size, cache=options.work / "cache",
        console=Terminal(quiet=True),
    )  # fmt: skip
    pool = ropaws.Pool.open(path)
    stack = ImageStack(pool.images, embedder.embedding(pool).image_size)
    kinds: list[View] = [WeakView(size=options.size), StrongView(size=options.size)]
    views: dict[View, Features] = {
        kind: embedder.features(stack, views=VIEWS, kind=kind).features for kind in kinds
    }
    return Pool(SeveralKinds(views), torch.from_numpy(truth), AugmentConfig(size=options.size))


def draw(pool: Pool, seed: int) -> Tensor:
    """Positions of the labeled images."""
    random = np.random.default_rng(seed)
    rows = [random.permutation(np.flatnonzero(pool.truth == c))[:LABELS] for c in range(pool.classes)]
    return torch.from_numpy(np.concatenate(rows))


def trained(
    pool: Pool, labeled: Tensor, method: ClassifierMethod, peak: float, steps: int, seed: int
) -> tuple[Tensor, float]:
    """Probabilities of the whole pool, and the share of it that was selected at the end."""
    torch.manual_seed(seed)
    encoder = start_encoder(pool.features)  # type: ignore[arg-type]
    model = method.build(encoder, classes=pool.classes, pool=len(pool.truth))
    rows = in_main_directions(pool.features, encoder)
    stream = BatchStream(
        TrainingData(rows, labeled, pool.truth[labeled], Normalization((0.0,), (1.0,))),
        method.views(pool.augment),
        method.labeled_view(pool.augment),
        head.head_support([LABELS] * pool.classes),
        min(head.BATCH, len(pool.truth) // 2),
        seed,
        pool.augment.size,
    )
    optim = OptimConfig(**{**FIXMATCH_OPTIM, "peak": peak}, start=peak, end=0.0, warmup=0)
    optimizer, rate = build_optimizer(model, optim), learning_rate(optim, steps)
    taken = fit(model, method, stream.batches(0, steps), optimizer, rate)
    selected = [float(result.losses.parts.get("selected", 0.0)) for result in taken]
    assert isinstance(model, Averaged)
    model.eval()
    with torch.no_grad():
        logits = model.predictor.logits(model.predictor(pool.features[slice(None)]))
    return logits.softmax(dim=1), statistics.fmean(selected[-steps // 10 :])


RATES = (0.03, 0.3, 1.0)
FIXMATCH = ((0.95, 0.03), (0.95, 0.3), (0.95, 1.0), (0.8, 0.3))  # threshold and rate


def measure(pool: Pool, seed: int) -> dict[str, float]:
    """Accuracy in percent by what was trained how; and what FixMatch selected."""
    labeled = draw(pool, seed)
    rest = pool.truth >= 0
    rest[labeled] = False

    def right(probs: Tensor) -> float:
        return 100 * float((probs.argmax(dim=1) == pool.truth)[rest].double().mean())

    rows = pool.features[slice(None)].float()
    rows = F.normalize(rows, dim=1) - F.normalize(rows, dim=1).mean(dim=0)
    found = {
        "logistic regression": right(
            fit_logistic(rows[labeled], pool.truth[labeled], classes=pool.classes)(rows)
        )
    }
    for rate in RATES:
        probs, _ = trained(pool, labeled, CrossEntropy(), rate, STEPS["cross-entropy"], seed)
        found[f"cross-entropy, rate {rate:g}"] = right(probs)
    for threshold, rate in FIXMATCH:
        method = replace(FixMatch(), confidence=threshold)
        probs, selected = trained(pool, labeled, method, rate, STEPS["fixmatch"], seed)
        name = f"fixmatch, threshold {threshold:g}, rate {rate:g}"
        found |= {name: right(probs), f"{name}, selected": 100 * selected}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/rival_trials"))
    parser.add_argument("--backbone", default="efficientnet-lite0")
    parser.add_argument("--init", default="pretrained")
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--pools", nargs="+", default=["tiny", "garments", "digits"])
    parser.add_argument("--draws", type=int, default=DRAWS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.pools:
        pool = pool_of(name, options)
        draws = [measure(pool, seed) for seed in range(options.draws)]
        means = {key: round(statistics.fmean(each[key] for each in draws), 2) for key in draws[0]}
        write_results("rival_trials", {f"{options.backbone}, {name}": {"draws": len(draws)} | means})


if __name__ == "__main__":
    main()
