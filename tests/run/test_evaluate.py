"""evaluate(run) part by part, on runs that take a second."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import ropaws
from ropaws import RoPAWS, Run
from ropaws.cli.main import main
from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.insight.label_errors import rank_label_errors
from ropaws.run.outputs import pool_truth
from tests import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with snapshots and out-of-class tests, never evaluated."""
    folder = tmp_path_factory.mktemp("trained")
    data = tiny.write_data(folder / "data.npz")
    return ropaws.train(tiny.config(data, keep_every=3), folder / "run")


@pytest.fixture
def run(trained, tmp_path):
    """A copy of its own; the data stays where it was."""
    return shutil.copytree(trained, tmp_path / "run")


def test_all_parts_are_there_and_on_disk(run):
    found = ropaws.evaluate(run)
    assert found == json.loads((run / "evaluation.json").read_text())
    assert len(found["reliability"]) == 15
    assert [sum(row) for row in found["confusion"]] == [5, 5, 5]
    assert set(found["per_class"]) == {"rows", "columns", "block"}
    assert [row["iterations"] for row in found["propagation"]] == [0, 1, 2, 3, 5, 10, None]
    assert set(found["baselines"]) == {"knn", "logistic", "sskde"}
    assert found["pool"]["size"] == found["pool"]["seen"] == 34
    assert sum(found["pool"]["classes"].values()) == round(34 * (1 - found["pool"]["out_of_class"]))
    assert [item["steps"] for item in found["over_training"]] == [3, 6]
    assert len(found["suggestions"]) == 34  # as many as there are
    assert (run / "gallery.json").exists()


def test_figures_are_those_of_the_embeddings(run):
    """Once more by hand, from the network itself."""
    found = ropaws.evaluate(run, only=["soft-nn", "confusion", "propagation", "snapshots"])
    network = Run(run)
    split, truth = network.facts.split, network.corpus.test_labels
    test = network.embed(network.corpus.test_images)
    support = network.embed(network.corpus.train_images, split.indices)
    votes = torch.nn.functional.one_hot(split.labels, 3).float()
    probs = ropaws.equations.soft_nn(test, support, votes, temperature=0.1)
    known = truth >= 0
    right = probs.argmax(1)[known] == truth[known]
    assert found["accuracy"] == pytest.approx(right.double().mean().item())
    assert sum(row[i] for i, row in enumerate(found["confusion"])) == right.sum()
    prior = network.method.in_domain_temperature(network.support)
    posterior = ropaws.equations.ropaws_posterior(
        test, support, votes, temperature=0.1, prior_temperature=prior
    )
    last = found["propagation"][-1]
    assert last["confidence_in"] == pytest.approx(posterior.probs.amax(1)[known].mean().item(), abs=1e-4)
    assert last["confidence_out"] == pytest.approx(posterior.probs.amax(1)[~known].mean().item(), abs=1e-4)
    # The last snapshot is the model itself.
    assert found["over_training"][-1]["propagation"] == found["propagation"]
    assert found["over_training"][0]["propagation"] != found["propagation"]


def test_embeddings_are_computed_once_and_anew_for_another_model(run, monkeypatch):
    first = ropaws.evaluate(run)
    calls = []
    real = Run._compute_outputs
    monkeypatch.setattr(Run, "_compute_outputs", lambda self: calls.append(self) or real(self))
    assert ropaws.evaluate(run) == first
    assert not calls
    snapshot = run / "snapshots" / "step-0000003.safetensors"
    shutil.copy(snapshot, run / "model.safetensors")
    found = ropaws.evaluate(run, only=["soft-nn"])
    assert len(calls) == 1
    # The labeled images, too, are seen by the other model.
    assert found["accuracy"] == first["over_training"][0]["propagation"][0]["accuracy"]
    assert found["auroc"] == pytest.approx(first["over_training"][0]["auroc"])
    (run / "embeddings.safetensors").write_bytes(b"damaged")
    ropaws.evaluate(run, only=["soft-nn"])
    assert len(calls) == 2


def test_another_test_set_is_noticed(tmp_path):
    data = tiny.write_data(tmp_path / "data.npz")
    run = ropaws.train(tiny.config(data), tmp_path / "run")
    first = ropaws.evaluate(run)
    arrays = dict(np.load(data))
    labels = arrays["test_labels"]
    np.savez(data, **{**arrays, "test_labels": np.where(labels >= 0, (labels + 1) % 3, labels)})
    turned = ropaws.evaluate(run)
    assert turned["confusion"] != first["confusion"]
    np.savez(data, **{**arrays, "test_images": arrays["test_images"][:8], "test_labels": labels[:8]})
    assert sum(map(sum, ropaws.evaluate(run)["confusion"])) == 6


def test_a_part_that_fails_costs_itself_only(run, capsys):
    (run / "snapshots" / "step-0000003.safetensors").write_bytes(b"damaged")
    found = ropaws.evaluate(run)
    assert "snapshots left out" in capsys.readouterr().err
    assert {"accuracy", "pool", "suggestions"} <= set(found)
    assert (run / "gallery.json").exists()
    with pytest.raises(ValueError, match="cannot be loaded"):
        ropaws.evaluate(run, only=["snapshots"])


@pytest.mark.parametrize(
    ("change", "prior"), [({"prior_temperature": 0.1}, 0.1), ({"in_domain_prior": False}, None)]
)
def test_propagation_has_the_prior_of_the_method(run, change, prior):
    trained = Run(run)
    automatic = trained.method.in_domain_temperature(trained.support)
    assert trained.kernel.prior_temperature == automatic
    changed = Run(run)
    changed.config = replace(changed.config, method=RoPAWS(**change))
    assert changed.kernel.prior_temperature == prior


def test_one_label_per_class_has_none_that_agrees(tmp_path):
    data = tiny.write_data(tmp_path / "data.npz")
    config = tiny.config(data)
    config = replace(config, data=replace(config.data, labels_per_class=1))
    found = ropaws.evaluate(ropaws.train(config, tmp_path / "run"))
    assert "leave_one_out" not in found
    assert found["label_errors"] == []
    assert "accuracy" in found


def test_a_run_without_a_pool(tmp_path):
    """Every image is labeled."""
    data = tiny.write_data(tmp_path / "data.npz")
    arrays = dict(np.load(data))
    known = arrays["train_labels"] >= 0
    arrays.update(train_images=arrays["train_images"][known], train_labels=arrays["train_labels"][known])
    np.savez(data, **arrays)
    config = tiny.config(data)
    config = replace(config, data=replace(config.data, labels_per_class=None))
    run = ropaws.train(config, tmp_path / "run")
    found = ropaws.evaluate(run)
    assert found["suggestions"] == []
    assert "pool" not in found
    assert "accuracy" in found
    main(["report", str(run)])


def test_a_run_whose_images_are_gone_keeps_its_analyses(tmp_path, capsys):
    data = tiny.write_data(tmp_path / "data.npz")
    run = ropaws.train(tiny.config(data, keep_every=3), tmp_path / "run")
    first = ropaws.evaluate(run)
    data.unlink()
    images = (run / "gallery.json").read_text()
    assert ropaws.evaluate(run) == first
    assert "The images are not available" in capsys.readouterr().err
    assert (run / "gallery.json").read_text() == images
    with pytest.raises(FileNotFoundError):
        ropaws.evaluate(run, only=["gallery"])
    assert len(ropaws.suggest(run, n=3)) == 3


def test_only_some_parts_and_unknown_ones(run):
    ropaws.evaluate(run, only=["labels"])
    found = ropaws.evaluate(run, only=["soft-nn"])
    assert "leave_one_out" in found  # kept from before
    assert "propagation" not in found
    with pytest.raises(ValueError, match="unknown part 'soft_nn', did you mean 'soft-nn'"):
        ropaws.evaluate(run, only=["soft_nn"])
    with pytest.raises(ValueError, match="pool must be at least 0"):
        ropaws.evaluate(run, pool=-1)


def test_a_lost_support_file_is_made_again(run):
    before = ropaws.evaluate(run, only=["soft-nn"])
    (run / "support.safetensors").unlink()
    assert ropaws.evaluate(run, only=["soft-nn"]) == before


def test_the_pool_can_be_sampled(run):
    found = ropaws.evaluate(run, only=["pool"], pool=10)
    assert (found["pool"]["seen"], found["pool"]["size"]) == (10, 34)
    assert ropaws.evaluate(run, only=["pool"], pool=0)["pool"]["seen"] == 34


def test_the_supervised_baseline(run):
    found = ropaws.evaluate(run, only=["supervised"])
    baseline = run / "supervised"
    config = json.loads((baseline / "config.json").read_text())
    assert config["method"]["name"] == "supervised"
    assert (baseline / "split.txt").read_text() == (run / "split.txt").read_text()
    assert (
        found["supervised"]["accuracy"] == json.loads((baseline / "evaluation.json").read_text())["accuracy"]
    )
    stamp = (baseline / "model.safetensors").stat().st_mtime_ns
    ropaws.evaluate(run, only=["supervised"])
    assert (baseline / "model.safetensors").stat().st_mtime_ns == stamp  # trained once


def test_what_a_pool_image_is_depends_on_what_is_known():
    config = tiny.config("x.npz").data
    corpus = type("Corpus", (), {"train_labels": torch.tensor([0, -1]), "class_names": ("a",)})
    assert pool_truth(corpus, config).tolist() == [0, UNLABELED]  # -1 in an .npz: not known
    assert pool_truth(corpus, replace(config, extra=("y.npz",))).tolist() == [0, UNLABELED]
    mixed = replace(config, source="cifar10", extra=("y.npz",))
    assert pool_truth(corpus, mixed).tolist() == [0, OUT_OF_CLASS]
    assert pool_truth(corpus, replace(config, source="cifar10+svhn")).tolist() == [0, OUT_OF_CLASS]


def test_the_embedded_pool_is_known_to_the_analyses():
    from ropaws.pool.sources import load_corpus
    from ropaws.recipes import demo

    truth = pool_truth(load_corpus(demo().data), demo().data)
    assert (truth + 2).bincount().tolist() == [2500, 0, *[500] * 5]  # out-of-class, then the five classes


def test_wrong_labels_are_found_in_a_trained_run(tmp_path):
    """Five of thirty labels are flipped before training; the most suspect ones are among them."""
    data = tiny.write_data(tmp_path / "data.npz")
    arrays = dict(np.load(data))
    right = arrays["train_labels"].copy()
    flipped = np.array([0, 5, 10, 20, 37])
    arrays["train_labels"][flipped] = (right[flipped] + 1) % 3
    np.savez(data, **arrays)
    config = tiny.config(data, steps=60, batch=32)
    config = replace(
        config,
        data=replace(config.data, labels_per_class=None),
        augment=replace(config.augment, solarize=0.0, equalize=0.0, jitter_strength=0.25),
        optim=replace(config.optim, start=0.2, peak=0.8, end=0.008, warmup=6),
    )
    run = ropaws.train(config, tmp_path / "run")
    found = ropaws.Run(run)
    check = ropaws.evaluate(found, only=["labels"])["label_check"]
    ranked = rank_label_errors(found.support.embeddings, found.support.labels, classes=3)
    assert len(ranked) == check["contradicted"] >= 3
    image = found.facts.split.indices.tolist()
    assert {image[error.position] for error in ranked[:3]} <= set(flipped.tolist())
    assert all(error.suspected == right[image[error.position]] for error in ranked[:3])


def test_suggestions_from_the_command_line(run, tmp_path, capsys):
    main(["suggest", str(run), "--n", "4", "--out", str(tmp_path / "next.csv")])
    assert "Most worth a label" in capsys.readouterr().out
    lines = (tmp_path / "next.csv").read_text().splitlines()
    assert lines[0].startswith("rank,image,name,kind,reason")
    assert len(lines) == 5
    main(["suggest", str(run), "--n", "2", "--out", str(tmp_path / "next.json")])
    assert len(json.loads((tmp_path / "next.json").read_text())) == 2
    assert len(json.loads((run / "evaluation.json").read_text())["suggestions"]) == 2
    labeled = set(json.loads((run / "data.json").read_text())["labeled"]["indices"])
    assert len(labeled) == 6
    assert not labeled & {item["image"] for item in ropaws.suggest(run, n=34)}


def test_suggestions_have_thumbnails_for_the_report(run):
    ropaws.evaluate(run, pool=5)
    found = ropaws.suggest(run, n=30)
    thumbnails = json.loads((run / "gallery.json").read_text())["thumbnails"]
    assert {f"train/{item['image']}" for item in found} <= set(thumbnails)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["suggest", "RUN", "--n", "0"], "n must be at least 1"),
        (["suggest", "RUN", "--out", "x.txt"], "must end in .csv or .json"),
        (["evaluate", "RUN", "--only", "nothing"], "unknown part 'nothing'"),
        (["report", "nowhere"], "nowhere is not a run folder"),
        (["report", "RUN", "--baseline", "nowhere"], "nowhere has no evaluation.json"),
        (["report", "RUN", "--out", "no/such/page.html"], "no folder no/such"),
        (["compare"], "compare"),
        (["compare", "nowhere"], "no run folder at nowhere"),
    ],
)
def test_bad_input_is_one_line(run, arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(run) if word == "RUN" else word for word in arguments])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
