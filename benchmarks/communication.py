"""What the processes of a step send, and what the posterior needs: arithmetic, and a check of it.

python benchmarks/communication.py             two minutes; writes results/communication.json
python benchmarks/communication.py --arithmetic    a second: only the table of the paper's setting

Bytes that one process sends in one step of the paper's ImageNet setting (ResNet-50, 4096 unlabeled images of
eight views, 6720 supports, 2048 dimensions), with rings: an all-reduce of n bytes sends 2 n (P - 1) / P, an
all-gather of n bytes of each process n (P - 1). The same arithmetic, for the demo's network, is compared with
the bytes of all messages of a step of two and four processes, which are counted; and messages of many sizes
give the latency and the bandwidth from which times follow. All processes share this machine: times say what
gloo and sockets cost here, not what a network would.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import interleaved, read_results, write_results
from torch import nn

from ropaws import distributed, recipes
from ropaws.batch import Embeddings, Support
from ropaws.config import RunConfig
from ropaws.data.sources import DataConfig, load_corpus
from ropaws.methods import RoPAWS
from ropaws.methods.soft_nn import gather_support
from ropaws.models import build_encoder
from ropaws.processes import gradient_exchange
from ropaws.terminal import Terminal
from ropaws.training.loop import fit
from ropaws.training.parts import prepare, stream_of

FLOAT, LONG = 4, 8  # bytes
MEGABYTE = 1e6
WORLD_SIZES = (2, 4)
STEPS = 4
QUERIES, SUPPORTS, DIMS, CLASSES = 1024, 320, 128, 10  # of the posterior that is timed
# Who sends: the first of these names that is found among the callers of a message.
SENDERS = {
    "_Normalize.forward": "batch norm",
    "_Normalize.backward": "batch norm",
    "GradientExchange._send_next": "gradients",
    "gather_support": "supports, both sides, with labels",
    "_AllGather.backward": "gradient of the gathered supports",
    "RoPAWS.posterior": "unlabeled targets, two views",
    "global_mean": "mean prediction, forward and backward",
    "_AllSum.backward": "mean prediction, forward and backward",
    "_mean_losses": "loss for the log",
}


def arithmetic(config: RunConfig, classes: int, channels: int, processes: int) -> dict[str, float]:
    """Bytes that a process sends in a step, by purpose."""
    with torch.device("meta"):
        model = build_encoder(config.model, channels=channels)
    weights = list(model.parameters())
    norms = [m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    sizes = 2 if config.augment.small_crops else 1  # each size of crops goes through the network on its own
    batch, dims = config.train.batch, config.model.projection_dims
    supports = classes * config.support.images_per_class * config.support.views

    def reduced(numbers: float) -> float:
        return 2 * FLOAT * numbers * (processes - 1) / processes

    def gathered(each: float) -> float:
        """Of so many bytes of each process."""
        return each * (processes - 1)

    return {
        "gradients": reduced(sum(weight.numel() for weight in weights) + len(weights)),
        "gradient of the gathered supports": reduced(supports * dims),
        "batch norm": sizes * sum(gathered(FLOAT * (1 + 2 * c)) + reduced(2 * c) for c in norms),
        "mean prediction, forward and backward": 2 * reduced(classes + 1),
        "supports, both sides, with labels": gathered(
            LONG + supports / processes * (FLOAT * (2 * dims + classes) + 2 * LONG)
        ),
        "unlabeled targets, two views": 2 * gathered(LONG + batch / processes * FLOAT * (dims + 1)),
    }


def paper_setting() -> dict[str, object]:
    config = recipes.get("imagenet-1")
    classes = config.support.classes or 0
    table = {}
    for processes in (1, 2, 8, 16, 64):
        row = {k: v / MEGABYTE for k, v in arithmetic(config, classes, 3, processes).items()}
        round_ = 2 * config.train.batch * classes * FLOAT * (processes - 1) / processes / MEGABYTE
        table[str(processes)] = {
            **{k: round(v, 1) for k, v in row.items()},
            "iterative solver, each round of both views": round(round_, 1),
            "total": round(sum(row.values()), 1),
        }
    batch, dims = config.train.batch, config.model.projection_dims
    supports = classes * config.support.images_per_class * config.support.views
    votes = batch * (batch + supports) * FLOAT / MEGABYTE
    memory = {
        "votes of all rows": round(votes, 1),
        "votes of own rows, 64 processes": round(votes / 64, 1),
        "matrix to solve": round(batch * batch * FLOAT / MEGABYTE, 1),
        "similarities of anchors to supports, 64 processes": round(
            8 * batch / 64 * supports * FLOAT / MEGABYTE, 1
        ),
        "gathered supports, both sides": round(2 * supports * dims * FLOAT / MEGABYTE, 1),
    }
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build_encoder(config.model, channels=3).parameters())
    return {"megabytes_sent_a_step": table, "megabytes_held": memory, "parameters": parameters}


# What is sent, in every process


class Counted:
    """Counts messages and the bytes that rings send, by sender."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        size = distributed.place().size
        self._wrap(dist, "all_reduce", lambda value, **_: 2 * value.nbytes * (size - 1) / size)
        self._wrap(dist, "all_gather", lambda parts, value: value.nbytes * (size - 1))

    def _wrap(self, place: Any, name: str, sent: Callable[..., float]) -> None:
        original = getattr(place, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            sender = _sender()
            self.bytes[sender] += sent(*arguments, **options)
            self.messages[sender] += 1
            return original(*arguments, **options)

        setattr(place, name, counting)


def _sender() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_qualname in SENDERS:
            return SENDERS[frame.f_code.co_qualname]
        frame = frame.f_back
    return "other"


def demo_config(folder: Path) -> RunConfig:
    config = recipes.scratch()
    return replace(
        config,
        data=DataConfig(source=str(folder / "data.npz"), labels_per_class=4),
        train=replace(config.train, steps=STEPS, batch=128, precision="fp32"),
    )


def count_steps(config: RunConfig) -> dict[str, object]:
    """Bytes and messages of a step, all through gloo."""
    parts = prepare(config, load_corpus(config.data), torch.device("cpu"), Terminal(quiet=True), None)
    stream = stream_of(config, parts)
    counted = Counted()
    steps = fit(parts.model, config.method, stream.batches(0, STEPS), parts.optimizer, lambda step: 0.0)
    for _ in steps:
        pass
    return {
        "bytes": {name: value / STEPS for name, value in counted.bytes.items()},
        "messages": {name: value / STEPS for name, value in counted.messages.items()},
    }


def time_messages() -> dict[str, object]:
    """Seconds of all-reduces by bytes that a process sends, and of the ways within one machine."""
    size, here = distributed.place().size, distributed._local
    rows = []
    for numbers in (64, 1024, 16_384, 262_144, 2_097_152):
        value = torch.zeros(numbers)
        seconds = _timed(lambda value=value: dist.all_reduce(value), 40 if numbers < 100_000 else 8)
        rows.append((2 * value.nbytes * (size - 1) / size, seconds))
    sent, seconds = np.array(rows).T
    # Least squares of relative errors: seconds = latency + bytes / bandwidth
    factors = np.linalg.lstsq(
        np.stack([1 / seconds, sent / seconds], axis=1), np.ones(len(rows)), rcond=None
    )[0]
    within = {"socket": torch.zeros(192), "memory": torch.zeros(262_144)}
    micro = {
        f"{way}_microseconds": round(1e6 * _timed(lambda value=value: here.stack(value), 40))
        for way, value in within.items()
        if here is not None and here.suits(value)
    }
    return {
        "gloo_microseconds": {f"{int(b)} bytes": round(1e6 * s) for b, s in rows},
        "gloo_latency_microseconds": round(1e6 * factors[0]),
        "gloo_megabytes_per_second": round(1 / factors[1] / MEGABYTE),
        **micro,
    }


def _timed(task: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        task()
    dist.barrier()
    return statistics.median(interleaved({"task": task}, repeats, warm_up=0)["task"])


def time_posterior() -> dict[str, float]:
    """Milliseconds of gathering the supports, and of the posterior of a whole batch, by solver."""
    rank, size, _ = distributed.place()
    random = torch.Generator().manual_seed(rank)

    def unit(rows: int) -> torch.Tensor:
        return F.normalize(torch.randn(rows, DIMS, generator=random), dim=1)

    queries, count = unit(QUERIES // size), SUPPORTS // size
    classes = torch.arange(count) % CLASSES
    support = Support(torch.empty(count, 0), F.one_hot(classes, CLASSES).float(), classes, classes)
    embedded = Embeddings(unit(count), unit(count))
    known = gather_support(embedded, support, 0.1)
    methods = {"exact": RoPAWS(), "iterative": RoPAWS(solver="iterative")}
    tasks: dict[str, Callable[[], object]] = {
        "gather supports": lambda: gather_support(embedded, support, 0.1),
        "gather queries": lambda: distributed.gather_constants(queries),
    }
    for name, method in methods.items():
        tasks[f"posterior, {name}"] = lambda method=method: method.posterior(
            queries, known.h, known.labels, 0.1
        )
    with torch.no_grad():
        seconds = interleaved(tasks, 15)
    return {name: round(1e3 * statistics.median(values), 2) for name, values in seconds.items()}


def work(folder: Path) -> None:
    """Of one process; the first one writes what it found."""
    torch.set_num_threads(1)
    with distributed.joined(torch.device("cpu")) as at:
        found: dict[str, object] = {"milliseconds": time_posterior()}
        if at.size > 1:
            found |= time_messages()
            gradient_exchange._gradient_group()
            # So that every message is one of torch.distributed:
            distributed._local = gradient_exchange._exchange = None
            found |= count_steps(demo_config(folder))
        if at.rank == 0:
            (folder / f"{at.size}.json").write_text(json.dumps(found))
        distributed.wait_for_all()
    sys.stdout.flush()
    os._exit(0)  # a gloo thread sometimes aborts while the interpreter shuts down


def measure() -> dict[str, object]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        images = np.random.default_rng(0).integers(0, 256, (2000, 28, 28), dtype=np.uint8)
        np.savez(folder / "data.npz", train_images=images, train_labels=np.arange(2000) % 5)
        for processes in (1, *WORLD_SIZES):
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            command = [sys.executable, *launcher, __file__, "--work", place]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, capture_output=True, check=False)
            found = json.loads((folder / f"{processes}.json").read_text())
            results[str(processes)] = found
            if processes == 1:
                continue
            expected = arithmetic(demo_config(folder), 5, 1, processes)
            counted = {name: found["bytes"][name] for name in expected}
            found["arithmetic"] = {name: round(value) for name, value in expected.items()}
            found["counted_against_arithmetic"] = round(sum(counted.values()) / sum(expected.values()), 4)
            found["largest_difference"] = round(
                max(abs(counted[name] / expected[name] - 1) for name in expected), 4
            )
            print(processes, found, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arithmetic", action="store_true")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    results = paper_setting()
    results["measured"] = (
        read_results("communication").get("measured", {}) if options.arithmetic else measure()
    )
    write_results("communication", results)


if __name__ == "__main__":
    main()
