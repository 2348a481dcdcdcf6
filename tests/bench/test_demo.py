import json
from dataclasses import replace

import numpy as np
import pytest

from ropaws.bench import bench
from ropaws.cli.main import main
from ropaws.pool.sources import DataConfig, load_corpus
from ropaws.recipes.protocols import FROM_SCRATCH, PROTOCOLS
from tests.bench.test_bench import at_once


@pytest.fixture(autouse=True)
def few_points(monkeypatch):
    """Most of the time of a short demo goes into maps of many points, and into SSKDE."""
    monkeypatch.setattr("ropaws.run.gallery.POINTS", 100)
    monkeypatch.setattr("ropaws.run.evaluate.SSKDE_POINTS", 100)


@pytest.fixture(scope="module")
def some_garments(tmp_path_factory):
    """Every 12th image of the embedded pool, as a file."""
    corpus = load_corpus(DataConfig(source="fashion-demo"))
    path = tmp_path_factory.mktemp("demo") / "garments.npz"
    step = slice(None, None, 12)
    np.savez(
        path,
        train_images=corpus.train_images[step].permute(0, 2, 3, 1).numpy(),
        train_labels=corpus.train_labels[step].numpy(),
        test_images=corpus.test_images[step].permute(0, 2, 3, 1).numpy(),
        test_labels=corpus.test_labels[step].clamp_min(-1).numpy(),
    )
    return str(path)


@pytest.fixture
def small(some_garments, monkeypatch):
    """The demo on these images, in this process."""
    monkeypatch.setattr("ropaws.bench.bench.POOL", some_garments)
    protocol = replace(PROTOCOLS[FROM_SCRATCH], sources=(some_garments,))
    monkeypatch.setitem(PROTOCOLS, FROM_SCRATCH, protocol)
    monkeypatch.setattr(bench, "run_all", at_once)


def demo(out, *more):
    main(["demo", "--out", str(out), *more])


@pytest.mark.usefixtures("small")
def test_the_demo_compares_methods_on_features(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    out = tmp_path / "demo"
    demo(out, "--steps", "60", "--workers", "1")
    text = capsys.readouterr().out
    methods = ("logistic", "label-spreading", "paws", "ropaws-paper", "ropaws")
    for word in (*methods, "acc.", "AUROC", "ECE"):
        assert word in text
    content = json.loads((out / "results.json").read_text())
    (table,) = content["tables"]
    figures = {row["method"]: row["figures"] for row in table["rows"]}
    assert set(figures) == set(methods)
    # Pretrained features of 4 labels per class say far more than chance, which is 20 %.
    assert all(found["accuracy"]["mean"] > 0.5 for found in figures.values())
    assert figures["ropaws"]["auroc"]["mean"] > 0.8
    for page in ("report.html", "ropaws.html"):
        assert "<!doctype html>" in (out / page).read_text().lower()
    assert "in-class" in (out / "ropaws.html").read_text()

    # A second call trains nothing again; one with other settings does not mix with it.
    before = {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}
    assert before
    demo(out, "--steps", "60")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")} == before
    with pytest.raises(SystemExit):
        demo(out, "--steps", "61")
    assert "bench of other settings" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_the_demo_from_scratch_gives_all_methods_what_is_not_ropaws_own(tmp_path):
    out = tmp_path / "demo"
    demo(out, "--from-scratch", "--steps", "2", "--workers", "1")
    content = json.loads((out / "results.json").read_text())
    given = {row["method"]: row["given"][0] for row in content["tables"][0]["rows"]}
    assert set(given) == {"supervised", "paws", "ropaws"}
    assert {row["method"]["judge"] for row in given.values()} == {"pool"}
    paws, ropaws = given["paws"], given["ropaws"]
    assert paws["steps"] == ropaws["steps"] == 2
    assert paws["method"]["contrast_weight"] == ropaws["method"]["contrast_weight"] > 0
    configs = [json.loads(path.read_text()) for path in sorted(out.rglob("1-*/config.json"))]
    assert len(configs) == 3
    assert all(config["augment"] == configs[0]["augment"] for config in configs)
    assert all(config["model"] == configs[0]["model"] for config in configs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seeds", "0"), "--seeds must be at least 1"),
        (("--labels-per-class", "0"), "--labels-per-class must be at least 1"),
        (("--labels-per-class", "2000"), "a class of fashion-demo has"),
        (("--workers", "0"), "--workers must be at least 1"),
    ],
)
def test_bad_settings_are_one_line(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        demo(tmp_path / "demo", *words)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
