"""Arrays and Hugging Face datasets as sources, on the command line and from Python."""

import io
import json
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

import ropaws
from ropaws.cli.main import main
from ropaws.pool.array_files import load_arrays
from ropaws.pool.decoding import read_square
from ropaws.pool.listing import list_labeled, list_unlabeled
from tests import tiny

NAMES = ("rows", "columns", "block")


def arrays(count=9, seed=0, out=0):
    random = np.random.default_rng(seed)
    labels = [*(i % 3 for i in range(count)), *[-1] * out]
    return np.stack([tiny.draw(label, random) for label in labels]), np.array(labels)


def dataset(count=9, seed=0, out=0, names=NAMES):
    images, labels = arrays(count, seed, out)
    features = datasets.Features({"image": datasets.Image(), "kind": datasets.ClassLabel(names=list(names))})
    rows = {"image": [Image.fromarray(image) for image in images], "kind": labels.tolist()}
    return datasets.Dataset.from_dict(rows, features=features)


def test_an_npz_is_a_labeled_source(tmp_path):
    images, labels = arrays(out=3)
    path = tmp_path / "a.npz"
    np.savez(path, images=images, labels=labels)
    listing = list_labeled(path)
    assert listing.labels == ("0", "1", "2") * 3 + (None,) * 3
    np.testing.assert_array_equal(read_square(listing.images[4], 12)[:, :, 0], images[4])
    assert str(listing.images[4]) == f"{path}#4"
    np.savez(path, images=images, labels=labels, class_names=np.array(NAMES))
    assert list_labeled(path).labels[:3] == NAMES
    names = np.array([*NAMES * 3, "", "", ""])
    np.savez(path, train_images=np.repeat(images[:, :, :, None], 3, axis=3), train_labels=names)
    assert list_labeled(path).labels == NAMES * 3 + (None,) * 3
    assert list_unlabeled(path).labels == (None,) * 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": None}, "has no array 'images'; it has labels"),
        ({"images": np.zeros((9, 4, 4))}, "must be uint8"),
        ({"labels": np.zeros(3, int)}, "one for each of 9 images"),
        ({"labels": np.full(9, 0.5)}, "a label is a name, a class number from 0"),
        ({"labels": np.full(9, -2)}, "a label is a name, a class number from 0"),
        ({"class_names": np.array(["one"])}, "label 1, but there are only 1 class names"),
        ({"class_names": np.array("one")}, r"class_names must be a list .*got shape \(\)"),
        ({"class_names": np.array([NAMES])}, r"class_names must be a list .*got shape \(1, 3\)"),
        ({"class_names": np.zeros(100_001, "U1")}, r"at most 100,000 names, got shape \(100001,\)"),
        ({"images": np.zeros((9, 4, 0), np.uint8)}, r"must be uint8 of shape .*got uint8 \(9, 4, 0\)"),
    ],
)
def test_a_wrong_npz_says_what_is_wrong(tmp_path, changes, words):
    images, labels = arrays()
    content = {"images": images, "labels": labels, **changes}
    np.savez(tmp_path / "a.npz", **{name: value for name, value in content.items() if value is not None})
    with pytest.raises(ValueError, match=words):
        list_labeled(tmp_path / "a.npz")


def test_a_file_that_was_written_again_is_read_again(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, images=np.zeros((1, 4, 4), np.uint8))
    assert load_arrays(path)["images"].max() == 0
    np.savez(path, images=np.ones((2, 4, 4), np.uint8))
    assert load_arrays(path)["images"].shape == (2, 4, 4)


def npy_bytes(shape, kind="|u1", content=b""):
    """An .npy file that claims a shape and holds what it is given."""
    file = io.BytesIO()
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


def write_archive(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def patch_sizes(path, *, packed=None, whole=None):
    """Let the directory of an archive of one member claim other sizes."""
    content = bytearray(path.read_bytes())
    start = content.rindex(b"PK\x01\x02")
    for offset, size in ((20, packed), (24, whole)):
        if size is not None:
            content[start + offset : start + offset + 4] = size.to_bytes(4, "little")
    path.write_bytes(content)


@pytest.fixture
def little_memory():
    """What is inside must not allocate more than a few megabytes."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npy_bytes((10**6, 1000, 1000)), "needs 1,000,000,000,000 bytes, but the file holds 0"),  # 931 GiB
        (npy_bytes((3, 4, 4), content=bytes(47)), "needs 48 bytes, but the file holds 47"),
        (npy_bytes((2**62, 4)), "needs 18,446,744,073,709,551,616 bytes"),  # 0 where it overflows
        (npy_bytes((-1, -(10**12))), "needs 1,000,000,000,000 bytes"),
        (npy_bytes((-1, 0)), "needs 0 bytes, but the file holds 0"),
        (npy_bytes((10**4000, 10**4000)), ""),  # too large even to be printed
        (npy_bytes((10**30, 0)), ""),
        (npy_bytes((2,), "<U100000000"), "needs 800,000,000 bytes"),
        (npy_bytes((1,), "|O", b"."), "holds Python objects, which are never loaded"),
        (npy_bytes((1,), [("a", "|O")], b"."), "holds Python objects, which are never loaded"),
        (npy_bytes((1,), content=b"x").replace(b"|u1", b"|?9"), ""),
        (npy_bytes((1,), content=b"x").replace(b"{", b"("), ""),
        (npy_bytes((1,), content=b"x").replace(b"\x93NUMPY\x01", b"\x93NUMPY\x03"), r"version \(3, 0\)"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f", ""),  # a header of 2 GB
        (b"\x93NUMPY", ""),
        (b"", "not an .npy array"),
        (b"hello", "not an .npy array"),
    ],
)
def test_a_header_is_not_believed_before_memory_is_taken(tmp_path, content, words, compression):
    path = tmp_path / "a.npz"
    write_archive(path, {"images.npy": content}, compression)
    with pytest.raises(ValueError, match=rf"a\.npz is not a readable \.npz file \(array 'images'.*{words}"):
        list_labeled(path)


@pytest.mark.usefixtures("little_memory")
def test_the_directory_of_an_archive_is_not_believed_either(tmp_path):
    path, large = tmp_path / "a.npz", (1 << 32) - 1000
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        write_archive(path, {"images.npy": npy_bytes((large - 1000, 1, 1))}, compression)
        patch_sizes(path, whole=large)
        with pytest.raises(ValueError, match=r"a\.npz .*array 'images': .*needs 4,294,965,296 bytes, but"):
            load_arrays(path)
        patch_sizes(path, whole=large, packed=large)
        with pytest.raises(ValueError, match=r"a\.npz .*its arrays are larger than the file"):
            load_arrays(path)


def test_members_that_are_no_arrays_are_refused(tmp_path):
    path, images = tmp_path / "a.npz", npy_bytes((1, 2, 2), content=bytes(4))
    write_archive(path, {"images.npy": images, "notes.txt": b"hello"})
    with pytest.raises(ValueError, match=r"a\.npz .*array 'notes\.txt': not an \.npy array"):
        load_arrays(path)
    write_archive(path, {"images.npy": images}, zipfile.ZIP_BZIP2)
    with pytest.raises(ValueError, match=r"a\.npz .*array 'images': compressed by another method"):
        load_arrays(path)
    write_archive(path, {"images": images})  # the name need not say that it is one
    assert load_arrays(path)["images"].shape == (1, 2, 2)


def test_nothing_in_a_file_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    np.savez(tmp_path / "a.npz", images=np.array([Evil()], object))
    with pytest.raises(ValueError, match=r"a\.npz .*array 'images': holds Python objects"):
        list_labeled(tmp_path / "a.npz")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_every_layout_come_back_as_they_were_saved(tmp_path, save):
    random = np.random.default_rng(0)
    saved = {
        "images": random.integers(0, 256, (5, 4, 3, 3), dtype=np.uint8),
        "columns_first": np.asfortranarray(random.random((6, 4))),
        "zeros": np.zeros((1000, 1000), np.uint8),  # expands a thousandfold
        "empty": np.zeros((0, 4), np.int64),
        "one": np.array(3.5),
        "names": np.array(["späße", ""]),
    }
    save(tmp_path / "a.npz", **saved)
    found = load_arrays(tmp_path / "a.npz")
    assert list(found) == list(saved)
    for name, array in saved.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def test_a_saved_dataset_is_a_source(tmp_path):
    dataset(out=2).save_to_disk(tmp_path / "saved")
    listing = list_labeled(tmp_path / "saved")
    assert listing.labels == NAMES * 3 + (None, None)
    np.testing.assert_array_equal(read_square(listing.images[5], 12)[:, :, 0], arrays(out=2)[0][5])
    assert len(list_unlabeled(tmp_path / "saved").images) == 11
    plain = dataset().remove_columns("kind")
    plain.save_to_disk(tmp_path / "plain")
    with pytest.raises(ValueError, match="has no label"):
        list_labeled(tmp_path / "plain")
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(tmp_path / "text")
    with pytest.raises(ValueError, match="has no column of images; it has text"):
        list_unlabeled(tmp_path / "text")


def test_splits_of_a_saved_dataset_are_named(tmp_path):
    datasets.DatasetDict({"train": dataset(), "test": dataset(seed=1)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"holds several splits; name one of them: .*\(test, train\)"):
        list_labeled(tmp_path / "saved")
    assert len(list_labeled(tmp_path / "saved" / "train").images) == 9


def test_without_datasets_the_extra_is_named(tmp_path, monkeypatch):
    dataset().save_to_disk(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'ropaws\[huggingface\]'"):
        list_labeled(tmp_path / "saved")


def test_train_and_predict_on_arrays_and_datasets(tmp_path, capsys):
    images, labels = arrays()
    np.savez(tmp_path / "labeled.npz", images=images, labels=labels, class_names=np.array(NAMES))
    np.savez(tmp_path / "pool.npz", images=arrays(12, seed=1, out=6)[0])
    dataset(6, seed=2).save_to_disk(tmp_path / "more")
    main(["train", "--labeled", str(tmp_path / "labeled.npz"),
          "--unlabeled", str(tmp_path / "pool.npz"), str(tmp_path / "more"), "--train.steps", "5",
          "--test", str(tmp_path / "more"), "--no-report", "--out", str(tmp_path / "run")])  # fmt: skip
    facts = json.loads((tmp_path / "run" / "data.json").read_text())
    assert facts["class_names"] == sorted(NAMES)
    assert facts["labeled_names"][0].endswith("labeled.npz#2")
    main(["evaluate", str(tmp_path / "run")])
    out = tmp_path / "labels.csv"
    main(
        [
            "predict",
            str(tmp_path / "run"),
            str(tmp_path / "pool.npz"),
            str(tmp_path / "more"),
            "--out",
            str(out),
        ]
    )
    lines = out.read_text().splitlines()
    assert len(lines) == 1 + 18 + 6
    assert lines[1].startswith(f"{tmp_path / 'pool.npz'}#0,")
    assert len(ropaws.predict(tmp_path / "run", tmp_path / "pool.npz")) == 18
    with pytest.raises(SystemExit):
        main(["predict", str(tmp_path / "run"), str(tmp_path / "pool.npz"), "--out", str(out),
              "--copy-to", str(tmp_path / "sorted")])  # fmt: skip
    assert "pool.npz#0 is not a file of its own" in capsys.readouterr().err
    main(["check", "--labeled", str(tmp_path / "labeled.npz"), "--unlabeled", str(tmp_path / "more")])
    assert "12 px" in capsys.readouterr().out


def test_train_on_takes_what_is_in_memory(tmp_path):
    images, labels = arrays()
    run = ropaws.train_on(
        (images, [NAMES[label] for label in labels]),
        [arrays(20, seed=1, out=10)[0], dataset(6, seed=2)],
        test=dataset(6, seed=3),
        out=tmp_path / "run",
        budget="1s",
    )
    assert sorted(path.name for path in (run / "inputs").iterdir()) == [
        "labeled.npz", "test", "unlabeled-0.npz", "unlabeled-1",
    ]  # fmt: skip
    assert "accuracy" in ropaws.evaluate(run)
    ropaws.resume(run)
    (prediction,) = ropaws.predict(run, [images[0]])
    assert prediction.label in NAMES
    with pytest.raises(FileExistsError, match="holds a run already"):
        ropaws.train_on((images, labels), out=run)
    with pytest.raises(ValueError, match="labeled must be uint8"):
        ropaws.train_on((images / 255, labels), out=tmp_path / "other")


def test_train_on_takes_paths(tmp_path):
    images, labels = arrays()
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = Path(tmp_path / "labeled" / NAMES[label])
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i}.png")
    run = ropaws.train_on(tmp_path / "labeled", out=tmp_path / "run", budget="1s", backbone="small-8")
    assert json.loads((run / "config.json").read_text())["model"]["backbone"] == "small-8"
    assert not (run / "inputs").exists()


def test_a_script_without_a_main_guard_trains_once(tmp_path):
    """Worker processes must not run the script again."""
    images, labels = arrays(90)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = tmp_path / "labeled" / NAMES[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i}.png")
    script = tmp_path / "script.py"
    script.write_text(
        "import ropaws\n"
        f"print('started')\n"
        f"run = ropaws.train_on({str(tmp_path / 'labeled')!r}, out={str(tmp_path / 'run')!r}, budget=1,"
        " backbone='small-8')\n"
        "print(len(ropaws.predict(run, "
        f"{str(tmp_path / 'labeled')!r})))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["started", "90"]


def test_a_single_pool_need_not_be_in_a_list(tmp_path):
    images, labels = arrays()
    run = ropaws.train_on((images, labels), arrays(20, seed=1)[0], out=tmp_path / "run", budget=0.5)
    assert [path.name for path in sorted((run / "inputs").iterdir())] == ["labeled.npz", "unlabeled-0.npz"]
    assert json.loads((run / "config.json").read_text())["augment"]["size"] == 96  # the least, for 12 px
