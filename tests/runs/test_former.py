"""Run folders of 0.1.0, made from new ones: other names of fields and files, and one buffer more."""

import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ropaws
from ropaws import PAWS, Run
from ropaws.cli.main import main
from ropaws.report.run_page import SECTIONS
from ropaws.runs.facts import model_digest
from ropaws.runs.outputs import FORMER_NAMES
from tests import tiny

NEW_FIELDS = (("data", "crop"), ("optim", "name"), ("optim", "schedule"), ("support", "images_per_step"))
FORMER_FIELDS = (("data", "image_size", "picture_size"), ("augment", "grayscale", "grey"))


@pytest.fixture(scope="module", params=["paws", "ropaws"])
def current(request, tmp_path_factory):
    """A run of this version, evaluated."""
    folder = tmp_path_factory.mktemp("current")
    config = tiny.config(tiny.write_data(folder / "data.npz"))
    config = replace(config, data=replace(config.data, crop="center"))  # as all runs then
    if request.param == "paws":
        config = replace(config, method=PAWS())
    run = ropaws.train(config, folder / "run")
    ropaws.evaluate(run)
    return run


@pytest.fixture
def former(current, tmp_path):
    """The same as 0.1.0 would have written it, with the last two steps still to take."""
    run = shutil.copytree(current, tmp_path / "former")
    edit(run / "config.json", former_config)
    edit(run / "data.json", lambda facts: facts.pop("images"))
    edit(run / "environment.json", lambda values: values.update(ropaws="0.1.0"))
    edit(run / "evaluation.json", lambda found: found.update(doubts=found.pop("label_errors")))
    edit(run / "evaluation.json", lambda found: [found.pop(name) for name in ("features", "learning_curve")])
    (run / "gallery.json").rename(run / "pictures.json")
    (run / "checkpoint.previous.pt").replace(run / "checkpoint.pt")
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    assert checkpoint["next_step"] == 4
    checkpoint["model"].setdefault("support_gap", torch.tensor(math.nan))
    checkpoint["made_by"].update(ropaws="0.1.0")
    former_config(checkpoint["made_by"]["config"])
    torch.save(checkpoint, run / "checkpoint.pt")
    weights = load_file(run / "model.safetensors")
    weights.setdefault("support_gap", torch.tensor(math.nan))
    save_file(weights, run / "model.safetensors")
    made_by = {"model": model_digest(run)}
    save_file(load_file(run / "support.safetensors"), run / "support.safetensors", made_by)
    with safe_open(run / "embeddings.safetensors", framework="pt") as file:
        data = file.metadata()["data"]
        outputs = {former: file.get_tensor(name) for name, former in FORMER_NAMES.items()}
        outputs["fingerprint"] = file.get_tensor("fingerprint")
    save_file(outputs, run / "embeddings.safetensors", {**made_by, "data": data})
    return run


def edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def former_config(values):
    for section, name, former in FORMER_FIELDS:
        values[section][former] = values[section].pop(name)
    for section, name in NEW_FIELDS:
        del values[section][name]


def test_what_0_1_0_has_kept_is_used(current, former, monkeypatch):
    """No image is looked at again, and the figures are the same."""
    monkeypatch.setattr(Run, "_compute_outputs", None)
    monkeypatch.setattr(Run, "embedded_support", None)
    old, new = Run(former), Run(current)
    assert old.config == new.config
    assert old.kernel == new.kernel
    assert old.threshold == new.threshold
    for one, other in zip(
        (*old.pool.outputs, *old.test.outputs), (*new.pool.outputs, *new.test.outputs), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert old.pool.names == new.pool.names
    known = json.loads((current / "evaluation.json").read_text())
    found = ropaws.evaluate(former)
    assert found["label_errors"] == known["label_errors"]
    for name in ("accuracy", "auroc", "ece", "threshold", "leave_one_out"):
        assert found[name] == pytest.approx(known[name])
    assert [item["image"] for item in found["suggestions"]] == [
        item["image"] for item in known["suggestions"]
    ]
    assert (former / "gallery.json").exists()


def test_it_predicts_suggests_and_compares(current, former, tmp_path, capsys):
    random = np.random.default_rng(1)
    images = [tiny.draw(label, random) for label in (0, 1, 2, -1)]
    for propagate in (False, True):
        found, known = (ropaws.predict(run, images, propagate=propagate) for run in (former, current))
        assert [item.label for item in found] == [item.label for item in known]
        for one, other in zip(found, known, strict=True):
            assert one.probabilities == pytest.approx(other.probabilities)
            assert one.in_domain == pytest.approx(other.in_domain)
    known = [item["image"] for item in ropaws.suggest(shutil.copytree(current, tmp_path / "copy"), n=5)]
    assert [item["image"] for item in ropaws.suggest(former, n=5)] == known
    main(["compare", str(current), str(former), "--out", str(tmp_path / "page.html")])
    assert "What differs" not in capsys.readouterr().out


def test_its_report_shows_the_images_that_0_1_0_has_drawn(former):
    """Also where the images themselves are gone."""
    edit(former / "config.json", lambda config: config["data"].update(source="gone.npz"))
    page = Run(former).report().read_text()
    # 0.1.0 drew no learning curve, and without the images it cannot be drawn.
    shown = [title for title in SECTIONS if title != "Would more labels help?"]
    assert re.findall("<h2>(.*?)</h2>", page) == [*shown, "Not shown"]
    assert page.count('src="data:image/') > 60


def test_it_resumes_to_the_same_weights(current, former):
    ropaws.resume(former)
    weights, resumed = load_file(current / "model.safetensors"), load_file(former / "model.safetensors")
    assert weights.keys() == resumed.keys()
    for name, value in weights.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, equal_nan=True)
    assert ropaws.evaluate(former)["accuracy"] == ropaws.evaluate(current)["accuracy"]
