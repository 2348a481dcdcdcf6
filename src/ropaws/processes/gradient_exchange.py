"""The gradients of a step, averaged over the processes while the backward pass still runs."""

import functools
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MINUTES = 30  # that a process waits for the others before it gives up
BUCKET = 1 << 24  # bytes of gradients that are sent at once
FEWEST_BUCKETS = 4  # of a small network, so that most are sent before the backward pass ends


class GradientExchange:
    """Averages gradients over the processes, in buckets, while the backward pass still runs.

    Buckets are filled from the last weight to the first, as a backward pass reaches them. One is sent when
    its gradients are there, the rest after the pass. All processes send them in the same order, and through
    a group of their own: where graphs differ, they cannot be taken for messages of norm layers.

    A weight without a gradient in every process keeps none: with zeros, weight decay would change it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        joined = dist.is_available() and dist.is_initialized()
        self._buckets = _buckets(trained) if joined and dist.get_world_size() > 1 else []
        self._group = _gradient_group() if self._buckets else None
        self._order = list(range(len(self._buckets)))  # in which buckets are sent
        self._knows_order = False
        self._start()

    def _start(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._complete: list[int] = []  # buckets in the order in which they became ready
        self._sent: list[tuple[int, Tensor, Any]] = []  # bucket, its content, the message under way

    def backward(self, loss: Tensor) -> None:
        """loss.backward(), after which the gradients are the means over the processes."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, number))
            for number, bucket in enumerate(self._buckets)
            for parameter in bucket
        ]
        try:
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Send what has not been sent, wait for all, and write the means into the gradients."""
        for number in self._order[len(self._sent) :]:
            self._send(number)
        for number, flat, message in self._sent:
            message.wait()
            flat /= dist.get_world_size()
            _spread(flat, self._buckets[number])
        if self._buckets and not self._knows_order:
            self._learn_order()
        self._start()

    @torch.no_grad()
    def _arrived(self, number: int, _: Tensor) -> None:
        self._missing[number] -= 1
        if not self._missing[number]:
            self._complete.append(number)
        while len(self._sent) < len(self._order) and not self._missing[self._order[len(self._sent)]]:
            self._send(self._order[len(self._sent)])

    def _send(self, number: int) -> None:
        """The gradients of a bucket, and behind them which of the weights have one."""
        bucket = self._buckets[number]
        used = bucket[0].new_tensor([float(parameter.grad is not None) for parameter in bucket])
        parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in bucket]
        flat = torch.cat([*parts, used])
        self._sent.append((number, flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def _learn_order(self) -> None:
        """The first process's: a bucket with a weight that goes unused must not hold up the others."""
        order = self._complete + [n for n in range(len(self._buckets)) if n not in self._complete]
        said = torch.tensor(order, device=self._buckets[0][0].device)
        dist.broadcast(said, src=0, group=self._group)
        self._order, self._knows_order = said.tolist(), True


def _buckets(trained: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """From the last weight to the first; each of one type. A function of the weights alone: with more than
    two processes the place of a number in its message decides in which order its sum is taken."""
    limit = min(BUCKET, sum(parameter.nbytes for parameter in trained) / FEWEST_BUCKETS)
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in reversed(trained):
        if not buckets or filled >= limit or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += parameter.nbytes
    return buckets


def _spread(flat: Tensor, bucket: list[nn.Parameter]) -> None:
    """The content of a message into the gradients."""
    *parts, used = flat.split([*(parameter.numel() for parameter in bucket), len(bucket)])
    elsewhere = used.tolist() if any(parameter.grad is None for parameter in bucket) else [1.0] * len(bucket)
    for parameter, part, users in zip(bucket, parts, elsewhere, strict=True):
        if not users:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # another process has one
        parameter.grad.copy_(part.view_as(parameter))


_lane: tuple[Any, Any] = (None, None)  # the processes that have joined, and their group for gradients


def _gradient_group() -> Any:
    """Made once by all processes together."""
    global _lane
    if _lane[0] is not dist.group.WORLD:
        _lane = (dist.group.WORLD, dist.new_group(timeout=timedelta(minutes=MINUTES)))
    return _lane[1]
