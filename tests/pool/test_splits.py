"""Splits by number, fraction and file; and that no other label reaches training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ropaws
import ropaws.run.config
from ropaws.methods import make_method
from ropaws.pool.corpus import Corpus
from ropaws.pool.sources import DataConfig, choose_split, draw_split, read_split, write_split
from tests import tiny

LABELS = torch.tensor([0] * 40 + [1] * 20 + [2] * 5 + [-1] * 35)
NAMES = ("a", "b", "c")


def corpus(names=()):
    images = torch.zeros(len(LABELS), 1, 8, 8, dtype=torch.uint8)
    return Corpus(NAMES, images, LABELS, images[:0], LABELS[:0], tuple(names))


def test_a_fraction_keeps_the_proportions_and_at_least_one():
    split = draw_split(LABELS, NAMES, labels_per_class=25, fraction=0.1, seed=0)
    assert split.labels.bincount().tolist() == [4, 2, 1]
    assert torch.equal(split.labels, LABELS[split.indices])
    other = draw_split(LABELS, NAMES, labels_per_class=25, fraction=0.1, seed=1)
    assert not torch.equal(split.indices, other.indices)
    whole = draw_split(LABELS, NAMES, labels_per_class=None, fraction=1.0, seed=0)
    assert whole.labels.bincount().tolist() == [40, 20, 5]


def test_a_split_comes_back_from_its_file(tmp_path):
    split = draw_split(LABELS, NAMES, labels_per_class=3, seed=0)
    write_split(tmp_path / "split.txt", split)
    config = DataConfig(split=tmp_path / "split.txt", labels_per_class=1)  # the file wins
    again = choose_split(corpus(), config, seed=5)
    assert torch.equal(again.indices, split.indices)
    assert torch.equal(again.labels, split.labels)


def test_a_split_may_name_files(tmp_path):
    names = [f"/data/{'abcu'[label]}/{i}.png" for i, label in enumerate(LABELS.tolist())]
    names[1] = "/data/a/same.png"
    names[41] = "/data/b/same.png"
    path = tmp_path / "split.txt"
    path.write_text("# a comment\n\n2.png\n/data/b/50.png\nelsewhere/62.png\na/same.png\n")
    split = read_split(path, corpus(names))
    assert split.indices.tolist() == [2, 1, 50, 62]  # class by class
    path.write_text("same.png\n")
    with pytest.raises(ValueError, match=r"'same\.png' of .*: 2 training images have this name"):
        read_split(path, corpus(names))
    path.write_text("nowhere.png\n")
    with pytest.raises(ValueError, match=r"'nowhere\.png' of .*: no training image has this name"):
        read_split(path, corpus(names))
    with pytest.raises(ValueError, match="these images are not files"):
        read_split(path, corpus())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "names no image"),
        ("0\n40\n100\n", "names image 100, but there are 100"),
        ("0\n0\n40\n60\n", "names an image twice"),
        ("0\n40\n60\n99\n", "names 99, whose label is not known"),
        ("0\n40\n", "names no image of class 'c'"),
    ],
)
def test_a_wrong_split_file_says_what_is_wrong(tmp_path, content, words):
    (tmp_path / "split.txt").write_text(content)
    with pytest.raises(ValueError, match=words):
        read_split(tmp_path / "split.txt", corpus())


def test_settings_of_a_split_are_checked(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file at .*every run writes one"):
        read_split(tmp_path / "none.txt", corpus())
    for fraction in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"label_fraction must be above 0 and at most 1"):
            DataConfig(label_fraction=fraction)
    with pytest.raises(ValueError, match="cannot be combined"):
        DataConfig(label_fraction=0.1, split=tmp_path)


def test_a_run_can_use_the_split_of_another(tmp_path):
    data = tiny.write_data(tmp_path / "data.npz")
    first = ropaws.train(tiny.config(data, seed=1), tmp_path / "first")
    config = tiny.config(data, seed=2)
    config = replace(config, data=replace(config.data, split=first / "split.txt"))
    second = ropaws.train(config, tmp_path / "second")
    assert (first / "split.txt").read_text() == (second / "split.txt").read_text()
    fresh = ropaws.train(tiny.config(data, seed=2), tmp_path / "fresh")
    assert (fresh / "split.txt").read_text() != (second / "split.txt").read_text()


@pytest.mark.parametrize("method", ["supervised", "paws", "ropaws"])
def test_no_label_but_the_granted_ones_reaches_training(tmp_path, method):
    """All other labels are scrambled; with the same split, the trained weights are the same to the bit."""
    data = tiny.write_data(tmp_path / "data.npz")
    config = tiny.config(data)
    config = replace(config, method=make_method(method))
    first = ropaws.train(config, tmp_path / "first")
    granted = [int(line) for line in (first / "split.txt").read_text().splitlines()[1:]]
    arrays = dict(np.load(data))
    labels = arrays["train_labels"].copy()
    others = np.setdiff1d(np.arange(len(labels)), granted)
    labels[others] = np.random.default_rng(0).permutation(labels[others])
    assert (labels != arrays["train_labels"]).any()
    np.savez(tmp_path / "scrambled.npz", **{**arrays, "train_labels": labels})
    again = replace(config.data, source=str(tmp_path / "scrambled.npz"), split=first / "split.txt")
    second = ropaws.train(replace(config, data=again), tmp_path / "second")
    one, two = (load_file(run / "model.safetensors") for run in (first, second))
    assert all(torch.equal(one[name], two[name]) or one[name].isnan().all() for name in one)
