"""The processes of a run, behind a few functions.

In a single process each of them returns its input, so no caller asks how many there are. A process
that cannot join the others is an error, never a training of its own.
"""

import hashlib
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

PATIENCE = 30 * 60.0  # seconds that a process waits for another before it gives up


class Rank(NamedTuple):
    """Which of how many processes this one is, and its number on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def planned_place() -> Rank:
    """Where the launcher says that this process will stand, before it joins the others."""
    return planned(os.environ)


def planned(environment: Mapping[str, str]) -> Rank:
    """torchrun's variables, or SLURM's where a job step has several tasks."""
    if "WORLD_SIZE" in environment and "RANK" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif int(environment.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    else:
        return Rank()
    rank, size, local = (int(environment.get(name, 0)) for name in names)
    return Rank(rank, size, local)


def place() -> Rank:
    """Where this process stands among those that have joined."""
    if not (dist.is_available() and dist.is_initialized()):
        return Rank()
    return Rank(dist.get_rank(), dist.get_world_size(), planned_place().local_rank)


# Gloo takes messages for one another that two processes send in different orders. Where one process leaves a
# layer out in a step, gradients would meet the messages of norm layers, so they have a group of their own. On
# CUDA that is None: several nccl groups at once may wait for one another.
_gradient_group: Any = None


@contextmanager
def joined(device: torch.device, *, seconds: float = PATIENCE) -> Iterator[Rank]:
    """Join the other processes that the launcher has started, if any; nccl on CUDA, else gloo.

    seconds: that one waits for another, to join or to answer
    """
    global _gradient_group
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
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where nccl looks for messages that are no tensors of ours
    patience = timedelta(seconds=seconds)
    try:
        dist.init_process_group(backend, timeout=patience)
        _gradient_group = dist.new_group(timeout=patience) if backend == "gloo" else None
    except (RuntimeError, ValueError) as error:  # DistStoreError is a RuntimeError
        raise ValueError(
            f"process {plan.rank} of {plan.size} could not join the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within {seconds:g} s ({_reason(error)}); see that all {plan.size}"
            " were started and reach this address, or give them more time with --timeout"
        ) from None
    try:
        yield place()
    finally:
        dist.destroy_process_group()


class PeerLostError(ConnectionError):
    """Another process of the run has ended, or does not answer."""


@contextmanager
def naming_lost_peers(remedy: Callable[[], str]) -> Iterator[None]:
    """Turn what torch says of a lost connection into a line that a person can do something about.

    remedy: what to do, asked when it happens
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        rank, size, _ = place()
        raise PeerLostError(
            f"process {rank} of {size} lost another one, which has ended or does not answer"
            f" ({_reason(error)}): look for what that one has said, then {remedy()}"
        ) from error


def _reason(error: Exception) -> str:
    """The first sentence, without the line of torch's source."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[[^\]]*\] *", "", first).split(". ")[0].rstrip(".")


def share(rows: int, at: Rank | None = None) -> slice:
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
    lengths = None if of is None else [len(range(of)[share(of, Rank(r, len(everyone)))]) for r in everyone]
    return rows.detach() if place().size == 1 else _gather((rows.detach(),), lengths)[0][0]


def gather_together(*several: Tensor) -> tuple[Tensor, ...]:
    """gather_constants of tensors with the same number of rows, in one message."""
    several = tuple(rows.detach() for rows in several)
    return several if place().size == 1 else _gather(several)[0]


def stack_constants(value: Tensor) -> Tensor:
    """Stack the tensors of all processes, which have one shape.   (...)  ->  (processes, ...)"""
    if place().size == 1:
        return value.detach()[None]
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


def data_parallel(step: nn.Module) -> nn.Module:
    """The module, with the first process's weights in all and gradients that are means over them.

    A weight that no process used keeps no gradient: with zeros, weight decay would change it.
    """
    if place().size == 1:
        return step
    for buffer in step.buffers():  # DDP would do so only together with sending them in every step
        dist.broadcast(buffer, src=0)
    with warnings.catch_warnings():  # the name that torch 2.13 prefers is unknown to 2.4
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(
            step, process_group=_gradient_group, find_unused_parameters=True, broadcast_buffers=False
        )


def check_same(seen: Mapping[str, Sequence[str]]) -> None:
    """Check that all processes see the same, before they train on it together.

    seen: what it is -> its items, such as the names of files, in their order. Digests are compared; items are
    told only where these differ.

    Raises:
        ValueError: One of them differs, in every process; it says which item is where.
    """
    if place().size == 1:
        return
    digests: list[Any] = [None] * place().size
    dist.all_gather_object(digests, {name: _digest(items) for name, items in seen.items()})
    for name, items in seen.items():
        other = next((rank for rank, said in enumerate(digests) if said[name] != digests[0][name]), None)
        if other is not None:
            found = _difference(_said_by(0, items), _said_by(other, items), other)
            raise ValueError(
                f"the processes see different {name}: {found}; give all of them the same, or a folder that"
                " all machines share"
            )


def _digest(items: Sequence[str]) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for item in items:
        state.update(f"{len(item)} {item}".encode(errors="surrogatepass"))
    return state.digest()


def _said_by(rank: int, items: Sequence[str]) -> list[str]:
    box = [list(items)]
    dist.broadcast_object_list(box, src=rank)
    return box[0]


def _difference(first: list[str], second: list[str], other: int) -> str:
    """What one of two processes has alone: the first such item of each."""
    said = []
    for rank, mine, theirs in ((0, first, set(second)), (other, second, set(first))):
        alone = [item for item in mine if item not in theirs]
        if alone:
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            said.append(f"only process {rank} has {alone[0]!r}{more}")
    return ", ".join(said) or f"process {other} has them in another order, or some of them twice"


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set anywhere: a signal may reach one process only, and all must stop alike."""
    if place().size == 1:
        return flag
    return bool(stack_constants(torch.tensor(flag, device=device)).any())


def wait_for_all() -> None:
    if place().size > 1:
        dist.barrier()


class SyncedBatchNorm(_BatchNorm):
    """BatchNorm1d and BatchNorm2d with the mean and variance over all processes.

    torch's own SyncBatchNorm refuses CPUs.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected (n, channels, ...), got {input.ndim} dimensions")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or place().size == 1:
            return _followed(self, super().forward(input))
        out, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        self._remember(mean, variance * (count / (count - 1)))
        return _followed(self, out)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


class _Normalize(torch.autograd.Function):
    """One exchange each way: moments forward, two sums backward.

    Sums come from torch's own kernels for batch norm: a general reduction over the images and pixels of a
    channels-last batch takes over ten times as long. The backward pass may be differentiated by its incoming
    gradient (ds3l), not by the images or weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        own_count = weight.new_tensor([x.numel() / x.shape[1]])
        parts = stack_constants(torch.cat([own_count, *_moments(x, weight)]))  # (processes, 1 + 2 channels)
        counts, means, variances = parts.split([1, x.shape[1], x.shape[1]], dim=1)
        count = float(counts.sum())
        # Sums of products, not matrix products, which autocast would take in half precision.
        mean = (counts * means).sum(dim=0) / count
        # Within the parts and between them: sums of squares of all would lose digits.
        variance = (counts * (variances + (means - mean).square())).sum(dim=0) / count
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.count = eps, count
        out = F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """dx = w s (dy - sum dy / n - y sum (dy y) / n),  with y = s (x - mean), s = 1 / sqrt(var + eps)"""
        x, weight, mean, variance = ctx.saved_tensors
        x, weight = x.detach(), weight.detach()
        wide, given = x.to(weight.dtype), gradient.to(weight.dtype)
        if x.numel():  # sum (dy y), sum dy
            _, slopes, sums = torch.ops.aten.native_batch_norm_backward(
                given, wide, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        else:
            slopes, sums = torch.zeros_like(weight), torch.zeros_like(weight)
        average, slope = all_sum(torch.stack([sums, slopes])) / ctx.count
        # In two passes over the rows:  dx = (a dy + c) - b x
        scale = (variance + ctx.eps).rsqrt()
        a = weight * scale
        b = a * scale * slope
        c = b * mean - a * average
        a, b, c = (value.view(-1, *(1,) * (x.ndim - 2)) for value in (a, b, c))
        towards = torch.addcmul(c, given, a).addcmul_(wide, b, value=-1)
        return towards.to(gradient.dtype), slopes, sums, None


def _moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, in the precision of the weight; 0 where there are no rows."""
    if not x.numel():
        return torch.zeros_like(weight), torch.zeros_like(weight)
    wide = x.to(weight.dtype)  # half precision would lose the sums
    mean, variance = torch.ops.aten.batch_norm_update_stats(wide, None, None, 0.0)
    return mean, variance


class _TorchSyncedBatchNorm(nn.SyncBatchNorm):
    """torch's own, for CUDA."""

    def forward(self, input: Tensor) -> Tensor:
        return _followed(self, super().forward(input))


def _followed(norm: nn.Module, out: Tensor) -> Tensor:
    """The norm layers of timm hold the dropout and the activation that come after them, in this order."""
    for layer in norm.children():
        out = layer(out)
    return out


def synchronize_norms(module: nn.Module, device: torch.device) -> None:
    """Replace every batch norm by a synchronized one: torch's own on CUDA, ours elsewhere."""
    if place().size > 1:
        _replace(module, _TorchSyncedBatchNorm if device.type == "cuda" else SyncedBatchNorm)


def _replace(module: nn.Module, kind: type[_BatchNorm]) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
            synced = kind(child.num_features)
            # The weights themselves, not copies: those of a frozen backbone must stay out of the optimizer.
            vars(synced).update(vars(child))
            setattr(module, name, synced)
        else:
            _replace(child, kind)
