"""One visible loop. It yields; the caller logs, saves, evaluates."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ropaws.batch import Batch, Losses
from ropaws.data.loaders import PoolPass
from ropaws.distributed import all_mean
from ropaws.methods import Method
from ropaws.processes.gradient_exchange import GradientExchange


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


def no_pass(_step: int) -> PoolPass | None:
    return None


def fit(
    model: nn.Module,
    method: Method,
    batches: Iterable[Batch],
    optimizer: Optimizer,
    learning_rate: Callable[[int], float],
    scaler: GradScaler | None = None,
    pool_pass: Callable[[int], PoolPass | None] = no_pass,
    in_class: Tensor | None = None,
) -> Iterator[Taken]:
    """Train; yields after each step that was taken.

    Args:
        model: What the method has built, on its device.
        method: Turns a batch into a loss.
        batches: One batch per step.
        optimizer: Of the model's weights; its learning rate is set here.
        learning_rate: As a function of the step.
        scaler: Of the loss, for fp16.
        pool_pass: The pass over the pool that comes before a step, or None.
        in_class: Which training images belong to a known class (n,), where that is known: it is logged how
            pure a selection is, and no method sees it.
    """
    scaler = scaler or GradScaler(enabled=False)
    exchange = GradientExchange(model.parameters())
    model.train()
    began = time.perf_counter()
    for batch in batches:
        step = batch.step
        waited = time.perf_counter() - began
        if (whole_pool := pool_pass(step)) is not None:
            model.eval()
            with torch.no_grad():
                method.before_epoch(model, whole_pool)
            model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        losses = _with_selection(method.step(model, batch), batch, in_class)
        shown = _mean_losses(losses)
        if not torch.isfinite(shown.total):
            what = f"the loss became {float(shown.total)}"
            raise TrainingDivergedError(what, step, shown, learning_rate(step))
        exchange.backward(scaler.scale(losses.total))
        scaler.step(optimizer)  # leaves a step out whose gradients overflowed in fp16
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            method.after_step(model, batch)
        yield Taken(step, shown, learning_rate(step), waited)
        began = time.perf_counter()


def finish(model: nn.Module, method: Method, pool: PoolPass) -> nn.Module:
    """What a method does after the last step. Returns the model, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        method.after_training(model, pool)
    return model


def _mean_losses(losses: Losses) -> Losses:
    """The same in all processes, in one message: so all of them see a loss that is not a number."""
    values = torch.stack([losses.total.detach(), *(v.to(losses.total) for v in losses.parts.values())])
    total, *parts = all_mean(values)
    return Losses(total, dict(zip(losses.parts, parts, strict=True)))


def _with_selection(losses: Losses, batch: Batch, in_class: Tensor | None) -> Losses:
    """How much of the unlabeled batch is learned from, and how much of that belongs to a known class."""
    if losses.selected is None or len(losses.selected) == 0:
        return losses
    weights = losses.selected.detach().float()
    parts = {**losses.parts, "selected": weights.mean()}
    if in_class is not None:
        parts["selected_in_class"] = (weights * in_class.to(weights)[batch.pool_index]).mean()
    return Losses(losses.total, parts)
