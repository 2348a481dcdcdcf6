"""Labels that a person gives in odd ways are understood, or refused in one line that says what to do."""

import csv
import json
import unicodedata

import numpy as np
import pytest

from ropaws.cli.main import main
from ropaws.explore.answer_log import RefusedError, checked_class_name
from ropaws.pool.corpus import own_images
from ropaws.pool.datasets.archives import read_npz
from ropaws.pool.datasets.feature_file import read_features
from ropaws.pool.listing import list_labeled
from tests.photos import fails, save

NFC, NFD = (unicodedata.normalize(form, "Käse") for form in ("NFC", "NFD"))


def check(capsys, photos, *options):
    """What `ropaws check` prints of problems."""
    main(["check", "--labeled", str(photos), *map(str, options)])
    return capsys.readouterr().out


def write_table(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_out_of_class_rows_of_a_table_of_predictions_belong_to_no_class(trained, tmp_path, capsys, ending):
    run, photos = trained
    table = tmp_path / f"predicted{ending}"
    main(["predict", str(run), str(photos / "pool"), str(photos / "test"), "--out", str(table)])
    facts = json.loads((tmp_path / f"predicted{ending}.json").read_text())
    assert facts, "the table has facts beside it"
    listing = list_labeled(table)
    rows = {item.path: item for item in run_predictions(run, photos)}
    outside = sum(item.out_of_class for item in rows.values())
    assert 0 < outside < len(rows)
    assert dict(zip(map(str, listing.images), listing.labels, strict=True)) == {
        path: "out-of-class" if item.out_of_class else item.label for path, item in rows.items()
    }
    line = f"{table}: {outside} rows are marked as out_of_class: they belong to no class"
    capsys.readouterr()
    assert line in check(capsys, table).splitlines()
    if ending != ".csv":
        return  # training reads any table by the same listing
    main(["train", "--labeled", str(table), "--out", str(tmp_path / "run"), "--backbone", "small",
          "--train.steps", "1", "--no-report"])  # fmt: skip
    assert line in capsys.readouterr().err.splitlines()


def run_predictions(run, photos):
    import ropaws

    return ropaws.predict(run, photos / "pool") + ropaws.predict(run, photos / "test")


def test_a_column_out_of_class_that_means_neither_is_refused(photos, tmp_path):
    image = photos / "pool/rows-0.png"
    table = write_table(tmp_path / "t.csv", [["path", "label", "out_of_class"], [image, "rows", "perhaps"]])
    with pytest.raises(ValueError, match="out_of_class must be True or False, yes or empty, got 'perhaps'"):
        list_labeled(table)


@pytest.mark.parametrize("command", ["check", "train"])
def test_one_image_with_two_labels_is_an_error_that_names_both(photos, tmp_path, capsys, command):
    image, other = photos / "pool/rows-0.png", photos / "pool/block-0.png"
    rows = [["path", "label"], [image, "rows"], [other, "block"], [image, "block"]]
    table = write_table(tmp_path / "twice.csv", rows)
    line = fails(capsys, command, "--labeled", table)
    assert line == f"ropaws: {image} has two labels, 'rows' and 'block'; remove one"


def test_a_link_to_an_image_of_another_class_is_two_labels(photos, capsys):
    link, image = photos / "labeled/block/again.png", photos / "labeled/rows/0.png"
    link.symlink_to(image)
    line = fails(capsys, "check", "--labeled", photos / "labeled")
    assert line == (
        f"ropaws: {image} has two labels, 'block' and 'rows' (the same image as {link}); remove one"
    )


def test_two_spellings_of_one_letter_are_one_class(photos, tmp_path, capsys):
    random = np.random.default_rng(0)
    for number, name in enumerate((NFC, NFD)):
        save(photos / "labeled" / name / f"{number}.png", 0, random)
    assert len(list((photos / "labeled").iterdir())) == 5, "a file system that keeps both"
    names = own_images(photos / "labeled", (), None).class_names
    assert names == ("Käse", "block", "columns", "rows")
    table = write_table(
        tmp_path / "t.csv",
        [["path", "label"], [photos / "pool/rows-0.png", NFC], [photos / "pool/rows-1.png", NFD]],
    )
    assert set(list_labeled(table).labels) == {NFC}
    np.savez(tmp_path / "names.npz", images=np.zeros((2, 8, 8), np.uint8), labels=np.array([NFC, NFD]))
    assert set(list_labeled(tmp_path / "names.npz").labels) == {NFC}
    numbered = {"images": np.zeros((2, 8, 8), np.uint8), "labels": np.arange(2)}
    np.savez(tmp_path / "numbers.npz", **numbered, class_names=np.array([NFC, NFD]))
    assert set(list_labeled(tmp_path / "numbers.npz").labels) == {NFC}
    features = np.eye(4, dtype=np.float32)
    np.savez(tmp_path / "features.npz", features=features, labels=np.array([NFC, NFD, "a", "a"]))
    assert read_features(tmp_path / "features.npz").class_names == (NFC, "a")
    with pytest.raises(RefusedError, match="there is a class"):
        checked_class_name(NFD, [NFC])
    assert "Käse" in check(capsys, photos / "labeled")


def test_saved_datasets_have_one_spelling(tmp_path):
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    images = [Image.new("RGB", (8, 8), (number, 0, 0)) for number in range(2)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[NFC, NFD])})
    datasets.Dataset.from_dict({"image": images, "label": [0, 1]}, features).save_to_disk(tmp_path / "set")
    assert set(list_labeled(tmp_path / "set").labels) == {NFC}


def test_check_lists_images_of_no_class_and_does_not_compare_their_number(photos, capsys):
    for copy in range(20):
        save(photos / "labeled/Out-Of-Class" / f"{copy}.png", -1, np.random.default_rng(copy))
    text = check(capsys, photos / "labeled")
    assert "out-of-class" in text
    assert "20" in text
    assert "labels, " not in text  # of unequal classes


def test_arrays_may_have_rows_of_no_class_and_so_may_test_images(photos, tmp_path):
    images, features = np.zeros((4, 8, 8), np.uint8), np.eye(4, dtype=np.float32)
    names = np.array(["a", "out-of-class"])
    np.savez(tmp_path / "i.npz", train_images=images, train_labels=np.arange(4) % 2, class_names=names)
    np.savez(tmp_path / "f.npz", features=features, labels=np.array(["a", "b", "out-of-class", "a"]))
    with pytest.raises(ValueError, match=r"has a class named 'out-of-class'.* rename the class"):
        read_npz(tmp_path / "i.npz")  # a dataset whose classes are all known
    assert read_features(tmp_path / "f.npz").class_names == ("a", "b")
    assert read_features(tmp_path / "f.npz").outside.tolist() == [2]
    (photos / "test/noise").rename(photos / "test/out-of-class")
    files = own_images(photos / "labeled", (), photos / "test")
    assert "out-of-class" not in files.class_names
    assert files.test.labels.count("out-of-class") == 6


@pytest.mark.parametrize("way", ["..", "link", "file"])
def test_an_image_that_two_paths_lead_to_counts_once(photos, tmp_path, capsys, way):
    pool = photos / "pool"
    if way == "..":
        second = photos / "labeled/.." / "pool"
    else:
        second = photos / "linked"
        if way == "link":
            second.symlink_to(pool)
        else:
            second.mkdir()
            for image in pool.iterdir():
                (second / image.name).symlink_to(image)
    files = own_images(photos / "labeled", (pool, second), None)
    assert len(files.train.images) == 9 + 36
    text = check(capsys, photos / "labeled", "--unlabeled", pool, second)
    assert "36 images were named twice, by a link or ..; each counts once:" in text
    assert "the same pixels" not in text  # copies are another matter
    assert "No problem" not in text
    first = sorted(pool.iterdir())[0]
    line = files.train.notes[0]
    assert line.endswith(f"each counts once: {second / first.name} (the same image as {first})")
    capsys.readouterr()
    main(["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(pool), str(second),
          "--out", str(tmp_path / "run"), "--backbone", "small", "--train.steps", "1",
          "--no-report"])  # fmt: skip
    assert line in capsys.readouterr().err.splitlines()


def test_rows_of_one_array_by_two_paths_count_once(tmp_path):
    images = np.arange(4, dtype=np.uint8)[:, None, None] * np.ones((4, 8, 8), np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.array(["a", "a", "b", "b"]))
    (tmp_path / "b.npz").symlink_to(tmp_path / "a.npz")
    files = own_images(tmp_path / "a.npz", (tmp_path / "b.npz",), None)
    assert len(files.train.images) == 4
    assert len(files.train.notes) == 1


def test_overlapping_folders_are_nothing_to_speak_of(photos):
    assert own_images(photos / "labeled", (photos,), photos / "test").train.notes == ()


def test_an_error_of_the_test_images_names_their_option(photos, capsys):
    line = fails(capsys, "check", "--labeled", photos / "labeled", "--test", photos / "nowhere")
    assert line == f"ropaws: --test: no folder or table at {photos / 'nowhere'}"
