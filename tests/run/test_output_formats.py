"""Formats that other tools open: what is in them, and what cannot be combined."""

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from ropaws.cli.main import main
from ropaws.insight.neighbors import pool_map
from ropaws.run.output_formats import FIELDS, Output, write_labels
from ropaws.run.predict import HeldRows
from tests.photos import NAMES, fails


@pytest.fixture(scope="module")
def predicted(trained, tmp_path_factory):
    """The pool in every format, by the command; the rows of jsonl are what the others are compared with."""
    run, photos = trained
    folder = tmp_path_factory.mktemp("formats")
    for ending in ("jsonl", "parquet"):
        command = ["predict", str(run), str(photos / "pool"), "--out", str(folder / f"t.{ending}")]
        main([*command, "--threshold", "0.5"])
    for name in ("label-studio", "fiftyone", "coco"):
        command = ["predict", str(run), str(photos / "pool"), "--out", str(folder / f"{name}.json")]
        main([*command, "--format", name, "--threshold", "0.5"])
    rows = [json.loads(line) for line in (folder / "t.jsonl").read_text().splitlines()]
    assert {row["out_of_class"] for row in rows} == {True, False}
    return folder, rows


def test_parquet_has_what_embedding_atlas_shows(predicted):
    folder, rows = predicted
    table = pyarrow.parquet.read_table(folder / "t.parquet")
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds["x"] == kinds["y"] == "float"
    assert kinds["label"] == "string"
    assert kinds["confidence"] == kinds["in_domain"] == "double"
    assert kinds["out_of_class"] == "bool"
    assert kinds["neighbors"] == "struct<ids: list<element: int64>, distances: list<element: float>>"
    found = table.to_pylist()
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    for number, row in enumerate(found):
        ids, distances = row["neighbors"]["ids"], row["neighbors"]["distances"]
        assert len(ids) == len(set(ids)) == len(distances) == 10
        assert number not in ids
        assert max(ids) < len(found)
        assert distances == sorted(distances)
        assert abs(row["x"]) <= 1 >= abs(row["y"])


def test_a_table_without_a_map_is_as_it_was(trained, tmp_path):
    run, photos = trained
    main(["predict", str(run), str(photos / "pool"), "--out", str(tmp_path / "t.parquet"), "--no-map"])
    names = pyarrow.parquet.read_table(tmp_path / "t.parquet").column_names
    assert not {"x", "y", "neighbors"} & set(names)


def test_label_studio_gets_tasks_with_predictions(predicted):
    folder, rows = predicted
    tasks = json.loads((folder / "label-studio.json").read_text())
    for task, row in zip(tasks, rows, strict=True):
        link = urlsplit(task["data"]["image"])
        assert (link.path, "/" + parse_qs(link.query)["d"][0]) == ("/data/local-files/", row["path"])
        assert task["data"]["in_domain"] == row["in_domain"]
        if row["out_of_class"]:
            assert task["predictions"] == []
            continue
        (said,) = task["predictions"]
        assert said["score"] == row["confidence"]
        assert said["result"] == [
            {
                "from_name": "choice",
                "to_name": "image",
                "type": "choices",
                "value": {"choices": [row["label"]]},
            }
        ]
    config = ElementTree.fromstring(
        json.loads((folder / "label-studio.json.json").read_text())["labeling_config"]
    )
    assert [choice.get("value") for choice in config.iter("Choice")] == sorted(NAMES)
    assert config.find("Choices").get("toName") == config.find("Image").get("name") == "image"


def test_fiftyone_gets_class_numbers_by_absolute_path(predicted):
    folder, rows = predicted
    found = json.loads((folder / "fiftyone.json").read_text())
    assert found["classes"] == sorted(NAMES)
    assert list(found["labels"]) == [row["path"] for row in rows]
    for row in rows:
        target = found["labels"][row["path"]]
        assert Path(row["path"]).is_absolute()
        if row["out_of_class"]:
            assert target is None
        else:
            assert found["classes"][target["label"]] == row["label"]
            assert target["confidence"] == row["confidence"]
            assert target["attributes"]["in_domain"] == row["in_domain"]


def test_coco_gets_images_annotations_and_categories(predicted):
    folder, rows = predicted
    found = json.loads((folder / "coco.json").read_text())
    name_of = {category["id"]: category["name"] for category in found["categories"]}
    label_of = {said["image_id"]: name_of[said["category_id"]] for said in found["annotations"]}
    assert sorted(name_of) == [1, 2, 3]
    assert [image["file_name"] for image in found["images"]] == [row["path"] for row in rows]
    assert [label_of.get(image["id"], "") for image in found["images"]] == [row["label"] for row in rows]
    assert all(image["width"] > 0 < image["height"] for image in found["images"])
    assert len({said["id"] for said in found["annotations"]}) == len(found["annotations"])


def test_names_that_are_hard_to_write_come_through(tmp_path):
    path = tmp_path / "a b&c#d%20+ \udcff.png"
    row = {"path": str(path), "label": 'a "b" <&>', "nearest_class": "", "confidence": 0.5, "in_domain": 1.0}
    rows = [row | {"out_of_class": False}]
    write_labels(tmp_path / "t.json", rows, Output("label-studio", ('a "b" <&>',)))
    (task,) = json.loads((tmp_path / "t.json").read_text())
    query = parse_qs(urlsplit(task["data"]["image"]).query, encoding="utf-8", errors="surrogateescape")
    assert "/" + query["d"][0] == str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "t.json"], "several tools read .json; add --format label-studio or fiftyone or coco"),
        (["--out", "t.csv", "--format", "coco"], "--out must end in .json for --format coco, got t.csv"),
        (["--out", "t.txt"], "must end in .csv, .jsonl or .parquet"),
        (["--out", "t.json", "--format", "coco", "--top", "2"], "--top chooses columns of a table"),
        (["--out", "t.json", "--format", "coco", "--move-to", "m"], "names images where they are"),
        (
            ["--out", "t", "--format", "coco", "--engine", "ray"],
            "--engine ray writes a folder of parquet files",
        ),
    ],
)
def test_what_cannot_be_written_is_said_in_a_line(trained, monkeypatch, tmp_path, capsys, options, message):
    run, photos = trained
    monkeypatch.chdir(tmp_path)
    assert message in fails(capsys, "predict", run, photos / "pool", *options)
    assert list(tmp_path.iterdir()) == []


def test_rows_of_an_array_are_not_files(trained, tmp_path, capsys):
    run, _ = trained
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 8, 8, 3), np.uint8))
    out = tmp_path / "t.json"
    message = fails(capsys, "predict", run, tmp_path / "a.npz", "--out", out, "--format", "fiftyone")
    assert "--format fiftyone names files; write a table" in message
    assert not out.exists()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_images_have_a_map_and_as_many_neighbors_as_there_are(tmp_path, count):
    points = torch.randn(count, 4)
    rows = [{"path": str(number), "label": ""} for number in range(count)]
    write_labels(tmp_path / "t.parquet", rows, Output("parquet", (), lambda: pool_map(points)))
    found = pyarrow.parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert [len(row["neighbors"]["ids"]) for row in found] == [count - 1] * count


def test_held_rows_are_read_back_from_memory_and_from_disk(monkeypatch):
    for size in (1 << 28, 64):
        monkeypatch.setattr("ropaws.run.predict.HELD", size)
        held, rows = HeldRows(), torch.randn(50, 3)
        held.add(rows[:20])
        held.add(rows[20:])
        assert torch.equal(held.rows(), rows)
        held.close()


def test_embedding_atlas_opens_the_table(tmp_path):
    """Apple's viewer starts on it, with our map and our neighbors."""
    pytest.importorskip("embedding_atlas")
    points = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    rows = [dict.fromkeys(FIELDS) | {"path": f"{number}.png", "label": "cat"} for number in range(60)]
    write_labels(tmp_path / "t.parquet", rows, Output("parquet", ("cat",), lambda: pool_map(points)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--x", "x", "--y", "y", "--neighbors", "neighbors", "--port", str(port))
    command = [sys.executable, "-m", "embedding_atlas.cli", str(tmp_path / "t.parquet"), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(240):
            with contextlib.suppress(OSError):
                reply = urllib.request.urlopen(f"http://127.0.0.1:{port}/data/metadata.json", timeout=5)
                break
            time.sleep(0.5)
        data = json.loads(reply.read())["props"]["data"]
    finally:
        process.terminate()
        process.wait()
    assert data["projection"] == {"x": "x", "y": "y"}
    assert data["neighbors"] == "neighbors"
