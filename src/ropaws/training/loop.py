"""One visible loop. It yields; the caller logs, saves, evaluates."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.optim import Optimizer

from ropaws.batch import Losses, Support, Views
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


def fit(
    model: Encoder,
    method: Method,
    batches: Iterable[tuple[int, Views, Support]],
    optimizer: Optimizer,
    learning_rate: Callable[[int], float],
) -> Iterator[tuple[int, Losses]]:
    """Train, a yield a step, after the step was taken."""
    model.train()
    for step, views, support in batches:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        losses = method.step(model, views, support)
        if not torch.isfinite(losses.total):
            what = f"the loss became {float(losses.total.detach())}"
            raise TrainingDivergedError(what, step, losses, learning_rate(step))
        losses.total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield step, losses._replace(total=losses.total.detach())


def weights_are_finite(model: Encoder) -> bool:
    """A finite loss may have had a gradient that was not; such weights must not become a checkpoint."""
    return all(bool(value.isfinite().all()) for value in model.parameters())
