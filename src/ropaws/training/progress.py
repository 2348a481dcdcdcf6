"""Progress bars, and plain lines where there is no terminal."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator
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

from ropaws.training.loop import Taken

T = TypeVar("T")

PLAIN_LINE_SECONDS = 15.0  # how often a log without a terminal gets a line


def watch_files(console: Console) -> Callable[[Iterable[T], str, int], Iterable[T]]:
    """For what takes long: a bar with the time left, or a line now and then in a log."""

    def watch(items: Iterable[T], title: str, total: int) -> Iterator[T]:
        if console.is_terminal:
            yield from track(items, title, total=total, console=console)
            return
        console.print(f"{title}: {total:,}", highlight=False)
        began = last = time.monotonic()
        for done, item in enumerate(items):
            now = time.monotonic()
            if now - last > PLAIN_LINE_SECONDS and done:
                left = (now - began) / done * (total - done)
                console.print(f"{title}: {done:,} of {total:,}, left {left:.0f} s", highlight=False)
                last = now
            yield item

    return watch


def show_progress(
    steps: Iterable[Taken], *, title: str, start: int, total: int, batch: int, console: Console
) -> Generator[Taken, None, None]:
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
    steps: Iterable[Taken], title: str, start: int, total: int, batch: int, console: Console
) -> Generator[Taken, None, None]:
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
    steps: Iterable[Taken], title: str, start: int, total: int, batch: int, console: Console
) -> Generator[Taken, None, None]:
    began = last = time.monotonic()
    waited = 0.0
    for taken in steps:
        now, done = time.monotonic(), taken.step + 1
        waited += taken.data_seconds
        if now - last > PLAIN_LINE_SECONDS or done == total:
            left = (now - began) / (done - start) * (total - done)
            console.print(
                f"{title}  step {done}/{total}  loss {float(taken.losses.total):.3f}"
                f"  rate {taken.rate:.3g}  {batch * (done - start) / (now - began):,.0f} images/s"
                f"  data {waited / (now - began):.0%}  left {left:.0f} s",
                soft_wrap=True,
                highlight=False,
            )
            last = now
        yield taken
