"""Predictions on disk: tables, facts, sorted folders."""

import csv
import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from ropaws.cli.main import main
from ropaws.pool.listing import list_labeled, read_csv
from ropaws.run import sorting
from ropaws.run.label_files import column_names, columns
from ropaws.run.output_formats import PLACE, SORTED_TO, Output, rows_of_moved, write_labels
from ropaws.run.predict import Prediction
from tests.photos import NAMES, fails


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_parquet_tables_are_read_and_written(photos, trained, tmp_path):
    columns = {"path": ["labeled/rows/0.png", "pool/noise-0.png"], "label": ["rows", None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), photos / "labels.parquet")
    assert list_labeled(photos / "labels.parquet").labels == ("rows", None)
    run, _ = trained
    out = tmp_path / "labels.parquet"
    main(["predict", str(run), str(photos / "labels.parquet"), "--out", str(out)])
    rows = pyarrow.parquet.read_table(out).to_pylist()
    assert [Path(row["path"]).name for row in rows] == ["0.png", "noise-0.png"]
    assert rows[0]["label"] in NAMES
    assert sum(rows[0][f"p({name})"] for name in NAMES) == pytest.approx(1, abs=1e-4)


def test_a_parquet_table_of_nothing_can_be_opened(trained, tmp_path):
    run, _ = trained
    (tmp_path / "broken.png").write_bytes(b"broken")
    main(["predict", str(run), str(tmp_path / "broken.png"), "--out", str(tmp_path / "labels.parquet")])
    assert pyarrow.parquet.read_table(tmp_path / "labels.parquet").num_rows == 0


def test_predict_writes_a_row_for_every_image(trained, tmp_path, capsys):
    run, photos = trained
    out = tmp_path / "labels.csv"
    main(["predict", str(run), str(photos / "pool"), "--out", str(out)])
    rows = rows_of(out)
    assert len(rows) == 36
    assert list(rows[0])[:8] == [
        "path",
        "label",
        "nearest_class",
        "confidence",
        "in_domain",
        "out_of_class",
        "nearest",
        "similarity",
    ]
    right = 0
    for row in rows:
        probabilities = {name: float(row[f"p({name})"]) for name in NAMES}
        assert sum(probabilities.values()) == pytest.approx(1, abs=1e-4)
        likeliest = max(probabilities, key=lambda name: probabilities[name])
        assert row["nearest_class"] == likeliest
        if row["out_of_class"] == "True":
            assert row["label"] == row["confidence"] == ""
        else:
            assert row["label"] == likeliest
            assert float(row["confidence"]) == probabilities[likeliest]
        assert Path(row["nearest"]).is_file()
        assert 0 <= float(row["in_domain"]) <= 1
        right += Path(row["path"]).name.startswith(row["nearest_class"])
    assert right >= 20  # of 24 in-class images
    noise, classes = (
        [float(r["in_domain"]) for r in rows if ("noise" in r["path"]) == kind] for kind in (True, False)
    )
    assert np.mean(noise) < np.mean(classes)
    facts = json.loads((tmp_path / "labels.csv.json").read_text())
    assert all((float(r["in_domain"]) < facts["threshold"]) == (r["out_of_class"] == "True") for r in rows)
    assert sum(facts["images"].values()) == 36


def test_predict_formats_top_and_propagation(trained, tmp_path):
    run, photos = trained
    out = tmp_path / "labels.jsonl"
    main(["predict", str(run), str(photos / "pool"), "--out", str(out), "--top", "2", "--propagate"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 36
    assert rows[0]["top1"] == rows[0]["label"]
    assert rows[0]["p1"] >= rows[0]["p2"]
    assert "top3" not in rows[0]


def test_images_are_sorted_into_folders_and_nothing_is_overwritten(trained, tmp_path):
    run, photos = trained
    for twin in ("a", "b"):
        (tmp_path / twin).mkdir()
        (tmp_path / twin / "same.png").write_bytes((photos / "pool" / "rows-1.png").read_bytes())
    (tmp_path / "a" / "broken.png").write_bytes(b"broken")
    command = ["predict", str(run), str(tmp_path / "a"), str(tmp_path / "b"),
               "--out", str(tmp_path / "l.csv"), "--threshold", "0"]  # fmt: skip
    main([*command, "--copy-to", str(tmp_path / "sorted")])
    assert sorted(p.name for p in (tmp_path / "sorted").rglob("*.png")) == ["same (2).png", "same.png"]
    assert (tmp_path / "a" / "same.png").exists()
    main([*command, "--copy-to", str(tmp_path / "sorted")])  # again: what is there is left as it is
    assert len(list((tmp_path / "sorted").rglob("*.png"))) == 2
    main([*command, "--move-to", str(tmp_path / "sorted")])
    assert len(list((tmp_path / "sorted").rglob("*.png"))) == 4
    rows = rows_of(tmp_path / "l.csv")
    assert all(Path(row["sorted_to"]).is_file() for row in rows)
    assert not (tmp_path / "a" / "same.png").exists()
    assert (tmp_path / "a" / "broken.png").exists()
    assert "broken.png" in json.loads((tmp_path / "l.csv.json").read_text())["unreadable"][0][0]


def rows_in(path):
    if path.suffix == ".csv":
        return list(read_csv(path))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    rows = pyarrow.parquet.read_table(path).to_pylist()
    return [{name: value for name, value in row.items() if name not in PLACE} for row in rows]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_call_that_was_stopped_is_finished_by_the_next_and_the_table_keeps_its_rows(
    trained, tmp_path, monkeypatch, capsys, suffix
):
    run, photos = trained
    pool, out = shutil.copytree(photos / "pool", tmp_path / "pool"), tmp_path / f"labels{suffix}"
    command = ["predict", run, pool, "--out", out, "--move-to", tmp_path / "sorted", "--threshold", "0"]
    move_file, moved = sorting.move_file, []

    def until_the_disk_is_full(source, place):
        if len(moved) == 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        moved.append(source)
        move_file(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(sorting, "move_file", until_the_disk_is_full)
        assert "No space left" in fails(capsys, *command)
    first = {row["path"]: row for row in rows_in(out)}
    assert len(first) == 36
    assert sum(Path(row["sorted_to"]).exists() for row in first.values()) == 10
    main([str(part) for part in command])
    assert "36 images in" in capsys.readouterr().out.replace("\n", " ")
    second = {row["path"]: row for row in rows_in(out)}
    assert second == first  # the same images, labels, figures and places
    assert {Path(path) for path in list(second)[:10]} == set(moved)
    assert all(Path(row["sorted_to"]).is_file() for row in second.values())
    assert sum(json.loads(Path(f"{out}.json").read_text())["images"].values()) == 36
    assert list(pool.iterdir()) == []


def test_rows_of_moved_images_are_not_lost_to_a_table_of_other_columns(trained, tmp_path, capsys):
    run, photos = trained
    one, two = (shutil.copy(photos / "pool" / f"rows-{n}.png", tmp_path) for n in range(2))
    command = ["predict", run, "--out", tmp_path / "l.csv", "--move-to", tmp_path / "sorted"]
    main([str(part) for part in [*command, one]])
    before = (tmp_path / "l.csv").read_bytes()
    assert "with other columns; choose another name" in fails(capsys, *command, two, "--top", "2")
    assert (tmp_path / "l.csv").read_bytes() == before
    assert Path(two).exists()
    (tmp_path / "l.csv").write_text("path,label,sorted_to,p(rows)\ngone.png,rows,there.png,many\n")
    assert "row 1 of" in fails(capsys, *command, two)
    (tmp_path / "l.csv").write_text("a,b\n1,2\n")  # no table of moved images
    main([str(part) for part in [*command, two]])
    assert len(rows_of(tmp_path / "l.csv")) == 1


def test_two_calls_do_not_sort_into_one_folder_at_the_same_time(trained, tmp_path, capsys):
    run, photos = trained
    image = shutil.copy(photos / "pool" / "rows-0.png", tmp_path)
    command = ["predict", run, image, "--out", tmp_path / "l.csv", "--move-to", tmp_path / "sorted"]
    (tmp_path / "sorted").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys, pathlib; from ropaws.core.files import locked\n"
         "with locked(pathlib.Path(sys.argv[1])): print(flush=True); sys.stdin.read()", tmp_path / "sorted"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        holder.stdout.readline()
        assert f"is being written by process {holder.pid}" in fails(capsys, *command)
        assert Path(image).exists()
        assert not (tmp_path / "l.csv").exists()
        holder.kill()
    main([str(part) for part in command])
    assert [path.name for path in (tmp_path / "sorted").rglob("*") if path.is_file()] == ["rows-0.png"]


def test_rows_have_the_columns_that_are_announced():
    prediction = Prediction("a.png", "=x", "=x", 0.7, 0.5, False, "b.png", -0.25, (0.7, 0.3))
    for top in (None, 1, 2, 5):
        assert list(columns(prediction, ["=x", "y"], top)) == column_names(["=x", "y"], top)


def test_a_formula_in_a_name_is_text_in_the_table_and_comes_back(tmp_path):
    prediction = Prediction("=a.png", "-1", "-1", 0.7, 0.5, False, "@b.png", -0.25, (0.7, 0.3))
    row = columns(prediction, ["-1", "+2"], 2) | {SORTED_TO: "=c.png"}
    write_labels(tmp_path / "l.csv", [row], Output("csv"))
    (cells,) = rows_of(tmp_path / "l.csv")
    assert [cells[name][0] for name in ("path", "label", "nearest", "top1", "top2", SORTED_TO)] == ["'"] * 6
    assert cells["similarity"] == "-0.25"
    for _ in range(2):  # written again as it was read
        (again,) = rows_of_moved(tmp_path / "l.csv", list(row), "csv")
        assert again == row
        write_labels(tmp_path / "l.csv", [again], Output("csv"))


def test_predict_refuses_what_it_cannot_do(trained, tmp_path, capsys):
    run, photos = trained
    pool = photos / "pool"
    assert "must end in .csv, .jsonl or .parquet" in fails(
        capsys, "predict", run, pool, "--out", tmp_path / "x.txt"
    )
    assert "no folder" in fails(capsys, "predict", run, pool, "--out", tmp_path / "no" / "x.csv")
    assert "no folder or table" in fails(capsys, "predict", run, tmp_path / "no", "--out", tmp_path / "x.csv")
    assert "threshold must be" in fails(
        capsys, "predict", run, pool, "--out", tmp_path / "x.csv", "--threshold", "2"
    )
    assert "--top must be" in fails(capsys, "predict", run, pool, "--out", tmp_path / "x.csv", "--top", "0")
    assert "cannot be combined" in fails(
        capsys, "predict", run, pool, "--out", tmp_path / "x.csv", "--copy-to", "a", "--move-to", "b"
    )
    assert "is not a run folder" in fails(capsys, "predict", tmp_path, pool, "--out", tmp_path / "x.csv")
    assert list(tmp_path.iterdir()) == []
