"""What reaches a terminal: texts of others as they are, codes of our own."""

import io
import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.progress import track
from rich.table import Table

from ropaws.core.terminal import Terminal, cell, printable, say, say_json

ODD = "\x1b[2J\x07\n\r\x9b\x7f\u202e\u2028\udcff"


def test_a_usual_name_stays():
    for name in (
        "cat",
        "caf\u00e9",
        "\u732b",
        "\U0001f408",
        "a\\b [x] :cat:",
        "\u0645\u0631\u062d\u0628\u0627",
    ):
        assert printable(name) == name
    assert printable(ODD) == r"\x1b[2J\x07\n\r\x9b\x7f\u202e\u2028\udcff"


@settings(deadline=None)
@given(st.text(st.characters()) | st.text(alphabet="\x1b\n\x85\u2067\ud800a"))
def test_no_control_character_is_left(text):
    found = printable(text)
    assert not {unicodedata.category(char) for char in found} & {"Cc", "Cs", "Zl", "Zp"}
    assert not any(unicodedata.bidirectional(c) in {"LRE", "RLE", "LRO", "RLO", "PDF"} for c in found)
    found.encode()


def test_lines_and_json(capsys):
    say(f"class {ODD}")
    say(ODD, error=True)
    say_json({ODD: [1, "\u00e9"]})
    out, err = capsys.readouterr()
    assert err == f"{printable(ODD)}\n"
    first, rest = out.split("\n", 1)
    assert first == f"class {printable(ODD)}"
    assert json.loads(rest) == {ODD: [1, "\u00e9"]}
    assert rest.isascii()
    assert not {"\x1b", "\x7f"} & set(rest)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_console_obeys_rich_and_no_name(is_terminal):
    stream = io.StringIO()
    colors = "standard" if is_terminal else None
    console = Terminal(file=stream, width=200, force_terminal=is_terminal, color_system=colors)
    console.print(f"one {ODD} [bold]x[/bold] [/] :bomb:")
    table = Table(title=f"two {ODD}")
    table.add_column(cell(f"three {ODD}"), style="red")
    table.add_row(cell(f"four {ODD} [bold]x[/bold]"))
    table.add_row(f"five {ODD} [/]")
    console.print(table)
    for _ in track([1], f"six {ODD}", console=console):
        pass
    text = stream.getvalue()
    for number in ("one", "three", "four"):
        assert f"{number} {printable(ODD)}" in text
    assert "[bold]x[/bold] [/] :bomb:" in text
    assert "\x1b[2J" not in text
    assert not {"\x07", "\x9b", "\x7f", "\u202e", "\u2028"} & set(text)
    assert ("\x1b[" in text) == is_terminal
