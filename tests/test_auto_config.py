"""From a person's folders to a table of labels."""

import csv
import json
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ropaws
from ropaws.auto_config import fit_settings, parse_budget
from ropaws.cli.main import main
from ropaws.data.files.listing import list_labeled, list_unlabeled, merge
from ropaws.data.sources import DataConfig, load_corpus
from ropaws.prediction.export import folder_name
from tests import tiny
from tests.tiny import draw

ROOT = Path(__file__).parent.parent
NAMES = ("rows", "columns", "block")


def save(path, label, random):
    path.parent.mkdir(parents=True, exist_ok=True)
    gray = Image.fromarray(draw(label, random)).resize((36, 36), Image.Resampling.NEAREST)
    gray.convert("RGB").save(path)


def make_photos(folder):
    """labeled/CLASS/*.png, a flat pool with noise in it, and test images with an unknown class."""
    random = np.random.default_rng(0)
    for label, name in enumerate(NAMES):
        for i in range(3):
            save(folder / "photos/labeled" / name / f"{i}.png", label, random)
        for i in range(8):
            save(folder / "photos/pool" / f"{name}-{i}.png", label, random)
        for i in range(4):
            save(folder / "photos/test" / name / f"{i}.png", label, random)
    for i in range(12):
        save(folder / "photos/pool" / f"noise-{i}.png", -1, random)
    for i in range(6):
        save(folder / "photos/test/noise" / f"{i}.png", -1, random)
    return folder / "photos"


@pytest.fixture
def photos(tmp_path):
    return make_photos(tmp_path)


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()
    return said[-1]


def test_folders_become_a_corpus(photos):
    corpus = load_corpus(
        DataConfig(
            labeled=photos / "labeled",
            unlabeled=(photos / "pool", photos / "labeled"),
            test=photos / "test",
            image_size=16,
        )
    )
    assert corpus.class_names == ("block", "columns", "rows")
    assert corpus.train_images.shape == (9 + 36, 3, 16, 16)  # labeled images are in the pool once
    assert (corpus.train_labels + 1).bincount().tolist() == [36, 3, 3, 3]
    assert (corpus.test_labels + 1).bincount().tolist() == [6, 4, 4, 4]
    for name, label in zip(corpus.train_names, corpus.train_labels.tolist(), strict=True):
        assert Path(name).parent.name == (corpus.class_names[label] if label >= 0 else "pool")


def test_tables_name_paths_and_labels(photos):
    table = photos / "labels.csv"
    table.write_text("path,label\nlabeled/rows/0.png,rows\npile/noise-0.png,\nlabeled/block/1.png, block \n")
    listing = list_labeled(table)
    assert listing.labels == ("rows", None, "block")
    assert [path.name for path in listing.images] == ["0.png", "noise-0.png", "1.png"]
    assert list_unlabeled(table).labels == (None, None, None)


def test_parquet_tables_are_read_and_written(photos, trained, tmp_path):
    import pyarrow
    import pyarrow.parquet

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
    import pyarrow.parquet

    run, _ = trained
    (tmp_path / "broken.png").write_bytes(b"broken")
    main(["predict", str(run), str(tmp_path / "broken.png"), "--out", str(tmp_path / "labels.parquet")])
    assert pyarrow.parquet.read_table(tmp_path / "labels.parquet").num_rows == 0


def test_a_label_wins_over_no_label(photos):
    labeled, pool = list_labeled(photos / "labeled"), list_unlabeled(photos / "labeled")
    for order in ([labeled, pool], [pool, labeled]):
        merged = merge(order)
        assert len(merged.images) == 9
        assert None not in merged.labels


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("file,label\na,b\n", "has no column 'path'; it has file, label"),
        ("path\nlabeled/rows/0.png\n", "has no column 'label'"),
        ("path,label\n", "has no rows"),
        ("path,label\nmissing.png,x\n", "names 1 files that are not there, the first is"),
        ("path,label\nlabeled/rows/0.png,\n", "has no label"),
        (
            "path,label\nlabeled/rows/0.png,Cat\nlabeled/rows/1.png,cat \nlabeled/rows/2.png,dog\n",
            "'Cat' and 'cat', which differ only by case or blanks",
        ),
    ],
)
def test_bad_tables_get_one_line(photos, capsys, content, words):
    (photos / "labels.csv").write_text(content)
    assert words in fails(capsys, "train", "--labeled", photos / "labels.csv", "--out", photos / "run")
    assert not (photos / "run").exists()


def test_bad_folders_get_one_line(photos, capsys):
    assert "no folder or table at" in fails(capsys, "train", "--labeled", photos / "nowhere")
    (photos / "empty").mkdir()
    assert "has no folder in it" in fails(capsys, "train", "--labeled", photos / "empty")
    (photos / "empty" / "cats").mkdir()
    assert "has no image; fill it or remove it" in fails(capsys, "train", "--labeled", photos / "empty")
    assert "has no image" in fails(
        capsys, "train", "--labeled", photos / "labeled", "--unlabeled", photos / "empty"
    )
    assert "go with --labeled" in fails(capsys, "train", "--unlabeled", photos / "pool")
    assert "leave --recipe" in fails(capsys, "train", "--labeled", photos / "labeled", "--recipe", "demo")


def test_unreadable_images_are_left_out_listed_and_too_many_are_an_error(photos, capsys):
    (photos / "pool" / "broken.png").write_bytes(b"broken")
    run = photos / "run"
    main(["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(photos / "pool"),
          "--out", str(run), "--train.steps", "1", "--train.batch", "8"])  # fmt: skip
    assert "1 unreadable images left out" in capsys.readouterr().err
    assert "broken.png" in (run / "unreadable.txt").read_text()
    for i in range(9):
        (photos / "pool" / f"broken-{i}.png").write_bytes(b"broken")
    said = fails(
        capsys,
        "train",
        "--labeled",
        photos / "labeled",
        "--unlabeled",
        photos / "pool",
        "--out",
        photos / "b",
    )
    assert "10 of 55 images cannot be read, first:" in said


def test_check_finds_what_is_wrong(photos, capsys):
    pool, labeled = photos / "pool", photos / "labeled"
    main(["check", "--labeled", str(labeled), "--unlabeled", str(pool), "--test", str(photos / "test")])
    text = capsys.readouterr().out
    assert "Nothing to mend was found." in text
    assert "36 px" in text
    (pool / "broken.png").write_bytes(b"broken")
    Image.new("RGB", (5, 5), "green").save(pool / "tiny.png")
    (pool / "copy.png").write_bytes((pool / "rows-0.png").read_bytes())
    with Image.open(labeled / "rows" / "0.png") as image:
        image.save(labeled / "block" / "the-same.bmp")  # a copy in another format, with another label
    (photos / "test" / "rows" / "leak.png").write_bytes((pool / "rows-1.png").read_bytes())
    (labeled / "lone").mkdir()
    Image.new("RGB", (40, 40), "red").save(labeled / "lone" / "1.png")
    out = photos / "findings.json"
    main(["check", "--labeled", str(labeled), "--unlabeled", str(pool), "--test", str(photos / "test"),
          "--json", str(out)])  # fmt: skip
    text = capsys.readouterr().out
    for line in (
        "1 images cannot be read",
        "1 images are smaller than 16 px",
        "2 groups of images are the same\n",
        "1 groups of copies have different labels",
        "1 test images are in the training set too",
        "classes with a single label: lone",
    ):
        assert line in text
    findings = json.loads(out.read_text())
    assert findings["classes"] == {"block": 4, "columns": 3, "lone": 1, "rows": 3}
    assert findings["unreadable"][0][0].endswith("broken.png")
    assert {Path(p).name for p in findings["conflicts"][0]} == {"0.png", "the-same.bmp"}
    assert [Path(p).name for p in findings["test_in_train"][0]] == ["leak.png", "rows-1.png"]


def scene(seed, size=(240, 180)):
    """A smooth image, as photographs are."""
    random = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(random).resize(size, Image.Resampling.BICUBIC)


def test_check_finds_near_copies(tmp_path, capsys):
    """Smaller, recompressed and in another format; in the pool, under another label, and in the test set."""
    labeled, pool, test = (tmp_path / name for name in ("labeled", "pool", "test"))
    for folder in (labeled / "cat", labeled / "dog", pool, test / "cat", test / "dog"):
        folder.mkdir(parents=True)
    for i in range(4):
        scene(i).save(labeled / "cat" / f"{i}.png")
        scene(10 + i).save(labeled / "dog" / f"{i}.png")
        scene(20 + i).save(pool / f"{i}.png")
        scene(30 + i).save(test / ("cat" if i % 2 else "dog") / f"{i}.jpg")
    Image.new("RGB", (90, 90), "white").save(pool / "white.png")  # flat ones are not alike
    Image.new("RGB", (90, 90), (250, 250, 250)).save(labeled / "cat" / "gray.png")
    command = ["check", "--labeled", str(labeled), "--unlabeled", str(pool), "--test", str(test)]
    main(command)
    assert "Nothing to mend was found." in capsys.readouterr().out
    scene(0).resize((120, 90)).save(pool / "smaller.jpg", quality=60)
    scene(1).save(labeled / "dog" / "again.jpg", quality=50)
    scene(20).resize((100, 75)).save(test / "dog" / "leak.webp", quality=70)
    main([*command, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    pairs = [tuple(Path(path).name for path in pair) for pair in found["lookalikes"]]
    assert sorted(pairs) == [("0.png", "smaller.jpg"), ("1.png", "again.jpg")]
    assert [[Path(p).name for p in group] for group in found["conflicts"]] == [["1.png", "again.jpg"]]
    assert [[Path(p).name for p in pair] for pair in found["test_in_train"]] == [["leak.webp", "0.png"]]
    assert found["duplicates"] == []


def test_settings_fit_the_data_and_say_why(photos):
    choice = fit_settings(photos / "labeled", (photos / "pool",), device="cpu")
    config = choice.config
    assert config.augment.size == 32
    assert config.model.backbone == "small"
    assert config.train.batch <= 45 // 4
    assert config.train.steps >= 300
    assert config.support.images_per_class == 3
    assert config.data.labels_per_class is None
    assert "typical image's shorter side is 36 px" in choice.reasons["augment.size"]
    assert "3 classes have 3 to 3 labels" in choice.reasons["support"]


def test_budgets():
    assert [parse_budget(text) for text in ("90s", "20m", "1.5h")] == [90, 1200, 5400]
    for wrong in ("20", "m", "-3m", "0s", "1d"):
        with pytest.raises(ValueError, match="--budget must be a time such as"):
            parse_budget(wrong)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the images above, and the folder they are in."""
    folder = tmp_path_factory.mktemp("own")
    photos = make_photos(folder)
    main(["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(photos / "pool"),
          "--test", str(photos / "test"), "--out", str(folder / "run"), "--train.steps", "60",
          "--augment.solarize", "0", "--augment.equalize", "0",
          "--optim.peak", "0.8", "--optim.start", "0.2"])  # fmt: skip
    return folder / "run", photos


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_training_on_own_images_can_be_evaluated_and_resumed(trained):
    run, _ = trained
    results = ropaws.evaluate(run)
    assert results["accuracy"] > 0.8
    assert "auroc" in results
    assert json.loads((run / "environment.json").read_text())["choices"]
    assert len(json.loads((run / "data.json").read_text())["labeled_names"]) == 9
    ropaws.resume(run)


def test_predict_writes_a_row_for_every_image(trained, tmp_path, capsys):
    run, photos = trained
    out = tmp_path / "labels.csv"
    main(["predict", str(run), str(photos / "pool"), "--out", str(out)])
    rows = rows_of(out)
    assert len(rows) == 36
    assert list(rows[0])[:7] == [
        "path",
        "label",
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
        assert probabilities[row["label"]] == pytest.approx(float(row["confidence"]), abs=1e-5)
        assert Path(row["nearest"]).is_file()
        assert 0 <= float(row["in_domain"]) <= 1
        right += Path(row["path"]).name.startswith(row["label"])
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


def test_predict_in_python_takes_paths_images_and_arrays(trained):
    run, photos = trained
    path = photos / "pool" / "rows-0.png"
    with Image.open(path) as image:
        by_path, by_image, by_array = ropaws.predict(run, [path, image.copy(), np.asarray(image)])
    assert by_path.path == str(path)
    assert by_path.probabilities == pytest.approx(by_image.probabilities, abs=1e-6)
    assert by_path.probabilities == pytest.approx(by_array.probabilities, abs=1e-6)
    assert ropaws.predict(run, [path], threshold=1.0)[0].out_of_class
    assert not ropaws.predict(run, [path], threshold=0.0)[0].out_of_class
    with pytest.raises(ValueError, match="cannot be read"):
        ropaws.predict(run, [photos / "nowhere.png"])


def test_a_run_on_gray_images_takes_any_image(photos, tmp_path):
    """As the demo's runs are: their images come as arrays of one channel."""
    run = ropaws.train(tiny.config(tiny.write_data(tmp_path / "data.npz")), tmp_path / "run")
    (prediction,) = ropaws.predict(run, [photos / "pool" / "rows-0.png"])
    assert prediction.label in NAMES
    assert prediction.nearest.isdigit()  # no file: the position in the training images


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


def test_labels_cannot_lead_out_of_the_folder():
    for label in ("../up", "..", ".", "/etc", "a\\b", "", "out-of-class", "\0"):
        name = folder_name(label)
        assert name not in ("", ".", "..", "out-of-class")
        assert os.sep not in name
        assert "\\" not in name


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
    assert "exclude each other" in fails(
        capsys, "predict", run, pool, "--out", tmp_path / "x.csv", "--copy-to", "a", "--move-to", "b"
    )
    assert "is not a run folder" in fails(capsys, "predict", tmp_path, pool, "--out", tmp_path / "x.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_run_predicts_without_its_training_images(trained, tmp_path):
    run, photos = trained
    moved = photos / "labeled"
    before = ropaws.predict(run, [photos / "pool" / "rows-0.png"])
    moved.rename(photos / "gone")
    try:
        assert ropaws.predict(run, [photos / "pool" / "rows-0.png"]) == before
    finally:
        (photos / "gone").rename(moved)


def test_the_page_on_own_data_works_as_written(photos, monkeypatch, capsys):
    """Every command of docs/own-data.md, on the images that this test makes."""
    page = (ROOT / "docs/own-data.md").read_text()
    commands = [
        shlex.split(line, comments=True)
        for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
        for line in block.splitlines()
        if line.startswith("ropaws ")
    ]
    assert len(commands) >= 4
    monkeypatch.chdir(photos.parent)
    for command in commands:
        arguments = [("3s" if word == "20m" else word) for word in command[1:]]
        main(arguments)
    assert (photos.parent / "labels.csv").exists()
    assert (photos.parent / "sorted").is_dir()
