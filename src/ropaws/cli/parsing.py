"""Options of a command: a dataclass, parsed by tyro, with errors of one line."""

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import tyro
from rich.table import Table

from ropaws.core.labels import nearest
from ropaws.core.run_layout import CONFIG
from ropaws.core.terminal import Terminal, cell, printable
from ropaws.methods import import_method, method_name
from ropaws.report.run_files import figure
from ropaws.run.run import Run


def run_of(path: Path, method: str | None, **options: Any) -> Run:
    """The run, after importing its method where the person has repeated its name with --method."""
    if method is not None:
        import_method(method)
    run = Run(path, **options)
    if method is not None and method != method_name(run.method):
        raise ValueError(f"--method {method}: {path} was trained with {method_name(run.method)}")
    return run


def refuse_images(path: Path) -> None:
    """Raise an error for a folder of images in the place of a run."""
    if path.is_dir() and not (path / CONFIG).exists():
        raise ValueError(f"{path} is not a run folder; name a folder of images with --unlabeled {path}")


SPARE = ("FPR95", "seconds", "conf. in", "seeds", "ECE")  # columns that a narrow terminal can do without
WIDE = 160  # characters of a table that is written to a file


def percent(value: object) -> str:
    """A fraction as text; "-" where there is none."""
    return "-" if (found := figure(value)) is None else f"{100 * found:.1f} %"


def wide_console() -> Terminal:
    """A console as wide as the terminal, or for a file as wide as a table may need."""
    return Terminal() if Terminal().is_terminal else Terminal(width=WIDE)


def text_table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, wrap: bool = False
) -> Table:
    table = Table(title=cell(title))
    for number, name in enumerate(head):
        # Figures are never cut off; names may take several lines.
        table.add_column(
            cell(name), justify="left" if number == 0 else "right", no_wrap=number > 0 and not wrap
        )
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def print_fitting(title: str, head: list[str], rows: list[list[str]]) -> None:
    """Print a table; a narrow terminal loses the least important columns, and no figure is cut off."""
    console = wide_console()
    table = text_table(title, head, rows)
    for name in SPARE:
        if table.__rich_measure__(console, console.options).minimum <= console.width:
            break
        if name in head:
            place = head.index(name)
            head, rows = _without(head, place), [_without(row, place) for row in rows]
            table = text_table(f"{title}; {name} and more in the page (--out)", head, rows)
    console.print(table)


def _without(row: list[str], place: int) -> list[str]:
    return row[:place] + row[place + 1 :]


Command = TypeVar("Command")
HELP_ALL = "--help-all"
WIDEST = 100  # characters of a line of help
LONGEST = 32  # characters of an option that has its words beside it
METAVARS = {Path: "PATH", str: "TEXT", int: "N", float: "X"}


def wants_help(arguments: Sequence[str]) -> bool:
    return "-h" in arguments or "--help" in arguments


def show_help(
    command: type[Any],
    name: str,
    *,
    about: str | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> NoReturn:
    """Print what a person needs of `ropaws NAME`: example commands, and a sentence about each option.

    Args:
        command: The dataclass of the options.
        name: Of the command.
        about: Examples, then paragraphs; by default the docstring of the dataclass.
        groups: The options by heading; those that are in none are left to --help-all.
    """
    examples, sentence = _introduction(about or command.__doc__ or "")
    width = min(WIDEST, shutil.get_terminal_size().columns)
    fields = {field.name: field for field in dataclasses.fields(command)}
    order = [name for name in _described_fields(command) if name in fields]
    rows = {name: _option(command, fields[name]) for name in order}
    indent = 4 + max(len(shown) for shown, _ in rows.values() if len(shown) <= LONGEST)
    positional = [shown for shown, _ in rows.values() if not shown.startswith("--")]
    lines = [" ".join(["usage: ropaws", name, *positional, "[options]"]), ""]
    lines += [*(f"  {example}" for example in examples), ""] if examples else []
    lines += textwrap.wrap(sentence, width)
    for heading, names in (groups or {"options": list(rows)}).items():
        lines += ["", heading]
        for shown, words in (rows[name] for name in names):
            first = f"  {shown}".ljust(indent)
            if len(shown) > LONGEST:  # its words start below it
                lines.append(f"  {shown}")
                first = " " * indent
            lines += textwrap.wrap(words, width, initial_indent=first, subsequent_indent=" " * indent)
    every = "every setting, such as --train.steps" if groups else "more about each option"
    print("\n".join([*lines, "", f"`ropaws {name} {HELP_ALL}` shows {every}."]))
    sys.exit(0)


def _introduction(about: str) -> tuple[list[str], str]:
    """The example commands of a docstring, and its first paragraph."""
    text = inspect.cleandoc(about)
    examples = [line.split("  ")[0] for line in text.splitlines() if line.startswith("ropaws ")]
    return examples, " ".join(text.partition("\n\n")[0].split())


def _option(command: type[Any], field: "dataclasses.Field[Any]") -> tuple[str, str]:
    """An option as it is typed, and the first sentence about it."""
    kind, flag = get_type_hints(command)[field.name], field.name.replace("_", "-")
    is_positional = tyro.conf.Positional in get_args(get_type_hints(command, include_extras=True)[field.name])
    is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    if is_positional:
        several = " ..." if get_origin(kind) is tuple else ""
        shown = f"{field.name.upper()}{several}" if is_required else f"[{field.name.upper()}{several}]"
    elif kind is bool:
        shown = f"--[no-]{flag}" if field.default is True else f"--{flag}"
    else:
        shown = f"--{flag} {_metavar(kind)}"
    words = " ".join(_described_fields(command)[field.name].split())
    sentence = re.split(r"(?<=[.?!]) (?=[A-Z])", words, maxsplit=1)[0]
    if is_required:
        sentence += " (required)"
    elif kind in METAVARS:
        sentence += f" (default {field.default})"
    return shown, sentence


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    kinds = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) is tuple:
        return f"{_metavar(kinds[0])} ..."
    return METAVARS[kind] if kind in METAVARS else _metavar(kinds[0])


def _described_fields(command: type[Any]) -> dict[str, str]:
    """The docstring below each field, which Python itself does not keep."""
    found: dict[str, str] = {}
    for part in filter(dataclasses.is_dataclass, command.__mro__):  # a command's own fields come first
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in itertools.pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                found.setdefault(ast.unparse(field.target), ast.literal_eval(below.value))
    return found


def parse(
    command: type[Command], name: str, arguments: Sequence[str], *, default: Command | None = None
) -> Command:
    """The options of `ropaws NAME` as a dataclass; --help and --help-all are printed instead.

    Args:
        command: The dataclass; its fields are the options, its docstring is the help text.
        name: Of the command.
        arguments: What was typed after it.
        default: Values of the options that were not given.

    Raises:
        ValueError: An option is unknown (the message has the nearest one), or a value is wrong.
    """
    if wants_help(arguments):
        show_help(command, name)
    options: dict[str, Any] = {}
    if default is not None:  # the help shows it, and it may come from the config of a stranger
        options["default"] = _all_printable(default) if HELP_ALL in arguments else default
    given = ["--help" if argument == HELP_ALL else argument for argument in arguments]
    with _errors_of_one_line(arguments):
        parsed: Command = tyro.cli(command, prog=f"ropaws {name}", args=given, **options)
    return parsed


def parse_known(command: type[Command], name: str, arguments: Sequence[str]) -> tuple[Command, list[str]]:
    """The options that the dataclass knows, and the arguments that are left: of a config, or --help-all."""
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
        return f"unknown option {first}; {HELP_ALL} lists all options"
    return f"unknown option {first}, did you mean {nearest(first, offered)}?"
