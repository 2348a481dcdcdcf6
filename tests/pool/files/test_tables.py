"""Tables of paths and labels as people and other tools save them."""

import itertools

import numpy as np
import pytest
from PIL import Image

from ropaws.pool.listing import Pool

IMAGES = ("a.png", "b, c; d.png", "e.png")
LABELS = ("cat", "", "dog")


@pytest.fixture
def folder(tmp_path):
    for name in IMAGES:
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / name)
    return tmp_path


def write(folder, head, separator=",", name="table.csv", encoding="utf-8"):
    rows = [head, *([f'"{image}"', label, "7"] for image, label in zip(IMAGES, LABELS, strict=True))]
    table = folder / name
    table.write_text("\n".join(separator.join(row) for row in rows), encoding=encoding)
    return table


def opened(table):
    pool = Pool.open(labeled=table)
    assert [path.name for path in pool.images] == list(IMAGES)
    assert pool.labels == ("cat", None, "dog")
    return pool


@pytest.mark.parametrize(
    ("separator", "ending", "encoding"), itertools.product(",;\t", (".csv", ".tsv"), ("utf-8", "utf-8-sig"))
)
def test_any_separator_and_mark(folder, separator, ending, encoding):
    table = write(folder, ["path", "label", "more"], separator, f"t{ending}", encoding)
    assert opened(table).notes == ()


@pytest.mark.parametrize("path", ["filename", "file_name", "FilePath", "file_path", "image", "image_path"])
@pytest.mark.parametrize("label", ["class", "Category", "target"])
def test_columns_of_other_tools_are_named_in_a_line(folder, path, label):
    notes = opened(write(folder, [path, label, "more"], ";")).notes
    assert [note.partition(": ")[2] for note in notes] == [
        f"column {path!r} is read as path",
        f"column {label!r} is read as label",
    ]


def test_our_own_names_win(folder):
    assert opened(write(folder, ["path", "label", "class"])).notes == ()


def test_the_pool_says_it_too(folder):
    (note,) = Pool.open(write(folder, ["image", "label", "more"])).notes
    assert note.endswith("column 'image' is read as path")


def test_two_candidates_are_an_error_that_names_them(folder):
    with pytest.raises(ValueError, match=r"several columns .* path: filename, image; name one 'path'"):
        Pool.open(labeled=write(folder, ["filename", "label", "image"]))


def test_no_candidate_is_an_error_with_the_columns_there_are(folder):
    with pytest.raises(ValueError, match=r"no column 'label' \(nor class.*it has path, kind, more"):
        Pool.open(labeled=write(folder, ["path", "kind", "more"]))


def test_utf_16_is_an_error_with_the_remedy(folder):
    with pytest.raises(ValueError, match="is UTF-16; save it as CSV in UTF-8"):
        Pool.open(labeled=write(folder, ["path", "label", "more"], "\t", encoding="utf-16"))


def test_parquet_with_such_columns(folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"image": list(IMAGES), "embedding": [[0.0]] * 3, "Class": list(LABELS)})
    parquet.write_table(table, folder / "t.parquet")
    assert len(opened(folder / "t.parquet").notes) == 2
