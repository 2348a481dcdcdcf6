"""Features of images in an .npz, in Python and on the command line."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import ropaws
from ropaws.cli.main import main
from ropaws.embedding import convnets as lite
from ropaws.embedding import embedder as embedding
from ropaws.embedding import frozen_features
from ropaws.pool.augment import center_view
from ropaws.pool.corpus import ImageStack
from ropaws.pool.decoding import read_square
from ropaws.run.own_data import fit_settings
from tests.photos import fails, make_photos, save

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("embed"))


@pytest.fixture
def quick(weights, tmp_path):
    return {"init": weights, "size": 16, "views": 2, "cache": tmp_path / "cache", "console": QUIET}


def command(photos, weights, tmp_path, *more):
    main(["embed", str(photos / "pool"), "--labeled", str(photos / "labeled"), "--out",
          str(tmp_path / "f.npz"), "--init", str(weights), "--size", "16", "--views", "2",
          "--cache", str(tmp_path / "cache"), *map(str, more)])  # fmt: skip
    with np.load(tmp_path / "f.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def test_the_file_has_features_views_labels_and_names(photos, weights, tmp_path, capsys):
    arrays = command(photos, weights, tmp_path, "--test", photos / "test")
    assert arrays["features"].shape == (45, 96)
    assert arrays["views"].shape == (45, 2, 96)
    assert arrays["features"].dtype == arrays["views"].dtype == np.float16
    assert arrays["labels"].tolist() == ["block"] * 3 + ["columns"] * 3 + ["rows"] * 3 + [""] * 36
    assert arrays["names"][0] == str(photos / "labeled/block/0.png")
    assert sorted(arrays["names"][9:]) == sorted(map(str, (photos / "pool").iterdir()))
    assert arrays["test_features"].shape == (18, 96)
    assert "test_views" not in arrays
    assert set(arrays["test_labels"]) == {"block", "columns", "noise", "rows"}
    facts = json.loads(str(arrays["facts"]))
    assert (facts["backbone"], facts["size"], facts["views"]) == ("small", 16, 2)
    assert json.loads((tmp_path / "f.npz.json").read_text())["unreadable"] == []
    assert "96 features of 45 images and 18 test images by small" in capsys.readouterr().out


def test_random_views_differ_from_the_center_view_and_from_each_other(photos, quick):
    found = ropaws.embed(photos / "pool", **quick)
    first, second = found.views[:, 0], found.views[:, 1]
    for one, other in ((first, second), (first, found.features)):
        assert (np.abs(one - other).max(axis=1) > 1e-3).mean() > 0.9


@torch.no_grad()
def test_the_features_are_those_of_the_center_view(photos, tmp_path, monkeypatch):
    """Computed a second time, without batches, cache and folded norms.

    In bf16, where the CPU is fast at it, they would differ in the third digit.
    """
    monkeypatch.setattr("ropaws.embedding.embedder.choose_precision", lambda *_: "fp32")
    names = [photos / "labeled/rows/0.png", photos / "pool/noise-3.png"]
    found = ropaws.embed(names, size=64, views=0, cache=tmp_path / "cache", console=QUIET)
    assert found.views is None
    assert found.names == tuple(map(str, names))
    network = lite.EfficientNetLite0()
    network.load_state_dict(lite.pretrained_weights())
    squares = np.stack([read_square(name, round(64 * 8 / 7)) for name in names])
    images = torch.from_numpy(squares).permute(0, 3, 1, 2)
    expected = network.eval()(center_view(images, 64, lite.NORMALIZATION, "bicubic"))
    torch.testing.assert_close(torch.from_numpy(found.features), expected, rtol=1e-3, atol=2e-3)


def test_a_second_call_computes_nothing(photos, weights, tmp_path, capsys):
    first = command(photos, weights, tmp_path)
    assert "Computing features of 45 images" in capsys.readouterr().err
    again = command(photos, weights, tmp_path)
    assert "Computing" not in capsys.readouterr().err
    assert all(np.array_equal(first[name], again[name]) for name in first)


def test_blocks_do_not_change_the_file(photos, weights, quick, tmp_path, monkeypatch):
    whole = command(photos, weights, tmp_path)
    monkeypatch.setattr(embedding, "BLOCK", 7)
    parts = command(photos, weights, tmp_path)
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    found = ropaws.embed(photos / "pool", labeled=photos / "labeled", **quick)
    assert np.array_equal(found.features, whole["features"])
    assert np.array_equal(found.views, whole["views"])


def test_a_network_that_is_there_embeds_as_its_embedder_does(photos, quick, tmp_path):
    pool = ropaws.Pool.open(photos / "pool")
    first = ropaws.Embedder("small", **quick)
    expected = first.embed(pool)
    again = ropaws.Embedder(first.embedding(pool), cache=tmp_path / "other", console=QUIET).embed(pool)
    np.testing.assert_array_equal(again.features, expected.features)
    assert again.facts == expected.facts | {"init": None}


def test_images_that_come_in_small_parts_open_the_cache_once(photos, quick, monkeypatch):
    """A million come 512 at a time: to open a cache takes time by what is in it."""
    pool = ropaws.Pool.open(photos / "pool")
    whole = (
        ropaws.Embedder("small", **quick).embed(pool).features
    )  # with random views, which others take over
    opened = []
    make = frozen_features.FeatureStore
    monkeypatch.setattr(
        frozen_features, "FeatureStore", lambda *given: opened.append(given[1]) or make(*given)
    )
    digests = []
    embedder = ropaws.Embedder("small", **quick | {"views": 0})
    encoder = embedder.embedding(pool).encoder
    read = encoder.backbone_digest
    monkeypatch.setattr(type(encoder), "backbone_digest", lambda _: digests.append(1) or read())
    parts = [
        embedder.features(ImageStack(pool.images[start : start + 5], embedder.embedding(pool).image_size))
        for start in range(0, len(pool), 5)
    ]
    np.testing.assert_array_equal(torch.cat([part.features[:] for part in parts]), whole)
    assert len(opened) == 1
    assert len(digests) <= 1


def test_unreadable_images_are_listed_and_left_out(photos, weights, tmp_path, capsys):
    copied = shutil.copytree(photos, tmp_path / "photos")
    (copied / "pool/bad.png").write_bytes(b"nothing")
    arrays = command(copied, weights, tmp_path)
    assert "Left out: 1 unreadable image, listed" in capsys.readouterr().err
    assert len(arrays["features"]) == len(arrays["names"]) == 45
    assert not any("bad.png" in name for name in arrays["names"])
    ((name, reason),) = json.loads((tmp_path / "f.npz.json").read_text())["unreadable"]
    assert name.endswith("bad.png")
    assert reason.startswith("not an image; the formats that are read are JPEG, PNG")
    sound = ropaws.embed(
        photos / "pool", labeled=photos / "labeled", init=weights, size=16, views=2,
        cache=tmp_path / "other", console=QUIET,
    )  # fmt: skip
    of_sound = dict(
        zip([name.removeprefix(str(photos)) for name in sound.names], sound.features, strict=True)
    )
    for name, row in zip(arrays["names"], arrays["features"], strict=True):
        # The weights of a file take the normalization of the images, which are not quite the same here.
        np.testing.assert_allclose(row, of_sound[name.removeprefix(str(copied))], rtol=0, atol=0.02)


def test_test_images_get_the_same_normalization(photos, weights, tmp_path):
    """An image that is tested on and trained on has the same features, whatever the others are."""
    arrays = command(photos, weights, tmp_path, "--test", photos / "test")
    bright = tmp_path / "bright/rows"
    bright.mkdir(parents=True)
    Image.new("RGB", (36, 36), "white").save(bright / "white.png")
    shutil.copy(photos / "labeled/rows/0.png", bright / "a.png")
    again = command(photos, weights, tmp_path, "--test", bright.parent)
    rows = arrays["names"].tolist().index(str(photos / "labeled/rows/0.png"))
    copied = again["test_names"].tolist().index(str(bright / "a.png"))
    np.testing.assert_allclose(again["test_features"][copied], arrays["features"][rows], rtol=0, atol=1e-3)


def test_arrays_and_tables_are_sources_too(weights, quick, tmp_path):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (5, 20, 20), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.array(["a", "b", "", "a", "b"]))
    save(tmp_path / "one.png", 0, random)
    (tmp_path / "table.csv").write_text("path,label\none.png,c\n")
    found = ropaws.embed(labeled=[tmp_path / "own.npz", tmp_path / "table.csv"], **quick)
    assert found.labels == ("a", "b", "", "a", "b", "c")
    pool = ropaws.embed([tmp_path / "own.npz", tmp_path / "table.csv"], **quick)
    assert set(pool.labels) == {""}
    assert np.array_equal(pool.features, found.features)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pool", "--out", "f.npy"], "--out must end in .npz, got f.npy"),
        (["pool", "--out", "none/f.npz"], "--out: no folder none; create it first"),
        (["--out", "f.npz"], "name the images to embed"),
        (["nowhere", "--out", "f.npz"], "no folder or table at nowhere"),
        (["pool", "--out", "f.npz", "--size", "4"], "size must be from 8 to 3584 pixels, got 4"),
        (["pool", "--out", "f.npz", "--views", "99"], "views must be from 0 to 64, got 99"),
        (["pool", "--out", "f.npz", "--backbone", "resnet50"], "model.init=pretrained goes with"),
        (["pool", "--out", "f.npz", "--init", "w.pth"], "w.pth"),
        (["--labeled", "pool", "--out", "f.npz"], "has no folder in it; it needs one for each class"),
    ],
)
def test_bad_arguments_are_one_line(photos, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(photos)
    assert words in fails(capsys, "embed", *arguments)
    assert not (photos / "f.npz").exists()


def test_the_size_is_that_of_a_run_on_these_images(photos, weights, tmp_path):
    for settings in ({"init": weights}, {"views": 0}):  # a network of one's own, and efficientnet-lite0
        found = ropaws.embed(labeled=photos / "labeled", cache=tmp_path, console=QUIET, **settings)
        choice = fit_settings(photos / "labeled", (), init=settings.get("init"))
        assert found.facts["size"] == choice.config.augment.size
        assert found.facts["interpolation"] == choice.config.augment.interpolation


def test_a_run_trains_on_the_file(photos, weights, tmp_path):
    command(photos, weights, tmp_path, "--test", photos / "test")
    run = tmp_path / "run"
    features = ("--features", str(tmp_path / "f.npz"))
    main(["train", *features, "--out", str(run), "--train.steps", "20", "--no-report"])
    assert ropaws.Run(run).class_names == ("block", "columns", "rows")
    assert ropaws.evaluate(run)["accuracy"] > 0.5


def test_a_full_disk_is_named_before_anything_is_written(photos, quick, tmp_path, monkeypatch):
    found = ropaws.embed(photos / "pool", **quick)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match="GB, but the disk has"):
        found.save(tmp_path / "f.npz")
    assert not (tmp_path / "f.npz").exists()


def test_an_interrupted_write_leaves_the_old_file(photos, quick, tmp_path, monkeypatch):
    found = ropaws.embed(photos / "pool", **quick)
    (tmp_path / "f.npz").write_text("old")

    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(found.rows), "views", lambda _self, index: stop(index))
    with pytest.raises(KeyboardInterrupt):
        found.save(tmp_path / "f.npz")
    assert (tmp_path / "f.npz").read_text() == "old"
    assert not list(tmp_path.glob(".f.npz*"))
