"""What methods cost: a whole training step of each, and how much of it is not the network.

python benchmarks/step_time.py              some minutes on two cores; writes results/step_time.json
python benchmarks/step_time.py --repeats 3  quicker and rougher

The step is the paper's CIFAR setting: WRN-28-2, 256 unlabeled images with two large views and six
small crops, 1280 supports. The loss part is the paper's ImageNet setting on given embeddings:
4096 unlabeled images, 6720 supports, 960 classes. For every method, the part of its step that is not the
backbone, the views and the optimizer is measured with a backbone that costs nothing.
"""

import argparse
import gc
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from timing import interleaved, median_ratio, read_results, write_results
from torch import nn

from ropaws import recipes
from ropaws.core.hardware import choose_precision, half_type, keep_freed_memory
from ropaws.core.optimizers import LARS
from ropaws.core.records import Batch, Embeddings, Support
from ropaws.embedding.backbones import build_encoder
from ropaws.methods import METHODS as METHOD_NAMES
from ropaws.methods import PAWS, Method, RoPAWS, make_method
from ropaws.pool.corpus import measure_normalization
from ropaws.run.config import RunConfig
from ropaws.training.loaders import BatchStream, TrainingData

METHODS: dict[str, Method] = {
    "paws": PAWS(),
    "ropaws": RoPAWS(),
    "ropaws_auto": RoPAWS(prior_temperature="auto"),
}


def stream_of(config: RunConfig, method: Method, data: TrainingData) -> BatchStream:
    return BatchStream(
        data,
        method.views(config.augment),
        method.labeled_view(config.augment),
        config.support,
        config.train.batch,
        seed=0,
        size=config.augment.size,
    )


def training_steps(recipe: str, *, channels: int, size: int, classes: int) -> dict[str, Callable[[], None]]:
    """One full step per method on random images: views, forward, loss, backward, LARS."""
    config = recipes.get(recipe)
    half = half_type(choose_precision("auto", torch.device("cpu")))
    images = torch.randint(0, 256, (4000, channels, size, size), dtype=torch.uint8)
    indices = torch.arange(4000)
    data = TrainingData(images, indices, indices % classes, measure_normalization(images))

    def step_of(method: Method) -> Callable[[], None]:
        stream = stream_of(config, method, data)
        encoder = build_encoder(config.model, channels=channels, autocast=half)
        model = method.build(encoder, classes=classes, pool=len(images))
        optimizer = LARS(model.parameters(), lr=0.1)

        def step() -> None:
            (batch,) = stream.batches(0, 1)
            method.step(model, batch).total.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return {name: step_of(METHODS[name]) for name in ("paws", "ropaws")}


class GivenEmbeddings(nn.Module):
    """Stands for the network: looks up embeddings, so that only the loss is timed."""

    def __init__(self, rows: int, dims: int) -> None:
        super().__init__()
        self.rows = F.normalize(torch.randn(rows, dims), dim=1).requires_grad_()

    def forward(self, batches: list[torch.Tensor]) -> list[Embeddings]:
        return [Embeddings(self.rows[batch], self.rows[batch]) for batch in batches]


class NoBackbone(nn.Module):
    """Costs nothing: the features are a few pixels."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.scale * images.flatten(1)[:, : self.features]


def method_steps(name: str) -> dict[str, Callable[[], None]]:
    """A full step of a method, and its loss and heads alone: forward and backward on a given batch."""
    config = recipes.get("cifar10-25")
    method = make_method(name)
    half = half_type(choose_precision("auto", torch.device("cpu")))
    images = torch.randint(0, 256, (4000, 3, 32, 32), dtype=torch.uint8)
    indices = torch.arange(4000)
    data = TrainingData(images, indices, indices % 10, measure_normalization(images))
    stream = stream_of(config, method, data)

    def step_of(encoder: nn.Module) -> Callable[[], None]:
        model = method.build(encoder, classes=10, pool=len(images))
        optimizer = torch.optim.SGD((w for w in model.parameters() if w.requires_grad), lr=0.0)
        if type(method).before_epoch is not Method.before_epoch:
            with torch.no_grad():
                method.before_epoch(model.eval(), stream.whole_pool(0))
        model.train()

        def whole() -> None:
            (batch,) = stream.batches(0, 1)
            method.step(model, batch).total.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                method.after_step(model, batch)

        (given,) = stream.batches(0, 1)

        def loss() -> None:
            method.step(model, given).total.backward()
            optimizer.zero_grad(set_to_none=True)

        return loss if isinstance(encoder.backbone, NoBackbone) else whole

    network = build_encoder(config.model, channels=3, autocast=half)
    light = build_encoder(config.model, channels=3)
    light.backbone = NoBackbone(network.feature_dims)
    return {"step": step_of(network), "loss": step_of(light)}


def method_costs(names: Sequence[str], turns: int) -> None:
    """Seconds of a step, and the share of it that is loss and heads, of methods; written one by one."""
    costs = read_results("step_time").get("methods", {})
    for name in names:
        seconds = interleaved(method_steps(name), turns, warm_up=1 if turns > 1 else 0)
        step, loss = (statistics.median(seconds[part]) for part in ("step", "loss"))
        costs[name] = {"seconds": round(step, 3), "loss_share": round(loss / step, 4)}
        print(name, costs[name], flush=True)
        write_results("step_time", {"methods": costs})
        gc.collect()


def loss_parts(
    *, unlabeled: int, classes: int, images: int, dims: int, crops: int
) -> dict[str, Callable[[], None]]:
    supports = classes * images
    model = GivenEmbeddings(supports + unlabeled * (2 + crops), dims)
    labels = F.one_hot(torch.arange(supports) // images, classes).float()
    support = Support(torch.arange(supports), labels, torch.arange(supports), labels.argmax(dim=1))
    views = {f"view{i}": supports + i * unlabeled + torch.arange(unlabeled) for i in range(2 + crops)}
    batch = Batch(0, 1, views, torch.arange(unlabeled), support)
    METHODS["ropaws_auto"].build(model, classes=classes, pool=unlabeled)  # its buffer
    return {
        name: (lambda m=method: m.step(model, batch).total.backward()) for name, method in METHODS.items()
    }


def summary(seconds: dict[str, list[float]]) -> dict[str, object]:
    return {
        "seconds": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "ratio_to_paws": {
            name: round(median_ratio(values, seconds["paws"]), 4) for name, values in seconds.items()
        },
        "turns": len(seconds["paws"]),
    }


def memory_gain(turns: int) -> float:
    """How much faster a step of the demo is when freed memory is kept.

    The setting is a process's own and what it has kept cannot be given back, so here processes
    take turns instead of functions.
    """
    ratios = []
    for _ in range(turns):
        default, kept = (
            float(subprocess.check_output([sys.executable, __file__, "--child", setting]))
            for setting in ("", "keep")
        )
        ratios.append(default / kept)
    return round(statistics.median(ratios), 2)


def child(setting: str) -> None:
    """Print the median seconds of a few steps."""
    if setting == "keep":
        keep_freed_memory()
    steps = training_steps("demo", channels=1, size=28, classes=5)
    print(statistics.median(interleaved({"paws": steps["paws"]}, 25, warm_up=5)["paws"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns (default: 5)")
    parser.add_argument(
        "--only", choices=["memory", "cifar", "imagenet", "methods"], help="measure one part anew"
    )
    parser.add_argument("--names", nargs="+", default=list(METHOD_NAMES), help="with --only methods: these")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child)
        return
    torch.manual_seed(0)
    if options.only in (None, "memory"):
        write_results("step_time", {"keep_freed_memory_speedup": memory_gain(options.repeats)})
    keep_freed_memory()
    if options.only in (None, "cifar"):
        steps = training_steps("cifar10-400", channels=3, size=32, classes=10)
        write_results("step_time", {"cifar_step": summary(interleaved(steps, options.repeats))})
    gc.collect()
    if options.only in (None, "methods"):
        method_costs(options.names, max(1, options.repeats // 2))
    if options.only in (None, "imagenet"):
        imagenet = loss_parts(unlabeled=4096, classes=960, images=7, dims=2048, crops=6)
        turns = max(3, options.repeats // 2)
        write_results("step_time", {"imagenet_loss": summary(interleaved(imagenet, turns))})


if __name__ == "__main__":
    main()
