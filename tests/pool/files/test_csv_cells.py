"""No cell of a table is a formula, and every text comes back as it was."""

import csv

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ropaws.pool.listing import as_cell, from_cell, list_labeled, read_csv, write_csv

FORMULAS = ("=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\r=1", "\n=1", "\uff1d1", "'=1", "''=1")


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_becomes_text(text):
    assert as_cell(text) == f"'{text}"
    assert from_cell(as_cell(text)) == text


@pytest.mark.parametrize("value", ["cat", "", "'tis", "a=b", "1", -0.5, True, None, "''"])
def test_everything_else_stays(value):
    assert as_cell(value) is value


@settings(deadline=None)
@given(st.text(alphabet="'=+-@\t\r\n\uff1da1 ,\"", max_size=6))
def test_every_text_comes_back(text):
    assert from_cell(as_cell(text)) == text
    assert str(as_cell(text))[:1] not in ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d")


def test_tables_are_written_and_read(tmp_path):
    path = tmp_path / "t.csv"
    rows = [{"=head": text, "number": -0.5, "name": "a\udcff"} for text in FORMULAS]
    assert write_csv(path, rows) == len(rows)
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert {cell for cell in cells if cell.startswith(("=", "+", "-", "@"))} == {"-0.5"}
    assert list(read_csv(path)) == [{**row, "number": "-0.5"} for row in rows]


def test_a_table_of_paths_and_labels_is_read_as_it_was_meant(tmp_path):
    for name in ("=1.png", "'tis.png"):
        Image.new("L", (8, 8)).save(tmp_path / name)
    write_csv(tmp_path / "t.csv", [{"path": n, "label": x} for n, x in (("=1.png", "-1"), ("'tis.png", "@"))])
    listing = list_labeled(tmp_path / "t.csv")
    assert [place.name for place in listing.images] == ["=1.png", "'tis.png"]
    assert listing.labels == ("-1", "@")


def test_a_table_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "t.csv").write_text("path,label\n" + 200_000 * "x" + ",a\n")
    with pytest.raises(ValueError, match="is not a readable table"):
        list_labeled(tmp_path / "t.csv")
