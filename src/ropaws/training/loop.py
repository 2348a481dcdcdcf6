"""One visible loop. It yields; the caller logs, saves, evaluates."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ropaws.batch import Losses, Support, Views
from ropaws.distributed import all_mean, mean_gradients
from ropaws.methods import Method
from ropaws.models import Encoder


class TrainingDivergedError(RuntimeError):
    """The loss or a weight is not a number any more."""

    def __init__(self, what: str, step: int, losses: Losses, rate: float) -> None:
        parts = ", ".join(f"{name} {float(value):.4g}" for name, value in losses.parts.items())
        super().__init__(
            f"{what} at step {step} (learning rate {rate:.4g}; {parts})."
            " Try a lower --optim.peak, a longer --optim.warmup or --train.precision fp32."
            " The last good checkpoint is kept."
        )


class Taken(NamedTuple):
    """A step that was taken."""

    step: int
    losses: Losses  # means over the processes
    rate: float  # learning rate
    data_seconds: float  # of waiting for the batch and augmenting it


def fit(
    model: Encoder,
    method: Method,
    batches: Iterable[tuple[int, Views, Support]],
    optimizer: Optimizer,
    learning_rate: Callable[[int], float],
    scaler: GradScaler | None = None,
) -> Iterator[Taken]:
    """Train, a yield a step, after the step was taken. scaler: of the loss, for fp16."""
    scaler = scaler or GradScaler(enabled=False)
    model.train()
    began = time.perf_counter()
    for step, views, support in batches:
        waited = time.perf_counter() - began
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        losses = method.step(model, views, support)
        shown = _mean_losses(losses)
        if not torch.isfinite(shown.total):
            what = f"the loss became {float(shown.total)}"
            raise TrainingDivergedError(what, step, shown, learning_rate(step))
        scaler.scale(losses.total).backward()
        mean_gradients(model.parameters())
        scaler.step(optimizer)  # leaves a step out whose gradients overflowed in fp16
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        yield Taken(step, shown, learning_rate(step), waited)
        began = time.perf_counter()


def _mean_losses(losses: Losses) -> Losses:
    """The same in all processes, in one message: so all of them see a loss that is not a number."""
    values = torch.stack([losses.total.detach(), *(v.to(losses.total) for v in losses.parts.values())])
    total, *parts = all_mean(values)
    return Losses(total, dict(zip(losses.parts, parts, strict=True)))


def weights_are_finite(model: Encoder) -> bool:
    """A finite loss may have had a gradient that was not; such weights must not become a checkpoint."""
    return all(bool(value.isfinite().all()) for value in model.parameters())
