"""Fine-tuning and linear probe."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import ropaws
from ropaws import Run
from ropaws.cli.main import main
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.methods.fine_tune import Classifier
from ropaws.run import run as run_module
from ropaws.run.finetune import hold_out
from tests import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning")
    config = tiny.config(tiny.write_data(folder / "data.npz"), steps=20)
    config = replace(
        config,
        data=replace(config.data, labels_per_class=6),
        augment=replace(config.augment, scale=(0.8, 1.0)),
    )
    return ropaws.train(config, folder / "run")


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_the_classifier_starts_at_zero_on_the_first_projection_layer():
    config = ModelConfig(backbone="small-8", projection_hidden=16, projection_dims=8)
    model = Classifier(build_encoder(config, channels=1), 3, frozen=False).eval()
    assert model.linear.in_features == 16  # the hidden width, not the embedding's
    features, logits = model(torch.rand(2, 1, 12, 12))
    assert features.shape == (2, 16)
    assert logits.abs().max() == 0


@pytest.mark.parametrize("linear", [False, True])
def test_it_learns_and_leaves_the_run_alone(run, linear):
    before = (run / "model.safetensors").read_bytes()
    settings = {"rates": (1.0,), "epochs": (60,)} if linear else {"rates": (0.1,), "epochs": (15,)}
    ropaws.finetune(run, linear=linear, batch=8, **settings)
    assert (run / "model.safetensors").read_bytes() == before
    tuned = Run(run / ("linear" if linear else "finetuned"))
    random, labels = np.random.default_rng(9), torch.arange(30) % 3
    test = torch.stack([torch.from_numpy(tiny.draw(int(label), random)) for label in labels])[:, None]
    probs = tuned.outputs(test).probs
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(30))
    assert (probs.argmax(dim=1) == labels).float().mean() > (0.6 if linear else 0.9)
    before, after = Run(run).model.backbone.state_dict(), tuned.model.encoder.backbone.state_dict()
    # Weight files need not have the counters, and nothing depends on them.
    names = [name for name in before if not name.endswith("num_batches_tracked")]
    same = all(torch.equal(before[name], after[name]) for name in names)
    assert same == linear  # the probe trains the linear layer and nothing else, batch statistics included


def test_a_seed_repeats_it(run):
    """Also where the folder of the first call is in the way."""
    weights = []
    for _ in range(2):
        ropaws.finetune(run, rates=(0.1,), epochs=(3,), batch=8)
        weights.append((run / "finetuned" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_settings_are_chosen_on_a_fifth_of_each_class():
    labels = torch.tensor([0] * 10 + [1] * 2 + [2])
    kept, held = hold_out(labels, seed=0)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(13))
    assert labels[held].bincount(minlength=3).tolist() == [2, 1, 0]  # a lone label is trained on


def test_finetune_writes_its_results_beside_the_soft_nn_ones(run, capsys):
    main(["evaluate", str(run)])
    main(["finetune", str(run), "--rates", "0.01", "0.1", "--epochs", "5", "--batch", "9"])
    text = capsys.readouterr().out
    assert "soft nearest neighbor" in text
    assert "fine-tuned: learning rate" in text
    results = json.loads((run / "finetune.json").read_text())
    assert len(results["sweep"]) == 2
    best = max(results["sweep"], key=lambda row: row["held_out_accuracy"])
    assert results["chosen"]["rate"] == best["rate"]
    assert {"accuracy", "confidence_in", "confidence_out", "ece"} <= results.keys()
    main(["finetune", str(run), "--linear", "--rates", "0.1", "--epochs", "3"])
    assert json.loads((run / "linear.json").read_text())["chosen"]["linear"] is True


def test_the_result_is_a_run_like_any_other(run):
    results = ropaws.finetune(run, rates=(0.1,), epochs=(5,), batch=9)
    tuned = run / "finetuned"
    assert json.loads((tuned / "config.json").read_text())["method"]["name"] == "fine-tune"
    assert (tuned / "split.txt").read_text() == (run / "split.txt").read_text()
    found = ropaws.evaluate(tuned)
    for name in ("accuracy", "confidence_in", "confidence_out", "ece", "auroc"):
        assert found[name] == pytest.approx(results[name])
    pixels = tiny.draw(0, np.random.default_rng(3))
    assert ropaws.predict(tuned, [pixels])[0].nearest_class in ("rows", "columns", "block")
    assert len(ropaws.suggest(tuned, n=3)) == 3


def test_test_images_play_no_part_in_the_choice(run, monkeypatch):
    """With other test labels, everything but the final figures is the same."""
    first = ropaws.finetune(run, rates=(0.01, 0.1), epochs=(5,), batch=9)
    load = run_module.load_corpus

    def other_tests(*args, **kwargs):
        corpus = load(*args, **kwargs)
        return corpus._replace(test_images=255 - corpus.test_images, test_labels=corpus.test_labels.flip(0))

    monkeypatch.setattr(run_module, "load_corpus", other_tests)
    second = ropaws.finetune(run, rates=(0.01, 0.1), epochs=(5,), batch=9)
    assert second["sweep"] == first["sweep"]
    assert second["chosen"] == first["chosen"]
    assert second["accuracy"] != first["accuracy"]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--rates", "0"], "rate must be positive"),
        (["--rates", "nan"], "rate must be positive, got nan"),
        (["--rates"], "need at least one value"),
        (["--epochs", "0"], "epochs must be positive"),
        (["--batch", "0"], "batch must be positive"),
    ],
)
def test_bad_settings_get_one_line(trained, capsys, option, words):
    with pytest.raises(SystemExit):
        main(["finetune", str(trained), *option])
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (trained / "finetuned").exists()
