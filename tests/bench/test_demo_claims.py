"""The demo's claims, from training to table. Minutes: `make test-slow`."""

import json

import pytest

from ropaws.cli.main import main


def accuracies(folder, *words):
    main(["demo", *words, "--out", str(folder)])
    rows = json.loads((folder / "results.json").read_text())["tables"][0]["rows"]
    return {row["method"]: {key: found["mean"] for key, found in row["figures"].items()} for row in rows}


@pytest.mark.slow
def test_ours_is_ahead_of_every_rival_on_features(tmp_path):
    found = accuracies(tmp_path, "--seeds", "3")
    ours = found.pop("ropaws")
    assert ours["accuracy"] > max(rival["accuracy"] for rival in found.values()) + 0.02
    assert ours["auroc"] > max(rival["auroc"] for rival in found.values()) - 0.005


@pytest.mark.slow
def test_ropaws_beats_paws_from_scratch_over_three_seeds(tmp_path):
    """In accuracy, and in doubting what it cannot know; both tell out-of-class images apart."""
    found = accuracies(tmp_path, "--from-scratch", "--seeds", "3")
    paws, ropaws = found["paws"], found["ropaws"]
    assert ropaws["accuracy"] > paws["accuracy"]
    assert min(ropaws["auroc"], paws["auroc"]) > 0.9
    assert ropaws["confidence_out"] < paws["confidence_out"] - 0.1
