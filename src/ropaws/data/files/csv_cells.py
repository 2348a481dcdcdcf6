"""Texts in tables of comma-separated values, such that a spreadsheet takes none of them for a formula.

A class or a file can be named `=HYPERLINK(...)`. A spreadsheet shows a cell that begins with an apostrophe as
text, so one is put before such names, and taken away when we read the table.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

# What a spreadsheet takes for the beginning of a formula, or skips before one; full-width forms too.
_BEGINS = r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]"
_FORMULA = re.compile(f"'*{_BEGINS}")
_MARKED = re.compile(f"'+{_BEGINS}")


def as_cell(value: Any) -> Any:
    """A text as it is written; numbers stay as they are."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def from_cell(text: str) -> str:
    """The text that as_cell was given."""
    return text[1:] if _MARKED.match(text) else text


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows one by one; the columns are those of the first. Returns their number."""
    count = 0
    # Names that are not UTF-8 are written as they are on disk.
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        for row in rows:
            if count == 0:
                writer.writerow([as_cell(name) for name in row])
            writer.writerow([as_cell(value) for value in row.values()])
            count += 1
    return count


def read_csv(path: Path) -> Iterator[dict[str, str | None]]:
    """Rows of a table with a head. A row that is too short has None, what is too long is left out.

    Raises:
        ValueError: The file is not such a table.
    """
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        try:
            for row in csv.DictReader(file):
                yield {
                    from_cell(name): None if value is None else from_cell(value)
                    for name, value in row.items()
                    if name is not None
                }
        except csv.Error as error:  # such as a field of more than 131,072 characters
            raise ValueError(f"{path} is not a readable table ({error}); write it again") from None
