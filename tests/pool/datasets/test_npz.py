"""A corpus in one .npz file, and what is said of a wrong one."""

import numpy as np
import pytest

from ropaws.pool.datasets.archives import read_npz
from ropaws.pool.sources import DataConfig, load_corpus
from tests.pool.files.test_rows import npy_bytes, write_archive


def write_npz(path, **changes):
    random = np.random.default_rng(0)
    arrays = {
        "train_images": random.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8),
        "train_labels": np.array([0, 1, -1, 0, 1, -1]),
        "test_images": random.integers(0, 256, (3, 8, 8, 3), dtype=np.uint8),
        "test_labels": np.array([0, 1, -1]),
        "class_names": np.array(["cat", "dog"]),
        **changes,
    }
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return arrays


def test_npz_becomes_a_corpus(tmp_path):
    arrays = write_npz(tmp_path / "a.npz")
    corpus = read_npz(tmp_path / "a.npz")
    assert corpus.class_names == ("cat", "dog")
    assert corpus.train_images.shape == (6, 3, 8, 8)
    np.testing.assert_array_equal(corpus.train_images[2].permute(1, 2, 0).numpy(), arrays["train_images"][2])
    assert corpus.test_labels.tolist() == [0, 1, -2]


def test_npz_may_leave_tests_and_names_out(tmp_path):
    write_npz(tmp_path / "a.npz", test_images=None, test_labels=None, class_names=None)
    corpus = read_npz(tmp_path / "a.npz")
    assert len(corpus.test_images) == 0
    assert corpus.class_names == ("0", "1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_labels": None}, "has no array 'train_labels'"),
        ({"train_images": np.zeros((6, 8, 8, 3))}, "train_images must be uint8"),
        ({"train_images": np.zeros((6, 8, 8, 2), np.uint8)}, r"\(n, h, w, 1 or 3\)"),
        ({"train_labels": np.zeros(5, int)}, "one for each of 6 images"),
        ({"train_labels": np.full(6, -2)}, "at least -1"),
        ({"test_images": np.zeros((3, 8, 8), np.uint8)}, "must have the same channels, got 3 and 1"),
        ({"test_labels": np.zeros(3)}, "test_labels must be whole numbers"),
        ({"class_names": np.array(["cat"])}, "class_names has 1 names, but labels go up to 1"),
        ({"class_names": np.array("cat")}, r"class_names must be a list .*got shape \(\)"),
        ({"class_names": np.array([["cat", "dog"]])}, r"class_names must be a list .*got shape \(1, 2\)"),
        ({"class_names": np.arange(100_001)}, r"at most 100,000 names, got shape \(100001,\)"),
        ({"train_labels": np.full(6, 10**12), "class_names": None}, "labels must be below 100,000, got"),
        ({"train_labels": np.full(6, 100_000)}, "labels must be below 100,000, got 100,000"),
        ({"train_images": np.zeros((6, 0, 8), np.uint8)}, r"of shape \(n, h, w\) .*got uint8 \(6, 0, 8\)"),
    ],
)
def test_a_wrong_npz_says_what_is_wrong(tmp_path, changes, words):
    write_npz(tmp_path / "a.npz", **changes)
    with pytest.raises(ValueError, match=words):
        read_npz(tmp_path / "a.npz")


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data file at .*b\.npz"):
        load_corpus(DataConfig(source=str(tmp_path / "b.npz")))
    for content in (b"", b"not a zip", b"PK\x03\x04 cut off"):
        (tmp_path / "b.npz").write_bytes(content)
        with pytest.raises(ValueError, match="not a readable"):
            load_corpus(DataConfig(source=str(tmp_path / "b.npz")))
    np.savez_compressed(tmp_path / "b.npz", train_images=np.random.default_rng(0).bytes(4000))
    content = bytearray((tmp_path / "b.npz").read_bytes())
    content[200:400] = bytes(200)  # a damaged deflate stream
    (tmp_path / "b.npz").write_bytes(content)
    with pytest.raises(ValueError, match="not a readable"):
        read_npz(tmp_path / "b.npz")
    with (tmp_path / "b.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match="not a readable"):
        read_npz(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", train_images=np.array([object()]), train_labels=np.zeros(1, int))
    with pytest.raises(ValueError, match="not a readable"):  # pickled arrays are not executed
        read_npz(tmp_path / "c.npz")


def test_an_array_beyond_memory_and_one_of_nothing_are_refused(tmp_path):
    """A header of a hundred bytes may claim a terabyte, or a trillion images without pixels."""
    path = tmp_path / "a.npz"
    for shape, words in (
        (
            (10**6, 1000, 1000),
            r"a\.npz is not a readable .*array 'train_images': .*needs 1,000,000,000,000 bytes",
        ),
        ((10**12, 0, 8), r"a\.npz: train_images must be uint8 of shape"),
    ):
        write_archive(
            path, {"train_images.npy": npy_bytes(shape), "train_labels.npy": npy_bytes((0,), "<i8")}
        )
        with pytest.raises(ValueError, match=words):
            read_npz(path)
