"""Options of a command: a dataclass, parsed by tyro, with errors of one line."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from ropaws.naming import nearest
from ropaws.terminal import printable

Command = TypeVar("Command")


def parse(
    command: type[Command], name: str, arguments: Sequence[str], *, default: Command | None = None
) -> Command:
    """The options of `ropaws NAME` as a dataclass.

    Args:
        command: The dataclass; its fields are the options, its docstring is the help text.
        name: Of the command.
        arguments: What was typed after it.
        default: Values of the options that were not given.

    Raises:
        ValueError: An option is unknown (the message has the nearest one), or a value is wrong.
    """
    options: dict[str, Any] = {}
    if default is not None:  # the help shows it, and it may come from the config of a stranger
        options["default"] = _all_printable(default) if {"-h", "--help"} & set(arguments) else default
    with _errors_of_one_line(arguments):
        parsed: Command = tyro.cli(command, prog=f"ropaws {name}", args=list(arguments), **options)
    return parsed


def parse_known(command: type[Command], name: str, arguments: Sequence[str]) -> tuple[Command, list[str]]:
    """The options that the dataclass knows, and the arguments that are left: of a config, or --help."""
    with _errors_of_one_line(arguments):
        known, left = tyro.cli(
            command, prog=f"ropaws {name}", args=list(arguments), return_unknown_args=True, add_help=False
        )
    return known, left


def _all_printable(value: Any) -> Any:
    """Settings whose texts can be shown on a terminal."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _all_printable(getattr(value, name)) for name in fields})
    if isinstance(value, tuple):
        return tuple(map(_all_printable, value))
    return type(value)(printable(str(value))) if isinstance(value, str | Path) else value


@contextlib.contextmanager
def _errors_of_one_line(arguments: Sequence[str]) -> Any:
    """What tyro says of a bad argument in a box becomes a ValueError with one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise ValueError(_message(said.getvalue(), arguments)) from None


def _message(box: str, arguments: Sequence[str]) -> str:
    # Drawn with lines or with dashes, depending on the encoding of standard output; a title comes first.
    groups: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("│ ")
        if re.fullmatch(r"[╭╰].*|[─-]{9,}", text):
            groups.append([])
        else:
            groups[-1].append(text)
    inside = [text for group in groups[1:] for text in group]
    head = " ".join(groups[1]) if len(groups) > 1 else ""
    unknown = re.match(r"Unrecognized options?: (.+)", head)
    if unknown is None:
        return re.sub(r"^Error parsing [A-Z\w.]+: ", "", head) or box
    first = unknown[1].split(", ")[0].split("=")[0]
    if not first.startswith("-"):
        return f"stray argument {first!r}"
    offered = [match[1] for line in inside if (match := re.match(r"(--[\w.-]+)", line))]
    if not offered:
        return f"unknown option {first}; --help lists all options"
    return f"unknown option {first}, did you mean {nearest(first, offered)}?"
