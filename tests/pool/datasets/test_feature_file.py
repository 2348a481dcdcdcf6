"""Features of a person's own in an .npz file."""

import numpy as np
import pytest
import torch

from ropaws.core.features import Features
from ropaws.pool.datasets.feature_file import is_feature_file, read_feature_table, read_features
from ropaws.pool.sources import DataConfig, load_corpus

FEATURES = np.random.default_rng(0).normal(size=(6, 4))
NUMBERS = np.array([2, -1, 10, -1, 2, 10])


def write(path, **arrays):
    np.savez(path, **{"features": FEATURES, "labels": NUMBERS, **arrays})
    return path


def test_numbers_are_classes_in_their_order_and_minus_one_is_none(tmp_path):
    corpus = load_corpus(DataConfig(source=str(write(tmp_path / "f.npz"))))
    assert corpus.class_names == ("2", "10")
    assert corpus.train_labels.tolist() == [0, -1, 1, -1, 0, 1]
    assert isinstance(corpus.train_images, Features)
    np.testing.assert_allclose(corpus.train_images[:], FEATURES.astype(np.float32))
    assert len(corpus.test_images) == 0


def test_names_views_and_test_rows(tmp_path):
    views = np.random.default_rng(1).normal(size=(6, 3, 4)).astype(np.float16)
    path = write(
        tmp_path / "f.npz",
        labels=np.array(["cat", "", "dog", "", "", "cat"]),
        views=views,
        names=np.array(list("abcdef")),
        test_features=FEATURES[:3],
        test_labels=np.array(["dog", "cow", ""]),
    )
    corpus = read_features(path)
    assert corpus.class_names == ("cat", "dog")
    assert corpus.train_labels.tolist() == [0, -1, 1, -1, -1, 0]
    assert corpus.test_labels.tolist() == [1, -2, -2]  # a class that training does not have is out-of-class
    assert corpus.train_names == tuple("abcdef")
    index = corpus.train_labels.nonzero().squeeze(1)
    np.testing.assert_array_equal(corpus.train_images.views(index), views[index.numpy()])


@pytest.mark.parametrize(
    ("scale", "kind"),
    [(1e30, "f4"), (1e-30, "f4"), (1e300, "f8"), (1e-300, "f8"), (1e-310, "f8"), (1, np.longdouble)],
)
def test_features_of_any_scale_keep_their_direction(tmp_path, scale, kind):
    """One row of the usual size stays as it is."""
    features, views = FEATURES * scale, np.stack([FEATURES, -FEATURES], axis=1) * scale
    features[2] = FEATURES[2]
    write(tmp_path / "f.npz", features=features.astype(kind), views=views.astype(kind))
    found = read_features(tmp_path / "f.npz").train_images
    kept = read_feature_table(tmp_path / "f.npz").features
    usual = torch.from_numpy(FEATURES)
    index = torch.arange(6)
    for rows in (found[index], kept[index], found.views(index)[:, 0], -found.views(index)[:, 1]):
        similarity = torch.nn.functional.cosine_similarity(rows.double(), usual)
        torch.testing.assert_close(similarity, torch.ones(6, dtype=torch.float64), atol=1e-5, rtol=0)
        lengths = rows.norm(dim=1)
        assert lengths.min() > 1e-6
        assert lengths.max() < 1e6
    np.testing.assert_array_equal(found[index][2], FEATURES[2].astype(kind).astype(np.float32))


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"features": FEATURES[0]}, r"features must be \(n, d\) of floats, got float64 \(4,\)"),
        ({"features": np.zeros((6, 4), int)}, "features must be .* got int64"),
        ({"features": np.where(FEATURES > 1, np.nan, FEATURES)}, "is not finite, of"),
        ({"labels": NUMBERS[:5]}, r"labels must be one for each of 6 rows, got \(5,\)"),
        ({"labels": np.full(6, -1)}, "labels has no label at all; a classifier needs two classes"),
        ({"labels": np.array([1, 1, -1, -1, -1, -1])}, "labels has the single class '1'"),
        ({"labels": np.zeros(6) + 0.5}, "a label is a name, a class number from 0, or -1"),
        ({"views": FEATURES}, r"views must be \(6, views, 4\) of floats"),
        ({"views": np.full((6, 2, 4), np.nan)}, "views: row 0 is not finite"),
        ({"names": np.array(["a"])}, "names must be one for each of 6 rows"),
        ({"test_features": FEATURES[:, :3]}, "test_features must have 4 dimensions as the others, got 3"),
        ({"test_features": FEATURES}, "test_labels must be one for each of 6 rows, got none"),
    ],
)
def test_bad_features_get_one_line(tmp_path, arrays, words):
    with pytest.raises(ValueError, match=words):
        read_features(write(tmp_path / "f.npz", **arrays))


def test_a_table_to_label_is_an_array_of_its_own_or_one_of_several(tmp_path):
    np.save(tmp_path / "f.npy", FEATURES)
    table = read_feature_table(tmp_path / "f.npy")
    assert len(table) == 6
    assert table.names[5] == f"{tmp_path / 'f.npy'}#5"
    named = write(tmp_path / "f.npz", names=np.array(list("abcdef")))
    assert read_feature_table(named).names == tuple("abcdef")
    assert is_feature_file(named)
    np.savez(tmp_path / "images.npz", images=np.zeros((2, 3, 3), np.uint8))
    assert not is_feature_file(tmp_path / "images.npz")
    (tmp_path / "bad.npy").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"bad\.npy is not a readable \.npy file"):
        read_feature_table(tmp_path / "bad.npy")
