"""The processes of a run, behind a few functions.

In a single process each of them returns its input, so no caller asks how many there are. A process
that cannot join the others is an error, never a training of its own.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ropaws.processes.gradient_exchange import MINUTES, GradientExchange
from ropaws.processes.local_exchange import LocalExchange, connect


class Place(NamedTuple):
    """Which of how many processes this one is, and its number on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def planned_place() -> Place:
    """Where the launcher says that this process will stand, before it joins the others."""
    return planned(os.environ)


def planned(environment: Mapping[str, str]) -> Place:
    """torchrun's variables, or SLURM's where a job step has several tasks."""
    if "WORLD_SIZE" in environment and "RANK" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif int(environment.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    else:
        return Place()
    rank, size, local = (int(environment.get(name, 0)) for name in names)
    return Place(rank, size, local)


def place() -> Place:
    """Where this process stands among those that have joined."""
    global _known
    if not (dist.is_available() and dist.is_initialized()):
        return Place()
    if _known[0] is not dist.group.WORLD:  # asked many times in a step: the variables are read once
        here = Place(dist.get_rank(), dist.get_world_size(), planned_place().local_rank)
        _known = (dist.group.WORLD, here)
    return _known[1]


_known: tuple[Any, Place] = (None, Place())  # the processes that have joined, and this one's place


@contextmanager
def joined(device: torch.device) -> Iterator[Place]:
    """Join the other processes that the launcher has started, if any; nccl on CUDA, else gloo."""
    plan = planned_place()
    if plan.size == 1 or dist.is_initialized():
        yield place()
        return
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise ValueError(
            f"process {plan.rank} of {plan.size} does not know where to meet the others: start with torchrun,"
            " or set MASTER_ADDR and MASTER_PORT to a host and a free port of the first one"
        )
    os.environ.update(RANK=str(plan.rank), WORLD_SIZE=str(plan.size), LOCAL_RANK=str(plan.local_rank))
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(minutes=MINUTES))
    except (RuntimeError, ValueError) as error:  # DistStoreError is a RuntimeError
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"process {plan.rank} of {plan.size} could not join the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({reason})"
        ) from None
    try:
        with _local_exchange(backend):
            yield place()
    finally:
        dist.destroy_process_group()


_local: LocalExchange | None = None  # to the others, where all are on this machine and compute on its CPU


@contextmanager
def _local_exchange(backend: str) -> Iterator[None]:
    global _local
    rank, size, _ = place()
    if backend == "gloo":
        _local = connect(rank, size, _tell_all, seconds=60 * MINUTES)
        if _local is not None:
            _local.take_large()
    try:
        yield
    finally:
        if _local is not None:
            _local.close()
        _local = None


def _tell_all(said: object) -> list[Any]:
    answers: list[Any] = [None] * place().size
    dist.all_gather_object(answers, said)
    return answers


def share(rows: int, at: Place | None = None) -> slice:
    """A process's part of the rows; the first processes take one more where they do not divide evenly."""
    rank, size, _ = at or place()
    each, more = divmod(rows, size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def all_gather(rows: Tensor) -> Tensor:
    """The rows of all processes, in their order, with gradient; their numbers may differ.

    (n_r, ...)  ->  (sum of n_r, ...)
    """
    return all_gather_with(rows)[0]


def all_gather_with(rows: Tensor, *constants: Tensor) -> tuple[Tensor, ...]:
    """all_gather of the rows, and of as many rows of constants without gradient, in one message."""
    if place().size == 1:
        return rows, *(value.detach() for value in constants)
    gathered: tuple[Tensor, ...] = _AllGather.apply(rows, *constants)  # type: ignore[no-untyped-call]
    return gathered


def gather_constants(rows: Tensor, *, of: int | None = None) -> Tensor:
    """all_gather without gradient.

    of: number of all rows, where each process has its share of them. Else they tell one another.
    """
    everyone = range(place().size)
    lengths = None if of is None else [len(range(of)[share(of, Place(r, len(everyone)))]) for r in everyone]
    return rows.detach() if place().size == 1 else _gather((rows.detach(),), lengths)[0][0]


def gather_together(*several: Tensor) -> tuple[Tensor, ...]:
    """gather_constants of tensors with the same number of rows, in one message."""
    several = tuple(rows.detach() for rows in several)
    return several if place().size == 1 else _gather(several)[0]


def stack_constants(value: Tensor) -> Tensor:
    """The same-shaped tensor of every process.   (...)  ->  (processes, ...)"""
    if place().size == 1:
        return value.detach()[None]
    if _local is not None and _local.suits(value):
        return _local.stack(value.detach())
    parts = [torch.empty_like(value) for _ in range(place().size)]
    dist.all_gather(parts, value.detach().contiguous())
    return torch.stack(parts)


def sum_constants(value: Tensor) -> Tensor:
    """Sum over the processes without gradient."""
    return _sum(value.detach())


def all_mean(value: Tensor) -> Tensor:
    """Mean over the processes, with gradient."""
    return value if place().size == 1 else all_sum(value) / place().size


def all_sum(value: Tensor) -> Tensor:
    """Sum over the processes, with gradient."""
    if place().size == 1:
        return value
    if not (torch.is_grad_enabled() and value.requires_grad):
        return _sum(value)
    total: Tensor = _AllSum.apply(value)  # type: ignore[no-untyped-call]
    return total


class _AllGather(torch.autograd.Function):
    """Backward: every process uses all rows, so a row's gradient is the sum of what all say of it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *constants: Tensor) -> tuple[Tensor, ...]:
        gathered, ctx.start = _gather((rows, *constants))
        ctx.count = len(rows)
        ctx.mark_non_differentiable(*gathered[1:])
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *constants: Tensor) -> tuple[Tensor | None, ...]:
        return all_sum(gradient)[ctx.start : ctx.start + ctx.count], *(None for _ in constants)


class _AllSum(torch.autograd.Function):
    """Backward: every process uses the sum, so a value's gradient is the sum of what all say of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return _sum(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return all_sum(gradient)


def _sum(value: Tensor) -> Tensor:
    """Over the processes; a new tensor."""
    if _local is not None and _local.suits(value):
        return _local.stack(value).sum(dim=0)
    total = value.clone(memory_format=torch.contiguous_format)
    if place().size > 1:
        dist.all_reduce(total)
    return total


def _gather(several: Sequence[Tensor], lengths: list[int] | None = None) -> tuple[tuple[Tensor, ...], int]:
    """All rows of each, and where this process's start. Padded to the longest: messages want equal shapes."""
    first = several[0]
    if lengths is None:
        counts = stack_constants(torch.tensor(len(first), device=first.device))
        lengths = [int(count) for count in counts.tolist()]
    packed = torch.cat([_as_bytes(rows) for rows in several], dim=1)  # (n_r, bytes of a row)
    padded = packed.new_zeros(max(lengths), packed.shape[1])
    padded[: len(first)] = packed
    parts = zip(stack_constants(padded), lengths, strict=True)
    together = torch.cat([part[:length] for part, length in parts])
    widths = [rows.itemsize * math.prod(rows.shape[1:]) for rows in several]
    unpacked = [
        part.contiguous().view(rows.dtype).view(-1, *rows.shape[1:])
        for rows, part in zip(several, together.split(widths, dim=1), strict=True)
    ]
    return tuple(unpacked), sum(lengths[: place().rank])


def _as_bytes(rows: Tensor) -> Tensor:
    """(n, ...)  ->  (n, bytes of a row)"""
    return rows.contiguous().view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)


def mean_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients that are there already."""
    GradientExchange(parameters).finish()


def same_everywhere(module: nn.Module) -> None:
    """Give all processes the first one's weights and buffers."""
    if place().size > 1:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set anywhere: a signal may reach one process only, and all must stop alike."""
    if place().size == 1:
        return flag
    return bool(stack_constants(torch.tensor(flag, device=device)).any())


def wait_for_all() -> None:
    if place().size > 1:
        dist.barrier()
