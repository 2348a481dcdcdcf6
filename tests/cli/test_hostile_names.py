"""Class and file names with control characters: every command shows them, none lets a terminal obey them."""

import contextlib
import json
import re
import shutil

import numpy as np
import pytest

from ropaws import recipes
from ropaws.cli.main import main
from ropaws.run.config import to_json
from tests import photos

# Colors, a title for the window, a bell, a forged line, a carriage return, C1, text from right to left, and
# what rich would take for markup or an emoji.
PLAIN = "\x1b[31m\x1b]0;x\x07\n\r\x9b1m\u202e[red]:bomb:"
ODD = f"{PLAIN}\udcff"  # not UTF-8
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on images whose folders, classes and files have such names."""
    folder = tmp_path_factory.mktemp("odd")
    made = photos.make_photos(folder)
    for part in ("labeled", "test"):
        (made / part / "rows").rename(made / part / f"rows{ODD}")
    odd = made / f"pool{ODD}"
    (made / "pool").rename(odd)
    for path in sorted(odd.iterdir()):
        path.rename(odd / f"{ODD}{path.name}")
    (odd / f"broken{ODD}.png").write_bytes(b"no image")
    return folder / "run[" / f"b]{PLAIN}", made  # a path with [/b] in it


def shown(capfd, *arguments, code=0):
    """What a command prints; every line of it is one that we have printed."""
    capfd.readouterr()
    with contextlib.nullcontext() if code == 0 else pytest.raises(SystemExit, match=str(code)):
        main([str(argument) for argument in arguments])
    text = "".join(capfd.readouterr())
    assert not OBEYED.findall(text)
    assert not re.search(r"^\r?\\?x?9b1m", text, re.MULTILINE)  # what follows the line break in a name
    return text


def test_no_command_lets_a_name_reach_the_terminal_raw(trained, capfd, monkeypatch):
    run, made = trained
    monkeypatch.setenv("COLUMNS", "400")
    pool, labeled, test = made / f"pool{ODD}", made / "labeled", made / "test"
    sources = ("--labeled", labeled, "--unlabeled", pool, "--test", test)
    short = ("--backbone", "small", "--train.steps", 20)
    texts = [
        shown(capfd, "check", *sources),
        shown(capfd, "train", *sources, "--out", run, *short),
        shown(capfd, "evaluate", run),
        shown(capfd, "report", run),
        shown(capfd, "suggest", run),
        shown(capfd, "predict", run, pool, "--out", made / f"l{ODD}.csv", "--copy-to", made / f"s{ODD}"),
        shown(capfd, "train", *sources, "--out", run, *short, code=2),  # is there already
        shown(capfd, "evaluate", made / f"none{ODD}", code=2),
        shown(capfd, f"evaluate{ODD}", code=2),
    ]
    # A title as long as the path of a test may take several lines.
    assert [r"\x1b[31m" in "".join(text.split()) for text in texts] == [True] * len(texts)
    shown(capfd, "predict", run, pool, f"--{ODD}", "x", code=2)
    shown(capfd, "compare", run, shutil.copytree(run, made / f"other{PLAIN}"))
    assert any("[red]:bomb:" in text for text in texts)


def test_the_help_for_the_config_of_a_stranger(tmp_path, capfd):
    config = to_json(recipes.get("cifar10-25"))
    config["data"]["source"], config["data"]["root"] = PLAIN, f"root{PLAIN}"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="0"):
        main(["train", str(tmp_path / "config.json"), "--help-all"])
    text = capfd.readouterr().out
    assert not OBEYED.findall(text)
    assert text.count(r"\x1b[31m") >= 2


def test_features_of_images_with_such_names(trained, capfd, monkeypatch, tmp_path):
    _, made = trained
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / f"f{ODD}.npz"
    text = shown(capfd, "embed", made / f"pool{ODD}", "--labeled", made / "labeled", "--out", out)
    assert r"\x1b[31m" in text
    assert len(np.load(out)["features"]) == 45
