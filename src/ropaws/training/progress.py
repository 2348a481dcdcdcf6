"""What a person sees while a run goes on, and what is kept in metrics.jsonl."""

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)

from ropaws.batch import Losses
from ropaws.training.checkpoint import write_atomically

T = TypeVar("T")
Step = tuple[int, Losses, float]  # step, losses, learning rate

PLAIN_LINE_SECONDS = 15.0  # how often a log without a terminal gets a line


class MetricsFile:
    """metrics.jsonl: a line of numbers a step. Opened to append, so a resumed run goes on in it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, float]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def drop_metrics_from(path: Path, step: int) -> None:
    """Forget the lines of steps that a resumed run will take again, and a half-written last line."""
    if path.exists():
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) < step]
        text = "".join(f"{line}\n" for line in kept)
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")


def watch_files(console: Console) -> Callable[[Iterable[T], str, int], Iterable[T]]:
    """For data.sources.load_corpus: a bar while files are decoded, a line when done in a log."""

    def watch(items: Iterable[T], title: str, total: int) -> Iterator[T]:
        if not console.is_terminal:
            console.print(f"{title}: {total:,}", highlight=False)
        yield from track(items, title, total=total, console=console, disable=not console.is_terminal)

    return watch


def show_progress(
    steps: Iterable[Step], *, title: str, start: int, total: int, console: Console
) -> Generator[Step, None, None]:
    """Pass (step, losses, rate) through: a bar on a terminal, a plain line now and then in a log."""
    if console.is_terminal:
        yield from _with_bar(steps, title, start, total, console)
    else:
        yield from _with_lines(steps, title, start, total, console)


def _with_bar(
    steps: Iterable[Step], title: str, start: int, total: int, console: Console
) -> Generator[Step, None, None]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  rate {task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, completed=start, loss="-", rate="-")
        for step, losses, rate in steps:
            bar.update(task, completed=step + 1, loss=f"{float(losses.total):.3f}", rate=f"{rate:.3g}")
            yield step, losses, rate


def _with_lines(
    steps: Iterable[Step], title: str, start: int, total: int, console: Console
) -> Generator[Step, None, None]:
    began = last = time.monotonic()
    for step, losses, rate in steps:
        now, done = time.monotonic(), step + 1
        if now - last > PLAIN_LINE_SECONDS or done == total:
            left = (now - began) / (done - start) * (total - done)
            console.print(
                f"{title}  step {done}/{total}  loss {float(losses.total):.3f}"
                f"  rate {rate:.3g}  left {left:.0f} s",
                soft_wrap=True,
                highlight=False,
            )
            last = now
        yield step, losses, rate
