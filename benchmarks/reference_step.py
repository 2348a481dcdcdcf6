"""A training step of the paper's CIFAR setting end to end, against the plain way of writing it.

python benchmarks/reference_step.py             ten minutes on two cores; writes results/reference_step.json
python benchmarks/reference_step.py --loads 0   the quiet part alone

The step: WRN-28-2, 256 unlabeled images with two large views and six small crops, 1,280 supports, RoPAWS
loss, backward, LARS. The plain way does what the reference code of PAWS and RoPAWS does, written here anew:
float32, contiguous tensors, a Dataset that augments image by image in Pillow in worker processes, an explicit
inverse in the loss. Both have the same batch and the same threads. Each way is a process of its own, because
memory and the waiting of threads are settings of a process; they take turns, on a quiet machine and with a
stated load of programs that compute without a pause. A step takes gigabytes, so a process is started for each
turn, takes one step to warm up and one that counts. Compilation is measured on the same step, and so are the
parts of ours.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from augment import pillow_view
from step_time import stream_of
from timing import answer_requests, median_ratio, programs_beside, turn_takers, write_results
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset

from ropaws import recipes
from ropaws.__main__ import WAITING
from ropaws.core.hardware import choose_precision, half_type, keep_freed_memory
from ropaws.core.optimizers import LARS
from ropaws.embedding.backbones import build_encoder
from ropaws.methods import encoder_of
from ropaws.pool.augment import AugmentConfig, Normalization
from ropaws.run.config import RunConfig
from ropaws.training.loaders import TrainingData

RECIPE, CLASSES, IMAGES, WORKERS = "cifar10-25", 10, 4000, 2
NORMALIZE = Normalization((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
# name: (arguments of the child, environment before torch is loaded)
WAYS = {
    "plain": ("plain", {}),
    "ours fp32": ("fp32", WAITING),
    "ours": ("auto", WAITING),
    "ours compiled": ("compiled", WAITING),
}
# Kinds of operations by the names that the profiler gives them; the rest is "other".
KINDS = {
    "convolutions": ("convolution",),
    "batch norm": ("batch_norm",),
    "relu and residual": ("aten::threshold_backward", "aten::clamp_min", "aten::relu", "aten::add"),
}


class PillowViews(Dataset[tuple[list[np.ndarray], int]]):
    """Random views of an image, one after the other in Pillow, and its class."""

    def __init__(self, images: np.ndarray, views: list[AugmentConfig]) -> None:
        self.images, self.views = images, views

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[list[np.ndarray], int]:
        return [pillow_view(self.images[index], view, NORMALIZE) for view in self.views], index % CLASSES


def endless(loader: DataLoader[tuple[list[Tensor], Tensor]]) -> Iterator[tuple[list[Tensor], Tensor]]:
    while True:
        yield from loader


def plain_loaders(config: RunConfig, images: np.ndarray) -> tuple[Iterator, Iterator]:
    """Unlabeled images with their views, supports with theirs; supports in turn, as many of each class."""
    augment, support = config.augment, config.support
    small = AugmentConfig(size=augment.small_size, scale=augment.small_scale)
    unlabeled = PillowViews(images, [augment] * 2 + [small] * augment.small_crops)
    labeled = PillowViews(images, [augment] * support.views)
    of_step = CLASSES * (support.images_per_class or 1)
    return (
        endless(DataLoader(unlabeled, config.train.batch, shuffle=True, num_workers=WORKERS, drop_last=True)),
        endless(DataLoader(labeled, of_step, num_workers=1, drop_last=True)),
    )


def plain_loss(z: Tensor, support: Tensor, labels: Tensor, views: int) -> Tensor:
    """RoPAWS with the inverse of Eq. (11).   z of all views (views * u, d), support (s, d), labels (s, c)"""

    def nearest(queries: Tensor) -> Tensor:
        return F.softmax(queries @ support.T / 0.1, dim=1) @ labels

    def posterior(queries: Tensor) -> tuple[Tensor, Tensor]:
        count = len(queries)
        own = queries @ queries.T / 0.1
        own = own.masked_fill(torch.eye(count, dtype=torch.bool), -torch.inf)
        boost = np.log(5.0 * count / len(support))
        votes = F.softmax(torch.cat([queries @ support.T / 0.1 + boost, own], dim=1), dim=1)
        prior = ((queries @ support.T).max(dim=1).values - 1).div(0.1).exp()[:, None]
        votes = votes * prior
        to_support, to_unlabeled = votes[:, : len(support)], votes[:, len(support) :]
        inside = torch.linalg.inv(torch.eye(count) - to_unlabeled) @ to_support @ labels
        share = inside.sum(dim=1, keepdim=True)
        return inside + (1 - share) / labels.shape[1], share[:, 0]

    def sharpened(probs: Tensor) -> Tensor:
        powers = probs**4
        return powers / powers.sum(dim=1, keepdim=True)

    probs = nearest(z)
    first, second, *_ = z.detach().chunk(views)
    support = support.detach()
    (target1, in1), (target2, in2) = posterior(first), posterior(second)
    target1, target2 = sharpened(target1), sharpened(target2)
    targets = torch.cat([target2, target1, *[(target1 + target2) / 2] * (views - 2)])
    weights = ((in1 + in2) / 2).repeat(views)
    entropy = (weights * -(targets * probs.clamp_min(1e-12).log()).sum(dim=1)).mean()
    mean = sharpened(probs).mean(dim=0)
    return entropy + (mean * mean.clamp_min(1e-12).log()).sum()


def plain_step() -> Callable[[], None]:
    """The step written the plain way."""
    config = recipes.get(RECIPE)
    images = np.random.default_rng(0).integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
    unlabeled, labeled = plain_loaders(config, images)
    encoder = build_encoder(config.model, channels=3)
    network = nn.Sequential(encoder.backbone, encoder.projection).train()
    optimizer = LARS(network.parameters(), lr=0.1)

    def step() -> None:
        views, _ = next(unlabeled)
        supports, classes = next(labeled)
        large = network(torch.cat([*supports, *views[:2]]))
        small = network(torch.cat(views[2:]))
        z = F.normalize(torch.cat([large, small]), dim=1)
        rows = len(supports) * len(classes)
        labels = F.one_hot(classes.repeat(len(supports)), CLASSES) * 0.9 + 0.1 / CLASSES
        plain_loss(z[rows:], z[:rows], labels, len(views)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_step(precision: str) -> Callable[[], None]:
    """The step as `ropaws train` takes it."""
    keep_freed_memory()
    config = recipes.get(RECIPE)
    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8)
    indices = torch.arange(IMAGES)
    stream = stream_of(config, config.method, TrainingData(images, indices, indices % CLASSES, NORMALIZE))
    chosen = choose_precision("fp32" if precision == "fp32" else "auto", torch.device("cpu"))
    encoder = build_encoder(config.model, channels=3, autocast=half_type(chosen))
    model = config.method.build(encoder, classes=CLASSES, pool=IMAGES)
    if precision == "compiled":
        encoder_of(model).backbone.compile()
    optimizer = LARS(model.parameters(), lr=0.1)
    numbers = itertools.count()

    def step() -> None:
        number = next(numbers)
        with record_function("part: views"):
            (batch,) = stream.batches(number, number + 1)
        with record_function("part: forward and loss"):
            loss = config.method.step(model, batch).total
        with record_function("part: backward"):
            loss.backward()
        with record_function("part: optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def parts_of(step: Callable[[], None]) -> dict[str, object]:
    """Percent of a step by kind of operation and by part; the seconds of the convolutions are the floor."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    events = [event for event in seen.key_averages() if not event.key.startswith("ProfilerStep")]
    whole = sum(event.self_cpu_time_total for event in events)
    kinds = dict.fromkeys([*KINDS, "other"], 0.0)
    for event in events:
        kind = next((kind for kind, names in KINDS.items() if any(n in event.key for n in names)), "other")
        kinds[kind] += event.self_cpu_time_total
    parts = {e.key.removeprefix("part: "): e.cpu_time_total for e in events if e.key.startswith("part: ")}
    return {
        "percent_by_kind": {kind: round(100 * value / whole, 1) for kind, value in kinds.items()},
        "percent_by_part": {part: round(100 * value / whole, 1) for part, value in parts.items()},
        "seconds": round(whole / 1e6, 2),
        "seconds_of_convolutions": round(kinds["convolutions"] / 1e6, 2),
    }


def child(way: str) -> None:
    torch.manual_seed(0)
    step = plain_step() if way == "plain" else our_step(way)

    def answer(request: str) -> object:
        if request == "parts":
            return parts_of(step)
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    answer_requests(answer)


def summary(seconds: dict[str, list[float]]) -> dict[str, object]:
    return {
        "seconds": {way: round(statistics.median(times), 2) for way, times in seconds.items()},
        "times_as_fast_as_plain": {
            way: round(median_ratio(seconds["plain"], times), 2) for way, times in seconds.items()
        },
        "turns": len(seconds["plain"]),
    }


class Turns(NamedTuple):
    """Seconds of the first step and of the one after it, of each turn, by way."""

    first: dict[str, list[float]]
    second: dict[str, list[float]]


def taken_in_turns(ways: Sequence[str], turns: int, kept: Path) -> Turns:
    """kept: a folder for what is compiled, empty at the start: the first turn pays for it."""
    first: dict[str, list[float]] = {way: [] for way in ways}
    second: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way in ways:
            name, settings = WAYS[way]
            command = ([__file__, "--child", name], {**settings, "TORCHINDUCTOR_CACHE_DIR": str(kept)})
            with turn_takers({way: command}) as takers:
                first[way].append(takers[way].ask("step"))
                second[way].append(takers[way].ask("step"))
            print(f"{way}: {first[way][-1]:.1f} s, then {second[way][-1]:.1f} s", flush=True)
    return Turns(first, second)


def compilation(turns: Turns) -> dict[str, object]:
    """What compiling costs at the start, what it saves in a step, and after how many steps it has paid."""
    plain, compiled = (statistics.median(turns.second[way]) for way in ("ours", "ours compiled"))
    cost = (turns.first["ours compiled"][0] - compiled) - (turns.first["ours"][0] - plain)
    saved = plain - compiled
    return {
        "seconds_at_the_start": round(cost, 1),
        "times_as_fast": round(median_ratio(turns.second["ours"], turns.second["ours compiled"]), 3),
        "pays_after_steps": round(cost / saved) if saved > 0 else None,
    }


def parts_in_a_process(way: str) -> dict[str, object]:
    with turn_takers({way: ([__file__, "--child", WAYS[way][0]], WAYS[way][1])}) as takers:
        takers[way].ask("step")
        found: dict[str, object] = takers[way].ask("parts")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3, help="turns of every way (default: 3)")
    parser.add_argument("--loads", type=int, nargs="*", default=(0, 1), help="programs beside (default: 0 1)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child)
        return
    for load in options.loads:
        with tempfile.TemporaryDirectory() as kept, programs_beside(load):
            turns = taken_in_turns(options.ways, options.turns if load == 0 else 1, Path(kept))
        write_results("reference_step", {f"{load} beside": summary(turns.second)})
        if load == 0 and "ours compiled" in options.ways:
            write_results("reference_step", {"compilation": compilation(turns)})
    for way in ("ours", "ours fp32"):
        write_results("reference_step", {f"parts of {way}": parts_in_a_process(way)})


if __name__ == "__main__":
    main()
