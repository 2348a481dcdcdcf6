"""`ropaws train` on a person's images and features."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import ropaws
from ropaws import Run
from ropaws.cli.main import main
from ropaws.methods import PAWS, RoPAWS
from ropaws.pool import decoding, listing
from ropaws.run.results import read_evaluation
from tests import tiny
from tests.photos import fails

FAST = ("--augment.size", "32", "--model.frozen-views", "1")  # of the real backbone


def counted(monkeypatch, place, name, calls):
    """Count the calls of a function by the first argument."""
    real = getattr(place, name)

    def count(first, *args, **kwargs):
        calls[str(first)] += 1
        return real(first, *args, **kwargs)

    monkeypatch.setattr(place, name, count)


def test_images_are_listed_once_and_a_second_training_decodes_none_of_the_pool(photos, monkeypatch, capsys):
    lists, walks, decoded = Counter(), Counter(), Counter()
    for name in ("list_labeled", "list_unlabeled"):
        counted(monkeypatch, listing, name, lists)
    counted(monkeypatch, listing, "walk_images", walks)
    counted(monkeypatch, decoding, "read_image", decoded)
    command = ["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(photos / "pool"),
               "--test", str(photos / "test"), "--train.steps", "2", "--data.workers", "1",
               *FAST]  # fmt: skip
    main([*command, "--out", str(photos / "run")])
    assert "Written" in capsys.readouterr().out
    assert (photos / "run" / "report.html").exists()
    assert set(lists.values()) == {1}, lists
    assert set(walks.values()) == {1}, walks
    images = sorted(map(str, photos.glob("[lpt]*/**/*.png")))
    assert len(images) == 9 + 36 + 18
    assert set(decoded) == set(images)
    assert max(decoded.values()) <= 3  # labeled and test images: first, whether they can be read
    pool = [name for name in images if "/pool/" in name]
    assert max(decoded[name] for name in pool) <= 2  # for the network, and for the report if it shows them
    decoded.clear()
    main([*command, "--out", str(photos / "again"), "--no-report"])
    assert not set(decoded) & set(pool)
    assert not (photos / "again" / "report.html").exists()


def own(photos, *arguments):
    return ["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(photos / "pool"),
            "--test", str(photos / "test"), *FAST, *map(str, arguments)]  # fmt: skip


def test_own_photographs_train_on_pretrained_features(photos, capsys):
    run = photos / "run"
    main(own(photos, "--out", run, "--train.steps", "20", "--data.feature-cache", photos / "cache"))
    said = capsys.readouterr()
    assert "backbone efficientnet-lite0: the best at hand" in said.err
    assert Run(run).config.model.frozen
    assert "Computing features of 45 images in 2 views" in said.err
    assert read_evaluation(run)["accuracy"] > 0.8
    main(["predict", str(run), str(photos / "pool"), "--out", str(photos / "labels.csv")])
    assert (photos / "labels.csv").read_text().count("\n") == 37
    main(["compare", str(run), "--out", str(photos / "compared.html")])
    assert "seconds" in (run / "metrics.jsonl").read_text()


def test_a_budget_is_no_reason_to_train_a_head_for_longer(photos, capsys):
    main(own(photos, "--out", photos / "run", "--budget", "30m", "--no-report"))
    assert "300 steps of 22: a head on frozen features needs no more" in " ".join(
        capsys.readouterr().err.split()
    )
    assert json.loads((photos / "run/config.json").read_text())["train"]["steps"] == 300


def test_the_whole_network_follows_and_an_interrupted_start_goes_on(photos, capsys, monkeypatch):
    run = photos / "run"
    command = own(photos, "--out", run, "--train-backbone", "--train.steps", "2", "--train.batch", "8",
                  "--augment.small-size", "32", "--no-report")  # fmt: skip
    main(command)
    capsys.readouterr()
    first, whole = (json.loads((place / "config.json").read_text()) for place in (run / "frozen", run))
    assert first["model"]["frozen"]
    assert not whole["model"]["frozen"]
    assert whole["model"]["init"] == "./frozen/model.safetensors"
    assert Run(run).facts.normalize == Run(run / "frozen").facts.normalize
    assert Run(run).evaluate(["soft-nn"])["accuracy"] >= 0
    for path in run.iterdir():
        if path.is_file():
            path.unlink()  # as if it had been killed after the head
    main(command)
    assert (run / "model.safetensors").exists()
    (run / "config.json").unlink()
    assert "was made with other settings" in fails(capsys, *command, "--train.seed", "1")


@pytest.fixture
def features(tmp_path):
    """Three blobs in eight dimensions, and noise."""
    random = np.random.default_rng(0)
    truth = np.arange(120) % 4 - 1
    rows = random.normal(size=(120, 8)) + 4 * np.eye(8)[truth] * (truth >= 0)[:, None]
    labels = np.where(np.arange(120) < 16, truth, -1)
    names = np.array([f"row {i}" for i in range(120)])
    path = tmp_path / "features.npz"
    np.savez(path, features=rows, labels=labels, names=names, test_features=rows[60:], test_labels=truth[60:])
    return path


def test_features_of_ones_own_go_all_the_way(features, tmp_path, capsys):
    run = tmp_path / "run"
    main(["train", "--features", str(features), "--out", str(run), "--train.steps", "30"])
    assert "No report" not in capsys.readouterr().err
    page = (run / "report.html").read_text()
    assert "<html" in page
    assert "data:image" not in page
    trained = Run(run)
    assert trained.facts.feature_dims == 8
    assert trained.evaluate()["accuracy"] > 0.8
    rows = np.load(features)["features"]
    np.save(tmp_path / "rows.npy", rows[:5])
    main(["predict", str(run), str(tmp_path / "rows.npy"), "--out", str(tmp_path / "labels.csv")])
    assert f"{tmp_path / 'rows.npy'}#4" in (tmp_path / "labels.csv").read_text()
    assert len(ropaws.predict(run, features, propagate=True)) == 120
    assert [p.nearest_class for p in ropaws.predict(run, rows[:3])] == [
        p.nearest_class for p in ropaws.predict(run, features)[:3]
    ]
    assert ropaws.suggest(run, n=1)[0]["name"].startswith("row ")
    assert ropaws.finetune(run, rates=(0.1,), epochs=(1,))["accuracy"] >= 0
    ropaws.resume(run)


def test_bad_features_and_options_that_do_not_fit_get_one_line(features, photos, tmp_path, capsys):
    train = ("train", "--features", features, "--out", tmp_path / "run")
    assert "leave --labeled" in fails(capsys, *train, "--labeled", photos / "labeled")
    assert "leave --labeled" in fails(capsys, *train, "--backbone", "small")
    assert "no data file at" in fails(capsys, "train", "--features", tmp_path / "no.npz", "--out", "x")
    assert "goes with --labeled" in fails(capsys, "train", "--recipe", "demo", "--train-backbone")
    main([*map(str, train), "--train.steps", "2", "--no-report"])
    capsys.readouterr()
    predict = ("predict", tmp_path / "run", "--out", tmp_path / "l.csv")
    np.save(tmp_path / "wide.npy", np.zeros((2, 9)))
    np.save(tmp_path / "nan.npy", np.full((2, 8), np.nan))
    assert "takes features of 8 dimensions, got 9" in fails(capsys, *predict, tmp_path / "wide.npy")
    assert "row 0 is not finite" in fails(capsys, *predict, tmp_path / "nan.npy")
    assert "was trained on features of 8 dimensions" in fails(capsys, *predict, photos / "pool")
    assert "one file of features at a time" in fails(capsys, *predict, features, features)
    with np.load(features) as arrays:
        changed = dict(arrays)
    changed["features"] = changed["features"] + 1
    np.savez(features, **changed)
    assert "the training images of" in fails(capsys, "train", "--resume", tmp_path / "run")


def test_class_frequencies_are_an_option(photos, capsys):
    arguments = ["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(photos / "pool"),
                 "--train.steps", "2", "--no-report", *FAST]  # fmt: skip
    main([*arguments, "--out", str(photos / "given"), "--class-prior", "0.6,0.3,0.1"])
    run = Run(photos / "given")
    assert run.method.class_prior == (0.6, 0.3, 0.1)
    prior = ropaws.evaluate(run, only=["pool"])["pool"]["class_prior"]
    assert [part["estimate"] for part in prior.values()] == pytest.approx([0.6, 0.3, 0.1])
    capsys.readouterr()
    main(["evaluate", str(photos / "given"), "--only", "pool"])
    assert "Of these, by class:" in capsys.readouterr().out.replace("\n", " ")
    message = fails(capsys, *arguments, "--out", str(photos / "no"), "--class-prior", "0.6,0.3")
    assert "--class-prior must sum to 1, got 0.6, 0.3, which sum to 0.9" in message
    message = fails(capsys, *arguments, "--out", str(photos / "no"), "--class-prior", "0.6,0.4")
    assert "class_prior must have one frequency per class, 3, got 2" in message
    message = fails(capsys, *arguments, "--method", "fixmatch", "--class-prior", "auto")
    assert "--class-prior goes with ropaws and paws; fixmatch has none" in message


def test_a_network_from_scratch_is_drawn_to_the_frequencies(tmp_path):
    """The paper's prior has no density to estimate frequencies from; labels and given ones need none."""
    config = tiny.config(tiny.write_data(tmp_path / "data.npz"))
    for choice, expected in (("labels", [1 / 3] * 3), ((0.7, 0.2, 0.1), [0.7, 0.2, 0.1])):
        for method in (PAWS(class_prior=choice), RoPAWS(class_prior=choice)):
            run = Run(
                ropaws.train(replace(config, method=method), tmp_path / f"{type(method).__name__}{choice}")
            )
            assert run.model.get_buffer("class_prior").tolist() == pytest.approx(expected, abs=1e-6)
