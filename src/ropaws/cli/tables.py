"""Tables on a terminal."""

from collections.abc import Sequence

from rich.table import Table

from ropaws.report.run_files import figure
from ropaws.terminal import Terminal, cell

SPARE = ("FPR95", "seconds", "conf. in", "seeds", "ECE")  # columns that a narrow terminal can do without
WIDE = 160  # characters of a table that is written to a file


def percent(value: object) -> str:
    """A fraction as text; "-" where there is none."""
    return "-" if (found := figure(value)) is None else f"{100 * found:.1f} %"


def wide_console() -> Terminal:
    """As wide as the terminal, or for a file as wide as a table may need."""
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
    """On a narrow terminal the least important columns are left out, rather than figures cut off."""
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
