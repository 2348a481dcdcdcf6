"""`ropaws suggest`, of a run and of images that no run has seen."""

import csv
import json
import shutil

import pytest
from rich.console import Console

import ropaws
from ropaws.cli.main import main
from ropaws.insight.suggestions import STRATEGIES
from tests import tiny
from tests.photos import fails, make_photos


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("suggest"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return ropaws.train(tiny.config(tiny.write_data(folder / "data.npz")), folder / "run")


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def kind(name):
    """Class of an image of the pool, which its file name begins with."""
    return name.rsplit("/", 1)[1].split("-")[0]


# Images alone


@pytest.fixture
def cold(photos, weights, tmp_path):
    """The arguments that every cold start of these tests has."""
    return ["suggest", "--unlabeled", str(photos / "pool"), "--init", str(weights), "--cache",
            str(tmp_path / "cache"), "--out", str(tmp_path / "next.csv")]  # fmt: skip


def rows(tmp_path):
    with (tmp_path / "next.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_cold_start_needs_no_label(cold, photos, tmp_path, capsys):
    main([*cold, "--n", "4"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Most worth a label in" in shown
    assert "P(in-class)" in shown
    assert "Without a label, nothing tells yet which images belong to a class." in shown
    assert "Expected to belong" not in shown
    assert "100.0 %" not in shown
    assert "new classes" not in shown
    found = rows(tmp_path)
    assert [row["rank"] for row in found] == ["1", "2", "3", "4"]
    assert len({kind(row["name"]) for row in found}) >= 3  # spread over rows, columns, block and noise
    assert sum(int(row["stands_for"]) for row in found) == 36
    assert all("without a label" in row["reason"] for row in found)


def test_labels_that_are_there_count(cold, photos, tmp_path, capsys):
    main([*cold, "--labeled", str(photos / "labeled"), "--n", "5", "--new-classes", "2"])
    names = {row["name"] for row in rows(tmp_path)}
    assert len(names) == 5
    assert not any("labeled/" in name for name in names)
    text = capsys.readouterr().out
    assert "Expected to belong to a class: " in text
    assert any(f"{name} (" in text for name in ("rows", "columns", "block"))


def test_twenty_by_default_and_all_where_there_are_fewer(cold, tmp_path):
    main(cold)
    assert len(rows(tmp_path)) == 20
    main([*cold, "--n", "500"])
    assert len({row["name"] for row in rows(tmp_path)}) == 36


def test_in_python_it_is_the_same(cold, photos, weights, tmp_path):
    main([*cold, "--n", "6"])
    quiet = Console(quiet=True)
    found = ropaws.first_suggestions(
        photos / "pool", n=6, init=weights, cache=tmp_path / "cache", console=quiet
    )
    assert [item["name"] for item in found] == [row["name"] for row in rows(tmp_path)]
    labeled = ropaws.first_suggestions(
        [photos / "pool"],
        labeled=photos / "labeled",
        n=6,
        init=weights,
        console=quiet,
        cache=tmp_path / "cache",
    )
    assert {item["kind"] for item in labeled} == {"in-class"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_strategies_can_be_named(cold, tmp_path, strategy):
    main([*cold, "--n", "3", "--strategy", strategy])
    assert len({row["name"] for row in rows(tmp_path)}) == 3


# A run


def test_a_run_has_both_lists_in_its_evaluation(run, capsys):
    main(["suggest", str(run), "--n", "4", "--new-classes", "1"])
    assert "Expected to belong to a class" in capsys.readouterr().out
    found = json.loads((run / "evaluation.json").read_text())
    assert len(found["suggestions"]) == 4
    assert {item["kind"] for item in found["suggestions"]} == {"in-class"}
    assert isinstance(found["new_classes"], list)
    assert not {item["image"] for item in found["suggestions"]} & set(
        json.loads((run / "data.json").read_text())["labeled"]["indices"]
    )


def test_a_run_without_its_images_says_what_it_uses_instead(run, trained, tmp_path, capsys):
    main(["suggest", str(run), "--n", "4"])  # keeps what the network says of the pool
    capsys.readouterr()
    data = trained.parent / "data.npz"
    hidden = data.rename(tmp_path / "elsewhere.npz")
    try:
        main(["suggest", str(run), "--n", "4"])
    finally:
        hidden.rename(data)
    error = " ".join(capsys.readouterr().err.split())
    assert "The images are not available" in error
    assert "neighbors are those of the run's embedding" in error
    assert len(json.loads((run / "evaluation.json").read_text())["suggestions"]) == 4


# Errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a run folder, or images with --unlabeled"),
        (["RUN", "--unlabeled", "POOL"], "not both"),
        (["RUN", "--labeled", "POOL"], "--labeled goes with --unlabeled"),
        (["RUN", "--n", "0"], "n must be at least 1, got 0"),
        (["--unlabeled", "POOL", "--n", "-1"], "n must be at least 1, got -1"),
        (["RUN", "--new-classes", "-1"], "new-classes must be at least 0"),
        (["RUN", "--strategy", "best"], "--strategy must be one of coverage, random"),
        (["RUN", "--out", "next.txt"], "--out must end in .csv or .json, got next.txt"),
        (["RUN", "--out", "no/such/next.csv"], "no folder no/such"),
        (["--unlabeled", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line(run, photos, arguments, words, capsys):
    names = {"RUN": str(run), "POOL": str(photos / "pool")}
    assert words in fails(capsys, "suggest", *(names.get(word, word) for word in arguments))
