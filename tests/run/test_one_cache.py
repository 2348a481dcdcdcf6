"""An image goes through the network once for each view, whatever commands ask, in whatever order."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from ropaws import Run, embed, train_on
from ropaws.cli.main import main
from ropaws.embedding.backbones import BACKBONES, ModelConfig, build_encoder
from ropaws.embedding.convnets import SmallConvNet
from tests.photos import make_photos


@pytest.fixture
def passes(monkeypatch):
    """Views that went through the backbone, padding included."""
    seen = []
    forward = SmallConvNet.forward

    def counted(self, images):
        seen.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(SmallConvNet, "forward", counted)
    return seen


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    encoder = build_encoder(ModelConfig(backbone="small"), channels=3)
    torch.save(encoder.backbone.state_dict(), tmp_path / "small.pth")
    return make_photos(tmp_path), tmp_path


def trained(photos, out):
    return train_on(
        photos / "labeled",
        photos / "pool",
        out=out,
        test=photos / "test",
        backbone="small",
        init=out.parent / "small.pth",
        device="cpu",
    )


def test_after_training_no_command_runs_the_network_again(place, passes, tmp_path):
    photos, _ = place
    run = trained(photos, tmp_path / "run")
    assert passes
    Run(run).evaluate()
    passes.clear()
    for arguments in (
        ["predict", run, photos / "pool", "--out", tmp_path / "labels.csv"],
        ["predict", run, photos / "pool", "--out", tmp_path / "spread.csv", "--propagate"],
        ["predict", run, photos / "test", "--out", tmp_path / "tests.csv"],
        ["suggest", run, "--n", "5"],
        ["discover", run],
        ["discover", run, photos / "pool", "--out", tmp_path / "groups", "--groups", "2", "--threshold", "1"],
        ["discover", run, "--out", tmp_path / "groups", "--accept", "1=noise"],
        ["evaluate", run],
    ):
        main([str(argument) for argument in arguments])
        assert not passes, arguments


def test_ten_new_files_are_ten_more(place, passes, tmp_path):
    photos, _ = place
    run = trained(photos, tmp_path / "run")
    random = np.random.default_rng(0)
    for number in range(10):
        pixels = random.integers(0, 255, (40, 36, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / "pool" / f"new-{number}.png")
    passes.clear()
    main(["predict", str(run), str(photos / "pool"), "--out", str(tmp_path / "labels.csv")])
    assert sum(passes) == 16  # ten views, filled up to a chunk of 16
    passes.clear()
    main(["predict", str(run), str(photos / "pool"), "--out", str(tmp_path / "again.csv")])
    assert not passes
    assert (tmp_path / "labels.csv").read_text() == (tmp_path / "again.csv").read_text()


def test_a_pool_that_was_embedded_needs_no_pass_for_training(place, passes, tmp_path):
    photos, _ = place
    found = embed(
        photos / "pool",
        labeled=photos / "labeled",
        backbone="small",
        init=tmp_path / "small.pth",
        device="cpu",
    )
    assert len(found) == 45
    passes.clear()
    trained(photos, tmp_path / "run")
    assert sum(passes) <= 32  # the test images


def test_after_training_embedding_and_exploring_compute_nothing(place, passes, tmp_path):
    """With other numbers of random views: the center view is the same."""
    photos, _ = place
    trained(photos, tmp_path / "run")
    passes.clear()
    network = {"backbone": "small", "init": tmp_path / "small.pth", "device": "cpu"}
    found = embed(photos / "pool", labeled=photos / "labeled", views=0, **network)
    assert len(found) == 45
    assert not passes
    fresh = embed(photos / "pool", labeled=photos / "labeled", views=0, cache=tmp_path / "another", **network)
    np.testing.assert_array_equal(found.features, fresh.features)
    assert passes


def test_copies_and_moved_files_are_known_by_their_content(place, passes, tmp_path):
    photos, _ = place
    run = trained(photos, tmp_path / "run")
    shutil.copytree(photos / "pool", tmp_path / "elsewhere")
    passes.clear()
    here, there = (Run(run).predict(folder) for folder in (photos / "pool", tmp_path / "elsewhere"))
    assert not passes
    assert [p.probabilities for p in here] == [p.probabilities for p in there]


def test_an_unreadable_file_alone_is_listed(place, tmp_path):
    photos, _ = place
    run = trained(photos, tmp_path / "run")
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "broken.png").write_bytes(b"not an image")
    main(["predict", str(run), str(bad), "--out", str(tmp_path / "labels.csv")])
    assert (tmp_path / "labels.csv").read_text().count("\n") <= 1


def test_the_cache_is_shown_and_cleared_and_nothing_else_is(place, passes, tmp_path, capsys, monkeypatch):
    photos, _ = place
    folder = tmp_path / "elsewhere"
    monkeypatch.setenv("ROPAWS_CACHE", str(folder))
    run = trained(photos, tmp_path / "run")
    (folder / "notes.txt").write_text("mine")
    capsys.readouterr()
    main(["cache"])
    shown = capsys.readouterr().out
    assert str(folder) in shown
    assert ": 0 files" not in shown
    main(["cache", "--clear"])
    assert "removed" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    passes.clear()
    main(["predict", str(run), str(photos / "pool"), "--out", str(tmp_path / "labels.csv")])
    assert sum(passes) == 48  # 36 images in chunks of 16


def test_the_backbone_of_these_tests_is_one_of_ours():
    assert isinstance(BACKBONES["small"](3), SmallConvNet)
