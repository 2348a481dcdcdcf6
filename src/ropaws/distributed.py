"""The processes of a run, behind a few functions.

In a single process each of them returns its input, so no caller asks how many there are. A process
that cannot join the others is an error, never a training of its own.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

MINUTES = 30  # that a process waits for the others before it gives up
BUCKET = 1 << 25  # bytes of gradients that are sent at once


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
    if not (dist.is_available() and dist.is_initialized()):
        return Place()
    return Place(dist.get_rank(), dist.get_world_size(), planned_place().local_rank)


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
        yield place()
    finally:
        dist.destroy_process_group()


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
    if place().size == 1:
        return rows
    gathered: Tensor = _AllGather.apply(rows)  # type: ignore[no-untyped-call]
    return gathered


def gather_constants(rows: Tensor) -> Tensor:
    """The same without gradient."""
    return rows.detach() if place().size == 1 else _gather(rows.detach())[0]


def stack_constants(value: Tensor) -> Tensor:
    """The same-shaped tensor of every process.   (...)  ->  (processes, ...)"""
    if place().size == 1:
        return value.detach()[None]
    parts = [torch.empty_like(value) for _ in range(place().size)]
    dist.all_gather(parts, value.detach().contiguous())
    return torch.stack(parts)


def sum_constants(value: Tensor) -> Tensor:
    """Sum over the processes without gradient."""
    value = value.detach().clone(memory_format=torch.contiguous_format)
    if place().size > 1:
        dist.all_reduce(value)
    return value


def all_mean(value: Tensor) -> Tensor:
    """Mean over the processes, with gradient."""
    if place().size == 1:
        return value
    mean: Tensor = _AllMean.apply(value)  # type: ignore[no-untyped-call]
    return mean


def all_sum(value: Tensor) -> Tensor:
    """Sum over the processes, with gradient."""
    return all_mean(value) * place().size


class _AllGather(torch.autograd.Function):
    """Backward: every process uses all rows, so a row's gradient is the sum of what all say of it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        gathered, ctx.start = _gather(rows)
        ctx.count = len(rows)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[ctx.start : ctx.start + ctx.count]


class _AllMean(torch.autograd.Function):
    """Backward: what all processes say of the mean, each of which got an equal share of this value."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return _mean(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _mean(gradient)


def _mean(value: Tensor) -> Tensor:
    value = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(value)
    return value / place().size


def _gather(rows: Tensor) -> tuple[Tensor, int]:
    """All rows, and where this process's start. Padded to the longest: collectives want equal shapes."""
    rank, size, _ = place()
    counts = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    lengths = [int(count) for count in counts]
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded)
    together = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    return together, sum(lengths[:rank])


@torch.no_grad()
def mean_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients over the processes, in buckets: few large messages instead of many small.

    A weight without a gradient in every process keeps none: with zeros, weight decay would change it.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if place().size == 1 or not trained:
        return
    used = torch.tensor([float(parameter.grad is not None) for parameter in trained])
    used = sum_constants(used.to(trained[0].device))
    bucket: list[Tensor] = []
    for parameter, users in zip(trained, used.tolist(), strict=True):
        if not users:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # another process has one
        bucket.append(parameter.grad)
        if sum(gradient.nbytes for gradient in bucket) > BUCKET:
            _mean_in_place(bucket)
            bucket = []
    _mean_in_place(bucket)


def _mean_in_place(gradients: list[Tensor]) -> None:
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= place().size
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def same_everywhere(module: nn.Module) -> None:
    """Give all processes the first one's weights and buffers."""
    if place().size > 1:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set anywhere: a signal may reach one process only, and all must stop alike."""
    if place().size == 1:
        return flag
    value = torch.tensor(int(flag), device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value)


def wait_for_all() -> None:
    if place().size > 1:
        dist.barrier()
