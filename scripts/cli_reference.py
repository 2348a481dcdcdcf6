"""The command-line reference, made from what `ropaws COMMAND --help-all` prints.

mkdocs calls on_page_markdown (mkdocs.yml names this file as a hook), so the page is always current.

python scripts/cli_reference.py   prints the page
"""

import contextlib
import io
import os
import re
from typing import Any, NamedTuple
from unittest import mock

from ropaws.cli.main import COMMANDS, main
from ropaws.methods import METHODS

PAGE = "reference/cli.md"
MARK = "<!-- commands -->"
WIDTH = "100"  # columns of the help text that is read


class Group(NamedTuple):
    """One box of a help text."""

    title: str
    about: str
    options: list[tuple[str, str]]  # as it is typed, what it means


class Help(NamedTuple):
    """What a command prints with --help-all."""

    usage: str
    text: list[str]  # paragraphs; those that start with "ropaws " are examples
    groups: list[Group]


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The hook of mkdocs."""
    return markdown.replace(MARK, reference()) if page.file.src_uri == PAGE else markdown


def reference() -> str:
    """All commands, then the options of each method, as Markdown."""
    sections = [_command(name, summary) for name, (_, summary) in COMMANDS.items()]
    return "\n\n".join([*sections, _methods()])


def help_of(*arguments: str) -> Help:
    """Run a command with --help-all, and take apart what it prints."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # tyro draws boxes where the encoding has them
    with (
        mock.patch.dict(os.environ, {"COLUMNS": WIDTH, "NO_COLOR": "1"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main([*arguments, "--help-all"])
    printed.seek(0)
    return parse_help(printed.read())


def parse_help(printed: str) -> Help:
    """Usage, paragraphs, and boxes of options."""
    head, _, boxes = printed.partition("╭")
    usage, *text = [part.strip() for part in head.split("\n\n") if part.strip()]
    groups = [
        _group(title, [line[2:-1].rstrip() for line in content.splitlines()])
        for title, content in re.findall(r"─ ([^\n]+?) ─+╮\n(.*?)╰", boxes, re.DOTALL)
    ]
    return Help(" ".join(usage.split()).removeprefix("usage: "), text, groups)


def _group(title: str, lines: list[str]) -> Group:
    rule = next((number for number, line in enumerate(lines) if line.startswith("──")), -1)
    about = " ".join(lines[: max(rule, 0)])
    options: list[tuple[str, str]] = []
    for line in lines[rule + 1 :]:
        if line.startswith(" "):
            name, words = options[-1]
            options[-1] = (name, f"{words} {line.strip()}".strip())
        else:
            name, _, words = line.partition("  ")
            options.append((name.strip(), words.strip()))
    return Group(title, about, [option for option in options if not option[0].startswith("-h")])


def _command(name: str, summary: str) -> str:
    found = help_of(name)
    examples = [part for part in found.text if part.startswith("ropaws ")]
    about = [part for part in found.text if part not in examples]
    parts = [f"## ropaws {name}", *(about or [summary]), f"```text\n{_plain(found.usage)}\n```"]
    if examples:
        lines = [re.sub(r" \((.+)\)$", r"  # \1", " ".join(example.split())) for example in examples]
        parts.append("```sh\n" + "\n".join(lines) + "\n```")
    for group in found.groups:
        section = group.title.removesuffix(" options")
        if section == "method":
            parts.append(
                "### Settings: `--method.*`\n\nSee [Options of each method](#options-of-each-method)."
            )
        elif group.options:
            title = f"### Settings: `--{section}.*`" if section != group.title else ""
            parts += [title, group.about, _definitions(group.options)]
    return "\n\n".join(part for part in parts if part)


def _methods() -> str:
    parts = [
        "## Options of each method",
        "With `ropaws train --method NAME`, the options `--method.*` are those of the method.",
    ]
    for name in METHODS:
        group = next(group for group in help_of("train", "--method", name).groups if "method" in group.title)
        parts += [f"### --method {name}", group.about, _definitions(group.options)]
    return "\n\n".join(parts)


def _definitions(options: list[tuple[str, str]]) -> str:
    """A definition list: it wraps on a narrow screen, where a table would not."""
    return "\n\n".join(f"`{_plain(name)}`\n:   {_escape(words)}" for name, words in options)


def _plain(name: str) -> str:
    """Without {None}: an option that is left out is None anyway."""
    return name.replace("{None}|", "").replace("|{None}", "")


def _escape(words: str) -> str:
    words = re.sub(r" ?\(default: (None)?\)", "", words)
    return re.sub(r"(?<!`)([*_<\[])(?!`)", r"\\\1", words)


if __name__ == "__main__":
    print(reference())
