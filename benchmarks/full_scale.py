"""What the recipes cost at full scale, counted on paper: memory, arithmetic and messages of a training step.

python benchmarks/full_scale.py [--check]

A step of every recipe (forward, backward, optimizer) is run at its true shapes on tensors without content
(torch's FakeTensorMode, on the meta device), in bf16, so that shapes that do not fit, dtypes that do not go
together and operations without a gradient come out here. For one process of many, messages from the others
are replaced by copies of its own. `demo` looks into its tensors, so its step is a real one.

Memory: the most bytes of tensors that live at a time, with weights, gradients, momentum, images, and the
buckets of DistributedDataParallel. Workspaces of kernels and what the allocator keeps come on top; CPU
kernels stand for those of a GPU. Arithmetic: by torch's FlopCounterMode (convolutions and matrix products, a
multiplication and an addition are two), without the solver of the posterior. Hours: at the arithmetic per
second of ResNet-50's published training throughput, in mixed precision, without waiting for data or messages;
of the recipes with 64 processes also at the arithmetic per second of SwAV's published time per epoch, whose
views, batch and processes are the same, with all waiting in it.
Writes results/full_scale.json; --check only runs each kind of step, in seconds.
"""

import argparse
import itertools
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from timing import write_results
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ropaws import RunConfig, recipes
from ropaws.core import distributed
from ropaws.core.distributed import Rank
from ropaws.core.optimizers import build_optimizer
from ropaws.core.randomness import support_indices, support_share
from ropaws.core.records import Batch, Support
from ropaws.embedding.backbones import build_encoder
from ropaws.pool.datasets.catalog import MIXES

CLASSES = {"fashion-demo": 5, "cifar10": 10, "cifar100": 100, "semi-inat": 810, "imagenet": 1000}
# Images per second and GPU of training ResNet-50 at 224 px in mixed precision, NVIDIA/DeepLearningExamples,
# PyTorch/Classification/ConvNets/resnet50v1.5/README.md (container 21.03, one GPU).
PUBLISHED = {"V100 16 GB": 1200, "A100 80 GB": 2470}
# Seconds of an epoch of ImageNet on 64 GPUs (V100 16 GB, says the paper) with batches of 4,096, 2 views of
# 224 px and 6 of 96: facebookresearch/swav, README.md, "Running times", and the scripts linked there.
SWAV_EPOCH, SWAV_STEPS = 220, 1_281_167 // 4096
PROCESSES = {"semi-inat": 64, "imagenet": 64}  # in the paper; else one
BUCKET = 25 << 20  # bytes of gradients in a message of DistributedDataParallel
GB = 1 << 30


@dataclass
class Cost:
    """Of a step, in one process."""

    memory: int = 0  # bytes
    flops: int = 0
    messages: int = 0
    received: int = 0  # bytes


class LivingBytes(TorchDispatchMode):
    """The most bytes of tensors at a time. Views share what they are views of."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def see(self, *tensors: object) -> None:
        for tensor in tensors:
            if (
                isinstance(tensor, Tensor)
                and (key := id(storage := tensor.untyped_storage())) not in self.known
            ):
                self.known.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._forget, key, storage.nbytes())
        self.most = max(self.most, self.now)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.see(*tree_leaves(found))
        return found


@contextmanager
def pretended(at: Rank, cost: Cost) -> Iterator[None]:
    """One process of many, which all send the same."""

    def count(size: int) -> None:
        cost.messages += 1
        cost.received += size

    def gather(several: Sequence[Tensor], lengths: object = None) -> tuple[tuple[Tensor, ...], int]:
        if lengths is None:
            count(8 * at.size)  # the number of rows
        count(at.size * sum(rows.numel() * rows.itemsize for rows in several))
        return tuple(torch.cat([rows] * at.size) for rows in several), 0

    def reduce(value: Tensor) -> None:
        count(value.numel() * value.itemsize)

    with ExitStack() as stack:
        for name, value in (("is_initialized", True), ("get_rank", at.rank), ("get_world_size", at.size)):
            stack.enter_context(mock.patch.object(dist, name, lambda value=value: value))
        stack.enter_context(mock.patch.object(dist, "all_reduce", reduce))
        stack.enter_context(mock.patch.object(distributed, "_gather", gather))
        yield


def classes_of(source: str) -> int:
    """Number of known classes of a named dataset or mix."""
    mix = MIXES.get(source)
    if mix is not None and mix.known is not None:
        return mix.known if isinstance(mix.known, int) else len(mix.known)
    base = source if mix is None else mix.source
    return CLASSES[base.removesuffix("-curated")]


def processes_of(source: str) -> int:
    return PROCESSES.get(source.removesuffix("-curated"), 1)


def _fake_model(config: RunConfig) -> nn.Module:
    """The model of a recipe, inside FakeTensorMode: as if it were on the CPU, which autocast asks for."""
    plain = replace(config.model, init=None)
    with unset_fake_temporarily(), torch.device("meta"):
        encoder = build_encoder(plain, channels=3, autocast=torch.bfloat16)
        classes = classes_of(config.data.source)
        model = config.method.build(encoder, classes=classes, pool=config.train.batch).train()
    for module in model.modules():
        for named in (module._parameters, module._buffers):
            for name, value in named.items():
                if value is not None:
                    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
                    is_weight = isinstance(value, nn.Parameter)
                    named[name] = nn.Parameter(made, value.requires_grad) if is_weight else made
    return model


class Shapes(NamedTuple):
    """Of what one process gets."""

    unlabeled: int
    labeled: int  # rows
    classes: int  # of a support batch


def shapes(config: RunConfig, at: Rank) -> Shapes:
    """As the loader shares a batch out."""
    labels = torch.arange(classes_of(config.data.source)).repeat_interleave(config.support.images_per_class)
    positions, columns = support_indices(0, labels, config.support, seed=0)
    images = support_share(len(positions), config.support, at)
    own = distributed.share(config.train.batch, at)
    return Shapes(own.stop - own.start, len(images) * config.support.views, int(columns.max()) + 1)


def batch_of(config: RunConfig, of: Shapes) -> Batch:
    side = config.augment.size
    rows = torch.zeros(of.labeled, dtype=torch.long)
    labeled = Support(torch.zeros(of.labeled, 3, side, side), torch.zeros(of.labeled, of.classes), rows, rows)
    views = {
        role: torch.zeros(of.unlabeled, 3, view.size, view.size)  # type: ignore[attr-defined]
        for role, view in config.method.views(config.augment).items()
    }
    return Batch(0, config.train.steps, views, torch.zeros(of.unlabeled, dtype=torch.long), labeled)


def check_step(config: RunConfig, *, processes: int) -> None:
    """Run forward and backward of a step on shapes alone, without counting anything.

    Raises:
        Exception: Whatever would be wrong with the shapes of a real one.
    """
    shapes(config, Rank(processes - 1, processes, 0))  # the last one gets least
    with FakeTensorMode():
        _forward_and_backward(config, _fake_model(config), Cost(), processes)


def step_cost(config: RunConfig, *, processes: int) -> Cost:
    """Of a whole step, counted while it runs on shapes alone."""
    cost = Cost()
    with FakeTensorMode(), LivingBytes() as living, FlopCounterMode(display=False) as flops:
        model = _fake_model(config)
        optimizer = build_optimizer(model, config.optim)
        _forward_and_backward(config, model, cost, processes)
        optimizer.step()
    gradients = sum(weight.numel() * weight.itemsize for weight in model.parameters() if weight.requires_grad)
    if processes > 1:
        cost.messages += -(-gradients // BUCKET)
        cost.received += gradients
    cost.memory = living.most + (gradients if processes > 1 else 0)
    cost.flops = flops.get_total_flops()
    return cost


def _forward_and_backward(config: RunConfig, model: nn.Module, cost: Cost, processes: int) -> None:
    at = Rank(0, processes, 0)
    with unset_fake_temporarily():
        of = shapes(config, at)
    batch = batch_of(config, of)
    with pretended(at, cost) if processes > 1 else nullcontext():
        _count_norms(model, cost, processes)
        losses = config.method.step(model, batch)
        losses.total.backward()
        distributed.all_mean(torch.stack([losses.total.detach(), *losses.parts.values()]))  # to log


def _count_norms(model: nn.Module, cost: Cost, processes: int) -> None:
    """Synchronized batch norm: moments of all processes forward, two sums backward."""

    def count(norm: nn.Module, *_: object) -> None:
        channels = norm.num_features
        cost.messages += 2
        cost.received += 4 * int(processes * (2 * channels + 1) + 2 * channels)  # type: ignore[operator]

    for norm in model.modules() if processes > 1 else ():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            norm.register_forward_hook(count)


def real_step() -> None:
    """Of the demo, whose automatic temperature depends on the content of tensors."""
    config = recipes.get("demo")
    torch.manual_seed(0)
    model = config.method.build(build_encoder(config.model, channels=3), classes=5, pool=config.train.batch)
    batch = batch_of(config, shapes(config, Rank()))
    random = {role: torch.rand_like(view) for role, view in batch.views.items()}
    count = len(batch.labeled.labels)
    numbers = torch.arange(count) % 5
    labeled = Support(
        torch.rand_like(batch.labeled.images),
        nn.functional.one_hot(numbers, 5).float(),
        torch.arange(count),
        numbers,
    )
    losses = config.method.step(model.train(), batch._replace(views=random, labeled=labeled))
    losses.total.backward()
    build_optimizer(model, config.optim).step()


def kinds() -> dict[str, list[str]]:
    """Recipes whose steps have the same shapes, by the first of them."""
    found: dict[Any, list[str]] = {}
    for name in recipes.RECIPES:
        config = recipes.get(name)
        step = (
            config.method,
            replace(config.model, init=None),
            config.augment,
            config.support,
            config.train.batch,
        )
        key = (*step, classes_of(config.data.source), processes_of(config.data.source))
        found.setdefault(repr(key), []).append(name)
    return {names[0]: names for names in found.values()}


def resnet_flops(*batches: tuple[int, int]) -> float:
    """Of a training step of ResNet-50 on images of ImageNet, (number, side) each."""
    with FakeTensorMode(), FlopCounterMode(display=False) as flops:
        model: Any = _fake_model(recipes.get("imagenet-10"))
        features = torch.cat([model.backbone(torch.zeros(count, 3, side, side)) for count, side in batches])
        nn.Linear(features.shape[1], 1000)(features).sum().backward()
    return float(flops.get_total_flops())


def row(name: str, names: list[str], image: float, swav: float) -> dict[str, Any]:
    """image, swav: arithmetic of an image of ResNet-50, and of a step of SwAV in one of 64 processes."""
    config = recipes.get(name)
    processes = processes_of(config.data.source)
    cost = step_cost(config, processes=processes)
    of = shapes(config, Rank(0, processes, 0))
    return {
        "recipes": names,
        "processes": processes,
        "unlabeled": of.unlabeled,
        "views": len(config.method.views(config.augment)),
        "labeled": of.labeled,
        "memory_gb": cost.memory / GB,
        "tflops": cost.flops / 1e12,
        "messages": cost.messages,
        "received_mb": cost.received / (1 << 20),
        "steps": {other: recipes.get(other).train.steps for other in names},
        "hours": {
            other: {
                gpu: recipes.get(other).train.steps * cost.flops / (images * image) / 3600
                for gpu, images in PUBLISHED.items()
            }
            for other in names
        },
        "hours_like_swav": {
            other: recipes.get(other).train.steps * cost.flops / swav * SWAV_EPOCH / SWAV_STEPS / 3600
            for other in (names if processes == 64 else ())
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only run each kind of step once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    groups = kinds()
    real_step()
    if options.check:
        for name, names in groups.items():
            began = time.perf_counter()
            if name != "demo":
                check_step(recipes.get(name), processes=processes_of(recipes.get(name).data.source))
            print(f"{' '.join(names)}: {time.perf_counter() - began:.1f} s", flush=True)
        print(f"{len(list(itertools.chain(*groups.values())))} recipes")
        return
    image, swav = resnet_flops((64, 224)) / 64, resnet_flops((2 * 64, 224), (6 * 64, 96))
    rows = {name: row(name, names, image, swav) for name, names in groups.items() if name != "demo"}
    counted = {"image_gflops": image / 1e9, "swav_tflops": swav / 1e12}
    write_results("full_scale", {**counted, "published": PUBLISHED, "rows": rows})


if __name__ == "__main__":
    main()
