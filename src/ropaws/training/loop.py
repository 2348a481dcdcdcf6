"""One visible loop. It yields; the caller logs, saves, evaluates. Progress is shown as it passes through.

The numbers of each step go to metrics.jsonl, optionally to TensorBoard and W&B.
"""

import importlib
import json
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ropaws.core.distributed import all_mean, data_parallel
from ropaws.core.files import JSON_FILE, check_regular, read_regular, write_text
from ropaws.core.records import Batch, Losses
from ropaws.core.terminal import PLAIN_LINE_SECONDS, TimeLeft
from ropaws.methods import Method
from ropaws.training.loaders import PoolPass


class TrainingDivergedError(RuntimeError):
    """The loss or a weight is not a number any more."""

    def __init__(self, what: str, step: int, losses: Losses, rate: float) -> None:
        parts = ", ".join(f"{name} {float(value):.4g}" for name, value in losses.parts.items())
        super().__init__(
            f"{what} at step {step} (learning rate {rate:.4g}; {parts})."
            " Try a lower --optim.peak, a longer --optim.warmup or --train.precision fp32."
            " The last good checkpoint is kept."
        )


class StepResult(NamedTuple):
    """A step that was taken."""

    step: int
    losses: Losses  # means over the processes
    rate: float  # learning rate
    data_seconds: float  # of waiting for the batch and augmenting it


class Step(nn.Module):
    """What DistributedDataParallel wraps: the method's whole step is the forward pass."""

    def __init__(self, method: Method, model: nn.Module) -> None:
        super().__init__()
        self.method, self.model = method, model

    def forward(self, batch: Batch) -> Losses:
        losses = self.method.step(self.model, batch)
        # DDP awaits the gradient of every weight that it can reach from here, by the total or by a part.
        return losses._replace(parts={name: value.detach() for name, value in losses.parts.items()})


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
) -> Iterator[StepResult]:
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
    take = data_parallel(Step(method, model))
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
        losses = _with_selection(take(batch), batch, in_class)
        shown = _mean_losses(losses)
        if not torch.isfinite(shown.total):
            what = f"the loss became {float(shown.total)}"
            raise TrainingDivergedError(what, step, shown, learning_rate(step))
        scaler.scale(losses.total).backward()
        scaler.step(optimizer)  # leaves a step out whose gradients overflowed in fp16
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            method.after_step(model, batch)
        yield StepResult(step, shown, learning_rate(step), waited)
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


class StopRequest:
    """Set by the first signal; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


@contextmanager
def stop_between_steps() -> Iterator[StopRequest]:
    """Let SIGINT and SIGTERM only leave a note while inside. Outside the main thread: no change."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def show_progress(
    steps: Iterable[StepResult], *, title: str, start: int, total: int, batch: int, console: Console
) -> Generator[StepResult, None, None]:
    """Pass steps through: a bar on a terminal, a plain line now and then in a log, nothing if quiet."""
    if console.quiet:
        yield from steps
        return
    if console.is_terminal:
        yield from _with_bar(steps, title, start, total, batch, console)
    else:
        yield from _with_lines(steps, title, start, total, batch, console)


def training_bars(console: Console) -> Progress:
    """Bars whose tasks have the fields loss, rate and speed."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  rate {task.fields[rate]}  {task.fields[speed]} images/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


def _with_bar(
    steps: Iterable[StepResult], title: str, start: int, total: int, batch: int, console: Console
) -> Generator[StepResult, None, None]:
    with training_bars(console) as bar:
        task = bar.add_task(title, total=total, completed=start, loss="-", rate="-", speed="-")
        last = time.monotonic()
        for taken in steps:
            speed = batch / max(1e-9, time.monotonic() - last)
            loss, rate = f"{float(taken.losses.total):.3f}", f"{taken.rate:.3g}"
            bar.update(task, completed=taken.step + 1, loss=loss, rate=rate, speed=f"{speed:,.0f}")
            yield taken
            last = time.monotonic()


def _with_lines(
    steps: Iterable[StepResult], title: str, start: int, total: int, batch: int, console: Console
) -> Generator[StepResult, None, None]:
    began = last = time.monotonic()
    waited, time_left = 0.0, TimeLeft(total)
    for taken in steps:
        now, done = time.monotonic(), taken.step + 1
        waited += taken.data_seconds
        left = time_left.after(done)
        if now - last > PLAIN_LINE_SECONDS or done == total:
            console.print(
                f"{title}  step {done}/{total}  loss {float(taken.losses.total):.3f}"
                f"  rate {taken.rate:.3g}  {batch * (done - start) / (now - began):,.0f} images/s"
                f"  data {waited / (now - began):.0%}{left}",
                soft_wrap=True,
                highlight=False,
            )
            last = now
        yield taken


TrackerName = Literal["tensorboard", "wandb"]


class Tracker(Protocol):
    def write(self, row: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl: one line of numbers per step. Opened to append, for runs that are resumed."""

    def __init__(self, path: Path) -> None:
        if path.exists() or path.is_symlink():
            check_regular(path, JSON_FILE, inside=path.parent)  # a pipe would let the training wait
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, float]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files in RUN/tensorboard; steps that are taken again after a resume replace the old ones."""

    def __init__(self, run: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=start)

    def write(self, row: dict[str, float]) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(row["step"]))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run in RUN/wandb; with WANDB_MODE=offline nothing leaves the machine."""

    def __init__(self, run: Path, config: dict[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project="ropaws", name=run.name, dir=str(run), config=config, resume="allow", id=run.name
        )

    def write(self, row: dict[str, float]) -> None:
        self._run.log({k: v for k, v in row.items() if k != "step"}, step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All of them as one. Only the first process of a run has any."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def write(self, row: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.write(row)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def check_trackers(names: tuple[TrackerName, ...]) -> None:
    """Check that the packages are installed, before a run starts."""
    for name in names:
        module = "torch.utils.tensorboard" if name == "tensorboard" else name
        try:
            importlib.import_module(module)
        except ImportError:
            raise ValueError(f"train.log: {name} needs pip install 'ropaws[{name}]'") from None


def open_trackers(
    run: Path, metrics: str, names: tuple[TrackerName, ...], *, start: int, config: dict[str, Any]
) -> Trackers:
    check_trackers(names)
    trackers: list[Tracker] = [MetricsFile(run / metrics)]
    if "tensorboard" in names:
        trackers.append(TensorBoard(run, start))
    if "wandb" in names:
        trackers.append(WeightsAndBiases(run, config))
    return Trackers(trackers)


def drop_metrics_from(path: Path, step: int) -> None:
    """Forget the lines of steps that a resumed run will take again, and a half-written last line."""
    if path.exists():
        content = read_regular(path, JSON_FILE, inside=path.parent)
        lines = content.decode("utf-8", errors="replace").splitlines()
        kept = [line for line in lines if _step_of(line) < step]
        text = "".join(f"{line}\n" for line in kept)
        write_text(path, text)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return float("inf")
