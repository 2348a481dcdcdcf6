"""The model card has the figures that were measured, and no others."""

import json
import re

import pytest
import torch

import ropaws
from ropaws import Run
from ropaws.cli.main import main
from ropaws.insight.accuracy_estimate import binomial_interval
from ropaws.run.export_model import samples_of
from ropaws.run.model_card import card_text
from ropaws.run.predict import Predictor
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


def test_card_and_terminal_say_how_the_file_differs_from_the_run_in_its_own_precision(
    tiny_run, tmp_path, capsys
):
    run = tiny.copy(tiny_run, tmp_path / "run")
    settings = json.loads((run / "config.json").read_text())
    settings["train"]["precision"] = "bf16"
    (run / "config.json").write_text(json.dumps(settings))
    half = Run(run)
    exact = half.in_full_precision()
    tried = torch.from_numpy(samples_of(exact, 32).inputs)
    own, file = (Predictor(one).look(tried) for one in (half, exact))
    # A threshold between what both say of one image: its verdict is another.
    row = int((own.in_domain - file.in_domain).abs().argmax())
    threshold = float(own.in_domain[row] + file.in_domain[row]) / 2
    labels = int((own.probs.argmax(dim=1) != file.probs.argmax(dim=1)).sum())
    verdicts = int(((own.in_domain < threshold) != (file.in_domain < threshold)).sum())
    assert verdicts > 0
    main(["export", str(run), "--format", "torch", "--card", "--out", str(tmp_path / "model.pt2"),
          "--threshold", str(threshold)])  # fmt: skip
    counts = f"{labels} get another label and {verdicts} change between in-class and out-of-class"
    largest = [float((a - b).abs().max()) for a, b in ((own[1], file[1]), (own[2], file[2]))]
    apart = "differ by up to {:.3f}, in-domain probabilities by up to {:.3f}".format(*largest)
    for text in (capsys.readouterr().err, (tmp_path / "README.md").read_text()):
        assert counts in text
        assert apart in text


def test_without_test_images_there_are_no_metrics(trained, tmp_path):
    run = tiny.copy(trained[0], tmp_path / "run")
    kept = json.loads((run / "evaluation.json").read_text())
    for name in ("accuracy", "ece", "auroc", "fpr95", "confusion", "per_class"):
        del kept[name]
    kept["features"] = {"on": "labels", "own": {"accuracy": 0.75, "low": 0.4, "high": 0.9}}
    (run / "evaluation.json").write_text(json.dumps(kept))
    card = card_text(Run(run))
    assert metrics(card) == {}
    assert "model-index" not in card
    assert "Not measured: there are no test images" in card
    assert "each judged by a fit without it: 75.0% (40% to 90%)" in card
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
