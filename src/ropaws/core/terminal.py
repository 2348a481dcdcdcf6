"""What is printed. Names of classes and files come from others, and a terminal obeys what they contain.

A name can hold codes that hide text, move the cursor or set the title of the window, line breaks that forge
a line, and what rich takes for markup. So everything is printed by `say` or on a Terminal.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import track
from rich.segment import Segment
from rich.text import Text

# Control characters, breaks of lines, codes for the direction of text, and halves of characters.
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""One line in which such characters are shown and not obeyed: the escape character as \x1b."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def say(line: str, *, error: bool = False, flush: bool = False) -> None:
    """Print a line to standard output, or to standard error."""
    print(printable(line), file=sys.stderr if error else sys.stdout, flush=flush)


def tell(console: Console, line: str) -> None:
    """Print a line on a console as it is: no markup, no colors, no line breaks of rich's own."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def say_json(value: object) -> None:
    """Print a value as JSON, in plain ASCII."""
    print(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


def cell(text: object) -> Text:
    """The text as it is for a table of rich, neither markup nor emoji."""
    return Text(printable(str(text)))


class Terminal(Console):
    """A console for texts that are not ours: no markup, no emoji, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """A text is one line, whatever it contains."""
        super().print(*(printable(item) if isinstance(item, str) else item for item in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Make what tables and bars contain printable too; rich breaks lines and moves the cursor itself."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_in_lines(segment.text))


def _in_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


T = TypeVar("T")

PLAIN_LINE_SECONDS = 15.0  # how often a log without a terminal gets a line
LEAST_SECONDS = 5.0  # at work, until the time left is said


class TimeLeft:
    """Estimate the time left for a log, by the speed since the first item: what came before was the start.

    Args:
        total: Items that there are.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.first: tuple[float, int] | None = None

    def after(self, done: int) -> str:
        """', left 12 min'; nothing while the speed is not known yet."""
        now = time.monotonic()
        began, before = self.first = self.first or (now, done)
        if now - began < LEAST_SECONDS or done == before:
            return ""
        return f", left {duration((now - began) / (done - before) * (self.total - done))}"


def shown_path(path: str) -> str:
    """As short as a person types it: from the working directory, where it is below it."""
    here = str(Path.cwd())
    return path[len(here) + 1 :] if path.startswith(here + os.sep) else path


def counted(number: int, thing: str) -> str:
    """1 image, 2,000 images."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def duration(seconds: float) -> str:
    """Say a number of seconds as a person does: 90 s, 25 min, 9.0 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def watch_files(console: Console) -> Callable[[Iterable[T], str, int], Iterable[T]]:
    """Show what takes long: a bar with the time left, or a line now and then in a log."""

    def watch(items: Iterable[T], title: str, total: int) -> Iterator[T]:
        if total == 0:
            yield from items
            return
        if console.is_terminal:
            yield from track(items, title, total=total, console=console)
            return
        console.print(f"{title}: {total:,}", highlight=False, soft_wrap=True)
        last, time_left = time.monotonic(), TimeLeft(total)
        for done, item in enumerate(items, start=1):
            left = time_left.after(done)
            if time.monotonic() - last > PLAIN_LINE_SECONDS:
                console.print(f"{title}: {done:,} of {total:,}{left}", highlight=False, soft_wrap=True)
                last = time.monotonic()
            yield item

    return watch
