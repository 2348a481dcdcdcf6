"""The gradients of a step, averaged over the processes while the backward pass still runs."""

import functools
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ropaws.processes.local_exchange import SIGN, LocalExchange, connect
from ropaws.processes.shared_rooms import Rooms

MINUTES = 30  # that a process waits for the others before it gives up
BUCKET = 1 << 24  # bytes of gradients that are sent at once
FEWEST_BUCKETS = 4  # of a small network, so that most are sent before the backward pass ends


class GradientExchange:
    """Averages gradients over the processes, in buckets, while the backward pass still runs.

    Buckets are filled from the last weight to the first, as a backward pass reaches them. One is sent when
    its gradients are there, the rest after the pass. All processes send them in the same order, and on a way
    of their own: where graphs differ, they cannot be taken for messages of norm layers.

    A weight without a gradient in every process keeps none: with zeros, weight decay would change it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        joined = dist.is_available() and dist.is_initialized()
        self._buckets = _buckets(trained) if joined and dist.get_world_size() > 1 else []
        self._lane = _lane_for(self._buckets) if self._buckets else None
        self._order = list(range(len(self._buckets)))  # in which buckets are sent
        self._knows_order = False
        self._start()

    def _start(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._complete: list[int] = []  # buckets in the order in which they became ready
        self._sent = 0  # how many of the order

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
        if self._lane is None:
            return
        while self._sent < len(self._order):
            self._send_next()
        for number in self._order:
            _spread(self._lane.total(number) / dist.get_world_size(), self._buckets[number])
        self._lane.done()
        if not self._knows_order:
            self._learn_order()
        self._start()

    @torch.no_grad()
    def _arrived(self, number: int, _: Tensor) -> None:
        self._missing[number] -= 1
        if not self._missing[number]:
            self._complete.append(number)
        while self._sent < len(self._order) and not self._missing[self._order[self._sent]]:
            self._send_next()

    def _send_next(self) -> None:
        """The gradients of a bucket, and behind them which of the weights have one."""
        assert self._lane is not None
        number = self._order[self._sent]
        bucket = self._buckets[number]
        used = bucket[0].new_tensor([float(parameter.grad is not None) for parameter in bucket])
        parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in bucket]
        self._lane.send(number, [*parts, used])
        self._sent += 1

    def _learn_order(self) -> None:
        """The first process's: a bucket with a weight that goes unused must not hold up the others."""
        order = self._complete + [n for n in range(len(self._buckets)) if n not in self._complete]
        said = torch.tensor(order, device=self._buckets[0][0].device)
        dist.broadcast(said, src=0, group=_gradient_group())
        self._order, self._knows_order = said.tolist(), True


class Lane(Protocol):
    """How buckets travel. All processes send the same ones in the same order."""

    def send(self, number: int, parts: list[Tensor]) -> None: ...

    def total(self, number: int) -> Tensor:
        """The sum over the processes."""
        ...

    def done(self) -> None:
        """All sums were asked for; buckets may be sent again."""
        ...


class BackendLane:
    """Through the backend of torch.distributed: any device, any number of machines."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._under_way: dict[int, tuple[Tensor, Any]] = {}

    def send(self, number: int, parts: list[Tensor]) -> None:
        flat = torch.cat(parts)
        self._under_way[number] = flat, dist.all_reduce(flat, group=self._group, async_op=True)

    def total(self, number: int) -> Tensor:
        flat, message = self._under_way.pop(number)
        message.wait()
        return flat

    def done(self) -> None:
        pass


class MemoryLane:
    """Through memory that the processes of one machine share: no thread has to move anything."""

    def __init__(self, exchange: LocalExchange, rooms: Rooms, buckets: list[list[nn.Parameter]]) -> None:
        self._exchange = exchange
        self._places: list[list[Tensor]] = []  # of each bucket, in the room of each process
        start = 0
        for bucket in buckets:
            count, kind = _length(bucket), bucket[0].dtype
            views = [torch.frombuffer(room, dtype=kind, count=count, offset=start) for room in rooms.of]
            self._places.append(views)
            start += _aligned(count * kind.itemsize)

    def send(self, number: int, parts: list[Tensor]) -> None:
        torch.cat(parts, out=self._places[number][self._exchange.rank])
        self._exchange.send(SIGN)

    def total(self, number: int) -> Tensor:
        self._wait()
        first, second, *others = self._places[number]
        return sum(others, start=first + second)  # in the order of the processes: the same bits in all

    def done(self) -> None:
        """All have read, so that all may write again."""
        self._exchange.send(SIGN)
        self._wait()

    def _wait(self) -> None:
        for other in self._exchange.peers:
            self._exchange.receive(other)


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


def _length(bucket: list[nn.Parameter]) -> int:
    """Of a message: all weights, and whether each is used."""
    return sum(parameter.numel() for parameter in bucket) + len(bucket)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


_group: tuple[Any, Any] = (None, None)  # the processes that have joined, and their group for gradients
_exchange: LocalExchange | None = None  # of the same processes, where all are on this machine


def _gradient_group() -> Any:
    """Made once by all processes together."""
    global _group, _exchange
    if _group[0] is not dist.group.WORLD:
        if _exchange is not None:
            _exchange.close()
        _group = (dist.group.WORLD, dist.new_group(timeout=timedelta(minutes=MINUTES)))
        rank, size = dist.get_rank(), dist.get_world_size()
        _exchange = connect(rank, size, _tell_all, seconds=60 * MINUTES)
    return _group[1]


def _tell_all(said: object) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, said, group=_group[1])
    return answers


def _lane_for(buckets: list[list[nn.Parameter]]) -> Lane:
    """Through memory where all processes can, else through the backend."""
    group = _gradient_group()
    if _exchange is not None and all(p.device.type == "cpu" for bucket in buckets for p in bucket):
        nbytes = sum(_aligned(_length(bucket) * bucket[0].dtype.itemsize) for bucket in buckets)
        if (rooms := _exchange.open_rooms(nbytes)) is not None:
            return MemoryLane(_exchange, rooms, buckets)
    return BackendLane(group)
