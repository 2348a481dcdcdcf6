import json

import pytest
from PIL import Image

from ropaws.cli.main import main
from ropaws.report.tables import comparison_rows, mean_and_deviation


@pytest.fixture(autouse=True)
def few_points(monkeypatch):
    """Most of the time of a short demo goes into maps of many points, and into SSKDE.

    Other processes would not see this: here the runs are trained one after the other, and side by side in
    test_side_by_side.py.
    """
    monkeypatch.setattr("ropaws.analysis.gallery.POINTS", 100)
    monkeypatch.setattr("ropaws.analysis.evaluate.SSKDE_POINTS", 100)


def demo(out, *more):
    main(["demo", "--steps", "2", "--workers", "1", "--out", str(out), *more])


def test_demo_writes_table_results_figure_and_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    out = tmp_path / "demo"
    demo(out, "--seeds", "2", "--labels-per-class", "1")
    text = capsys.readouterr().out
    for word in ("supervised", "paws", "ropaws", "accuracy", "AUROC", "ECE", "±"):
        assert word in text
    results = json.loads((out / "results.json").read_text())
    assert list(results["methods"]) == ["supervised", "paws", "ropaws"]
    for figures in results["methods"].values():
        assert set(figures) == {"accuracy", "confidence_in", "confidence_out", "auroc", "ece", "seconds"}
        assert all(len(values) == 2 for values in figures.values())
        assert all(0 <= value <= 1 for key, values in figures.items() if key != "seconds" for value in values)
    assert results["settings"]["labels_per_class"] == 1
    assert results["settings"]["steps"] == 2
    for folder in out.glob("*-seed*"):
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2  # all methods have equal steps
    with Image.open(out / "embeddings.png") as image:
        assert image.width > 2 * 500
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50  # something was drawn
    page = (out / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "<td>ropaws</td>" in page
    assert "http" not in page.replace("http-equiv", "")

    # All methods had the same labels, weights to start from and settings but for the method.
    configs = [json.loads((out / f"{m}-seed1" / "config.json").read_text()) for m in results["methods"]]
    assert all({**c, "method": None} == {**configs[0], "method": None} for c in configs)
    supervised, paws, ropaws = (config["method"] for config in configs)  # the others have what is not its own
    assert supervised["judge"] == paws["judge"] == ropaws["judge"] == "pool"
    assert ropaws["contrast_weight"] > 0
    for key in ("contrast_weight", "contrast_temperature"):
        assert paws[key] == ropaws[key]
    splits = [
        json.loads((out / f"{m}-seed1" / "data.json").read_text())["labeled"] for m in results["methods"]
    ]
    assert splits[0] == splits[1] == splits[2]
    assert splits[0] != json.loads((out / "paws-seed0" / "data.json").read_text())["labeled"]

    # A second call trains nothing again; one with other settings does not mix with it.
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/model.safetensors")}
    demo(out, "--seeds", "2", "--labels-per-class", "1")
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/model.safetensors")} == before
    assert json.loads((out / "results.json").read_text()) == results
    with pytest.raises(SystemExit):
        demo(out, "--labels-per-class", "2")
    assert "was trained with other settings" in capsys.readouterr().err


def test_an_interrupted_demo_is_resumed(tmp_path):
    out = tmp_path / "demo"
    demo(out)
    whole = json.loads((out / "results.json").read_text())
    (out / "paws-seed0" / "gallery.json").unlink()  # stopped while it was tested
    for name in ("evaluation.json", "config.json"):  # stopped while its folder was being made
        (out / "ropaws-seed0" / name).unlink()
    demo(out)
    again = json.loads((out / "results.json").read_text())
    for method in ("supervised", "paws", "ropaws"):
        assert again["methods"][method]["accuracy"] == whole["methods"][method]["accuracy"]
        assert (out / f"{method}-seed0" / "gallery.json").exists()


def test_one_seed_has_no_deviation():
    assert mean_and_deviation([0.5], scale=100) == "50.0"
    assert mean_and_deviation([0.5, 0.7], scale=100) == "60.0±14.1"
    row = {key: [0.5] for key in ("accuracy", "confidence_in", "confidence_out", "auroc", "ece", "seconds")}
    assert comparison_rows({"paws": row}) == [["paws", "50.0", "50.0", "50.0", "50.0", "50.0", "0.5"]]
