"""What is printed. Names of classes and files come from others, and a terminal obeys what they contain.

A name can hold codes that hide text, move the cursor or set the title of the window, line breaks that forge
a line, and what rich takes for markup. So everything is printed by `say` or on a Terminal.
"""

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
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


def say_json(value: object) -> None:
    """Print a value as JSON, in plain ASCII."""
    print(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


def cell(text: object) -> Text:
    """For a table of rich: the text as it is, neither markup nor emoji."""
    return Text(printable(str(text)))


class Terminal(Console):
    """A console for texts that are not ours: no markup, no emoji, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """A text is one line, whatever it contains."""
        super().print(*(printable(item) if isinstance(item, str) else item for item in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Also what is inside tables and progress bars; rich breaks lines and moves the cursor by itself."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_in_lines(segment.text))


def _in_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))
