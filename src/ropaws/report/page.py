"""What all pages share: one self-contained file each, light and dark, for screens, phones and paper.

Markup and prose are in templates/. Every value is escaped there, so that a class called <script> shows as
text, and a value that nobody has given is an error.
"""

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ropaws.core.files import write_text

if TYPE_CHECKING:
    from jinja2 import Environment

# Results by method: {"paws": {"accuracy": [one a seed], ...}, ...}, in fractions and seconds.
Results = Mapping[str, Mapping[str, Sequence[float]]]

COLUMNS = {
    "accuracy": "accuracy",
    "confidence_in": "conf. in",
    "confidence_out": "conf. out",
    "auroc": "AUROC",
    "ece": "ECE",
    "seconds": "seconds",
}


def mean_and_deviation(values: Sequence[float], *, scale: float) -> str:
    """'61.2±3.4'; with a single seed only the value, as one value has no deviation."""
    mean = f"{scale * statistics.mean(values):.1f}"
    return mean if len(values) < 2 else f"{mean}±{scale * statistics.stdev(values):.1f}"


def comparison_rows(results: Results, columns: Iterable[str] = tuple(COLUMNS)) -> list[list[str]]:
    """One row per method: its name, then the columns in percent (seconds as they are)."""
    columns = list(columns)
    return [
        [method, *(mean_and_deviation(values[key], scale=1 if key == "seconds" else 100) for key in columns)]
        for method, values in results.items()
    ]


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def plain(value: object) -> str:
    """A setting as words: 'size 28, scale 0.75 1.0'."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(item)}" for name, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


@functools.cache
def _templates() -> "Environment":
    from jinja2 import (
        Environment,
        PackageLoader,
        StrictUndefined,
    )  # loaded by commands that write a page only

    found = Environment(
        loader=PackageLoader("ropaws.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"number": format, "percent": percent, "plain": plain}
    return found


def fill(template: str, **values: Any) -> str:
    """A whole page."""
    return _templates().get_template(template).render(values)


def section(name: str, **values: Any) -> Markup:
    """A macro of templates/sections.html."""
    filled: Markup = getattr(_templates().get_template("sections.html").module, name)(**values)
    return filled


def write_page(path: Path, text: str) -> None:
    """Whole or not at all. File names need not be UTF-8; a page is."""
    write_text(path, text, errors="replace")
