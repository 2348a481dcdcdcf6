"""Fine-tuning and linear probe."""

import json
from dataclasses import replace

import pytest
import torch

import ropaws
from ropaws.cli.main import main
from ropaws.data.augment import AugmentConfig, Normalization
from ropaws.methods.fine_tune import (
    Classifier,
    FineTuneConfig,
    LabeledImages,
    class_probabilities,
    fine_tune,
    hold_out,
    plain_view,
)
from ropaws.models import ModelConfig, build_encoder
from tests import tiny

GRAY = Normalization((0.4,), (0.3,))


def encoder():
    torch.manual_seed(0)
    return build_encoder(ModelConfig(backbone="small-8", projection_hidden=16, projection_dims=8), channels=1)


def images(count=24, seed=0):
    import numpy as np

    random = np.random.default_rng(seed)
    labels = torch.arange(count) % 3
    pixels = torch.stack([torch.from_numpy(tiny.draw(int(label), random)) for label in labels])
    return LabeledImages(pixels[:, None], labels)


def tune(model, data, **settings):
    config = FineTuneConfig(**{"rate": 0.1, "epochs": 15, "batch": 8, **settings})
    view = plain_view(AugmentConfig(size=12, scale=(0.8, 1.0)))
    return fine_tune(model, data, config, classes=3, view=view, normalize=GRAY, seed=0)


def test_the_classifier_starts_at_zero_on_the_first_projection_layer():
    model = Classifier(encoder(), 3, linear=False).eval()
    assert model.linear.in_features == 16  # the hidden width, not the embedding's
    assert model(torch.rand(2, 1, 12, 12)).abs().max() == 0


@pytest.mark.parametrize("linear", [False, True])
def test_it_learns_and_leaves_the_encoder_alone(linear):
    model = encoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    longer = {"rate": 1.0, "epochs": 150} if linear else {}  # features of an untrained network
    tuned = tune(model, images(), linear=linear, **longer)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], equal_nan=True, rtol=0, atol=0)
    test = images(30, seed=9)
    probs = class_probabilities(tuned, test.images, size=12, normalize=GRAY)
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(30))
    assert (probs.argmax(dim=1) == test.labels).float().mean() > (0.6 if linear else 0.9)
    backbone = {name.removeprefix("features.0."): v for name, v in tuned.state_dict().items()}
    same = all(torch.equal(value, backbone[name]) for name, value in model.backbone.state_dict().items())
    assert same == linear  # the probe trains the linear layer and nothing else, batch statistics included


def test_a_seed_repeats_it():
    one, again = (tune(encoder(), images()) for _ in range(2))
    for name, value in one.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


def test_settings_are_chosen_on_a_fifth_of_each_class():
    labels = torch.tensor([0] * 10 + [1] * 2 + [2])
    kept, held = hold_out(labels, seed=0)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(13))
    assert labels[held].bincount(minlength=3).tolist() == [2, 1, 0]  # a lone label is trained on


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning")
    config = tiny.config(tiny.write_data(folder / "data.npz"), steps=20)
    config = replace(config, data=replace(config.data, labels_per_class=6))
    return ropaws.train(config, folder / "run")


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
    assert (run / "finetuned.safetensors").exists()
    main(["finetune", str(run), "--linear", "--rates", "0.1", "--epochs", "3"])
    assert json.loads((run / "linear.json").read_text())["chosen"]["linear"] is True


def test_test_images_play_no_part_in_the_choice(run, monkeypatch):
    """With other test labels, everything but the final figures is the same."""
    import ropaws.analysis.finetune as tuning

    first = ropaws.finetune(run, rates=(0.01, 0.1), epochs=(2,))
    load = tuning.load_corpus

    def other_tests(*args, **kwargs):
        corpus = load(*args, **kwargs)
        return corpus._replace(test_images=255 - corpus.test_images, test_labels=corpus.test_labels.flip(0))

    monkeypatch.setattr(tuning, "load_corpus", other_tests)
    second = ropaws.finetune(run, rates=(0.01, 0.1), epochs=(2,))
    assert second["sweep"] == first["sweep"]
    assert second["chosen"] == first["chosen"]
    assert second["accuracy"] != first["accuracy"]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--rates", "0"], "rate must be positive"),
        (["--epochs", "0"], "epochs must be at least 1"),
        (["--batch", "0"], "batch must be at least 1"),
    ],
)
def test_bad_settings_get_one_line(run, capsys, option, words):
    with pytest.raises(SystemExit):
        main(["finetune", str(run), *option])
    assert words in capsys.readouterr().err
