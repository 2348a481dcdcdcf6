"""A run beside plain classifiers on its own features, and the learning curve, on runs that take a second."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import ropaws
from ropaws import Run
from ropaws.cli.main import main
from ropaws.core.records import Share
from ropaws.run import evaluate as analysis
from tests import tiny


def train(folder, *, labels=5, tests=True):
    data = tiny.write_data(folder / "data.npz")
    if not tests:
        arrays = dict(np.load(data))
        np.savez(data, **arrays | {name: arrays[name][:0] for name in ("test_images", "test_labels")})
    config = tiny.config(data)
    config = replace(config, data=replace(config.data, labels_per_class=labels))
    return ropaws.train(config, folder / "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("features"))


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_figures_on_test_images_by_hand(run):
    """scikit-learn itself on the features, on the images of the run's own figures."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    found = ropaws.evaluate(run, only=["soft-nn", "features"])
    network, rivals = Run(run), found["features"]
    truth = network.corpus.test_labels
    labeled, tests = (
        F.normalize(network.features(images, rows).double(), dim=1)
        for images, rows in (
            (network.corpus.train_images, network.facts.split.indices),
            (network.corpus.test_images, torch.arange(len(truth))),
        )
    )
    mean = labeled.mean(dim=0)
    scale = (labeled - mean).square().sum(dim=1).mean().sqrt()
    model = LogisticRegression(C=10, max_iter=5000).fit((labeled - mean) / scale, network.support.labels)
    probs = model.predict_proba((tests - mean) / scale)
    known = (truth >= 0).numpy()
    assert rivals["on"] == "test"
    assert rivals["images"] == 15
    assert rivals["logistic"]["accuracy"] == pytest.approx(
        (probs.argmax(1)[known] == truth.numpy()[known]).mean()
    )
    assert rivals["logistic"]["auroc"] == pytest.approx(roc_auc_score(known, probs.max(1)), abs=0.05)
    for name in ("accuracy", "auroc"):
        assert rivals["own"][name] == pytest.approx(found[name])
    assert rivals["gain"] == pytest.approx(rivals["own"]["accuracy"] - rivals["logistic"]["accuracy"])
    assert found["learning_curve"]["test"]["labels_per_class"] == [1, 2, 4]
    assert found["learning_curve"]["held_out"]["labels_per_class"] == [1, 2, 4]


def test_labels_that_a_network_was_trained_on_give_no_accuracy(tmp_path, capsys):
    run = train(tmp_path, tests=False)
    found = ropaws.evaluate(run)
    assert "on" not in found["features"]
    assert "test" not in found["learning_curve"]
    assert found["learning_curve"]["held_out"]["labels_per_class"] == [1, 2, 4]
    main(["evaluate", str(run), "--only", "features"])
    assert "held out in turn" not in capsys.readouterr().out
    assert "correctly by the others" not in ropaws.Run(run).report().read_text()


@pytest.mark.parametrize(("labels", "tests"), [(1, True), (1, False), (2, False)])
def test_few_labels(tmp_path, labels, tests, capsys):
    run = train(tmp_path, labels=labels, tests=tests)
    found = ropaws.evaluate(run)
    assert "left out" not in capsys.readouterr().err
    assert found["learning_curve"] == {"least": 3}
    assert found["features"].get("on") == ("test" if tests else None)
    page = ropaws.Run(run).report().read_text()
    assert "needs at least 3 labels per class" in page
    assert ("there is nothing to compare on" in page) == (not tests)


def scaled(state, factor):
    return {name: value * factor if value.is_floating_point() else value for name, value in state.items()}


def test_figures_stay_with_their_model_and_need_its_images_once(run, monkeypatch, capsys):
    first = ropaws.evaluate(run)
    assert ropaws.evaluate(run) == first
    calls = []  # other parts, such as suggestions, look at the features each time
    real = Run.features
    monkeypatch.setattr(Run, "features", lambda *a: calls.append(a) or real(*a))
    assert ropaws.evaluate(run, only=["features"]) == first
    assert not calls
    state = load_file(run / "model.safetensors")
    # The figures of another model must not stay.
    save_file(scaled(state, 0.9), run / "model.safetensors")
    other = ropaws.evaluate(run, only=["features"])
    assert len(calls) == 2
    assert other["features"]["made_from"] != first["features"]["made_from"]
    save_file(scaled(state, 0.8), run / "model.safetensors")
    monkeypatch.setattr(Run, "features", lambda *a: 1 / 0)
    third = ropaws.evaluate(run)
    assert "features left out" in capsys.readouterr().err
    assert not {"features", "learning_curve"} & set(third)
    assert not {"features", "learning_curve"} & set(json.loads((run / "evaluation.json").read_text()))


def test_damaged_figures_are_computed_again(run):
    first = ropaws.evaluate(run, only=["features"])
    for damage in (None, [], {"made_from": 3}, "x"):
        (run / "evaluation.json").write_text(json.dumps({**first, "features": damage}))
        assert ropaws.evaluate(run, only=["features"]) == first


def test_many_labels_are_left_out_with_a_line(run, monkeypatch, capsys):
    monkeypatch.setattr(analysis, "MOST_LABELS", 14)
    found = ropaws.evaluate(run)
    assert "features left out: logistic regression on the features of 15 labels" in capsys.readouterr().err
    assert "features" not in found


def test_test_images_may_be_sampled(run, monkeypatch):
    monkeypatch.setattr(analysis, "TESTS", 8)
    found = ropaws.evaluate(run, only=["features"])["features"]
    assert 0 < found["images"] <= 8


@pytest.mark.parametrize("share", [Share(0.42, 0.1, 0.55), None])
def test_the_in_class_share_is_that_of_the_method(run, monkeypatch, share, capsys):
    monkeypatch.setattr(type(Run(run).method), "in_class_share", lambda self, model: share)
    found = ropaws.evaluate(run, only=["pool"])["pool"]
    assert found.get("in_class_share") == (share and {"estimate": 0.42, "low": 0.1, "high": 0.55})
    assert found.get("share_doubt") == (share and share.doubt)
    main(["evaluate", str(run), "--only", "pool"])
    line = f"About 42% (10 to 55%) of the pool belongs to your classes. {share and share.doubt}"
    assert (line in " ".join(capsys.readouterr().out.split())) == (share is not None)


def test_a_share_and_its_auroc_are_both_of_the_in_domain_probability(run, monkeypatch):
    """A method whose score ranks the other way: its AUROC says nothing of the in-domain probability."""
    method = type(Run(run).method)
    real = method.predict
    monkeypatch.setattr(method, "predict", lambda *a: (found := real(*a))._replace(score=-found.in_domain))
    found = ropaws.evaluate(run, only=["soft-nn"])
    assert found["in_domain_auroc"] == pytest.approx(1 - found["auroc"], abs=1e-6)
    assert found["in_domain_auroc"] != found["auroc"]


def test_the_command_shows_both_classifiers(run, capsys):
    main(["evaluate", str(run)])
    told = capsys.readouterr().out
    assert "logistic regression on the same features" in told
    assert "Logistic regression on the same features" in told
    assert "Going from 2 to 4 labels per class" in told


def test_a_run_on_features_is_compared_on_these_features(tmp_path):
    """Clusters far from the origin: the features themselves are in the figures, and have seen no label."""
    random = np.random.default_rng(0)
    truth = np.tile(np.arange(3), 40)
    rows = (np.eye(6)[truth] + 2 + 0.1 * random.standard_normal((120, 6))).astype(np.float32)
    labels = np.where(np.arange(120) < 15, truth, -1)[:90]
    np.savez(
        tmp_path / "f.npz", features=rows[:90], labels=labels, test_features=rows[90:], test_labels=truth[90:]
    )
    arguments = ["--features", str(tmp_path / "f.npz"), "--out", str(tmp_path / "run"), "--train.steps", "3"]
    main(["train", *arguments])
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert found["features"]["frozen"]
    assert found["features"]["dims"] == 6
    assert found["features"]["logistic"]["accuracy"] == 1
    assert found["learning_curve"]["held_out"]["labels_per_class"] == [1, 2, 4]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "what the head of this run gets from its backbone: 6 numbers" in page
    assert "<img" not in page.split("<h2>Label these next</h2>")[1].split("</section>")[0]
