"""The frame of every page: one self-contained file, light and dark, for screens, phones and paper."""

import html
import importlib.resources
from collections.abc import Iterable, Sequence
from pathlib import Path

from ropaws.runs.atomic import write_text


def esc(text: object) -> str:
    """Text of any origin as HTML: a class called <script> shows as text."""
    return html.escape(str(text))


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _file(name: str) -> str:
    return (importlib.resources.files("ropaws.report") / name).read_text(encoding="utf-8")


def page(title: str, body: str, *, script: bool = False) -> str:
    """script: the page has a map with images to hover over."""
    code = f"<script>{_file('map.js')}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'  # else a browser asks the network for one
        f"<title>{esc(title)}</title><style>{_file('style.css')}</style></head>\n"
        f"<body>\n{body}\n{code}</body></html>\n"
    )


def write_page(path: Path, text: str) -> None:
    """Whole or not at all. File names need not be UTF-8; a page is."""
    write_text(path, text, errors="replace")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, own: int | None = None) -> str:
    """A table of text; the row numbered own is the run's own."""
    cells = "".join(f"<th>{esc(name)}</th>" for name in head)
    body = "".join(
        f"<tr{' class=own' if number == own else ''}>{''.join(f'<td>{esc(cell)}</td>' for cell in row)}</tr>"
        for number, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and values, one below the other."""
    return (
        "<dl>"
        + "".join(f"<dt>{esc(name)}</dt><dd>{esc(plain(value))}</dd>" for name, value in pairs)
        + "</dl>"
    )


def plain(value: object) -> str:
    """A setting as words: 'size 28, scale 0.75 1.0'."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(item)}" for name, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
