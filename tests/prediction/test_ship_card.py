"""The model card has the figures that were measured, and no others."""

import json
import re

import pytest

import ropaws
from ropaws import Run
from ropaws.cli.main import main
from ropaws.evaluation.accuracy_estimate import binomial_interval
from ropaws.prediction.model_card import card_text
from tests import tiny
from tests.photos import fails


def metrics(card):
    """Type: value, of the YAML part."""
    head = card.split("---")[1]
    return {
        kind: float(value)
        for kind, value in re.findall(r"    - type: (\w+)\n      name: .+\n      value: (.+)", head)
    }


def test_the_card_says_what_was_measured(trained, tmp_path, capsys):
    run, photos = trained
    out = tmp_path / "README.md"
    main(["export", str(run), "--card", "--out", str(out)])
    assert capsys.readouterr().out == f"Written: {out}\n"
    assert list(tmp_path.iterdir()) == [out]  # the card alone
    card, measured = out.read_text(), json.loads((run / "evaluation.json").read_text())
    found = metrics(card)
    assert set(found) == {"accuracy", "ece", "auroc", "fpr95"}
    for name, value in found.items():
        assert value == pytest.approx(measured[name], abs=1e-5)
    images = sum(map(sum, measured["confusion"]))
    low, high = binomial_interval(round(measured["accuracy"] * images), images)
    interval = f"95 % interval {100 * low:.1f} to {high:.1%}, {images} in-class"
    assert f"On test images: {measured['accuracy']:.1%} ({interval}" in card
    assert "library_name: ropaws" in card
    assert "pipeline_tag: image-classification" in card
    assert "\nlicense:" not in card  # the person's choice
    for title in ("Data and labels", "Accuracy", "Calibration", "Out-of-class images", "Limits"):
        assert f"\n## {title}\n" in card
    assert "- 9 images with a label, 36 without." in card
    assert str(photos.parent) not in card


def test_without_test_images_there_are_no_metrics(trained, tmp_path):
    run = tiny.copy(trained[0], tmp_path / "run")
    kept = json.loads((run / "evaluation.json").read_text())
    for name in ("accuracy", "ece", "auroc", "fpr95", "confusion", "per_class"):
        del kept[name]
    kept["features"] = {"on": "labels", "own": {"accuracy": 0.75, "error": 0.125}}
    (run / "evaluation.json").write_text(json.dumps(kept))
    card = card_text(Run(run))
    assert metrics(card) == {}
    assert "model-index" not in card
    assert "Not measured: there are no test images" in card
    assert "each judged by the others: 75.0% (standard error 12.5%)" in card
    assert "- Its accuracy is not known." in card
    (run / "evaluation.json").unlink()
    card = card_text(Run(run))
    assert "model-index" not in card
    assert "has not been evaluated" in card


def test_damaged_figures_and_odd_names_do_no_harm(tiny_run, tmp_path):
    run = tiny.copy(tiny_run, tmp_path / "a run: of *stars*")
    facts = json.loads((run / "data.json").read_text())
    facts["class_names"] = ["<script>", "a|b\n# head", "plain"]
    (run / "data.json").write_text(json.dumps(facts))
    odd = {"accuracy": 7, "ece": "no", "confusion": [["x"]], "per_class": {"plain": []}, "pool": {}}
    (run / "evaluation.json").write_text(json.dumps(odd))
    card = card_text(Run(run))
    assert metrics(card) == {}
    assert "<script>" not in card.replace("\\<script\\>", "")
    assert "\n# head" not in card
    assert card.startswith("---\n")


def test_a_card_is_not_replaced_unless_asked_for(tiny_run, tmp_path, capsys):
    run = tiny.copy(tiny_run, tmp_path / "run")
    (run / "README.md").write_text("mine")
    assert "replace it with --overwrite" in fails(capsys, "export", run, "--card")
    with pytest.raises(FileExistsError):
        ropaws.model_card(run)
    assert (run / "README.md").read_text() == "mine"
    main(["export", str(run), "--card", "--overwrite"])
    assert (run / "README.md").read_text().startswith("---\n")
    assert ropaws.model_card(run, tmp_path / "card.md").read_text() == (run / "README.md").read_text()
