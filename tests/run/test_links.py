"""A stranger's run folder: links in it must not make a command write elsewhere."""

import contextlib
import os
import shutil

import pytest

import ropaws
from ropaws.cli.main import main
from tests import tiny

COMMANDS = {
    "evaluate": ["evaluate", "RUN"],
    "report": ["report", "RUN"],
    "suggest": ["suggest", "RUN", "--n", "5"],
    "resume": ["train", "--resume", "RUN"],
    "finetune": ["finetune", "RUN", "--rates", "0.1", "--epochs", "1"],
}
# Names of 0.1.0's temporary files, which could be foretold, and files that these commands write.
PLANTED = [
    ".report.html.tmp",
    ".evaluation.json.PID.tmp",
    "checkpoint.pt",
    "embeddings.safetensors",
    "evaluation.json",
    "gallery.json",
    "metrics.jsonl",
    "report.html",
    "split.txt",
]
WRITTEN = {
    "resume": ["checkpoint.previous.pt", "model.safetensors", "support.safetensors"],
    "finetune": ["finetune.json"],
}
PAIRS = [(command, name) for command in COMMANDS for name in [*PLANTED, *WRITTEN.get(command, [])]]
FOLDERS = [("finetune", "finetuned"), ("evaluate", "supervised"), ("resume", "snapshots")]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("links")
    run = ropaws.train(
        tiny.config(tiny.write_data(folder / "data.npz"), steps=4, keep_every=2), folder / "run"
    )
    main(["report", str(run)])
    (run / "finetune.json").write_text("{}")
    return run


@pytest.fixture
def run(evaluated, tmp_path):
    return shutil.copytree(evaluated, tmp_path / "run")


def state(path):
    return path.read_bytes(), path.stat().st_mtime_ns


def outcome(command, run, capsys):
    """What was said on stderr; an error is one line at its end, and exit code 2."""
    arguments = [str(run) if word == "RUN" else word for word in COMMANDS[command]]
    capsys.readouterr()
    code = 0
    try:
        main(arguments)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code in (0, 2)
    assert code == 0 or said.splitlines()[-1].startswith("ropaws: ")
    return said


@pytest.mark.parametrize(("command", "name"), PAIRS)
def test_a_planted_link_is_not_written_through(run, tmp_path, capsys, command, name):
    """The file behind the link is what the command expects there, or something precious."""
    precious = tmp_path / "precious"
    if command == "resume" and name != "checkpoint.pt":  # half of the steps are left
        shutil.copy(run / "checkpoint.previous.pt", run / "checkpoint.pt")
    link = run / name.replace("PID", str(os.getpid()))
    if link.exists():
        link.rename(precious)
    else:
        precious.write_text("precious\n")
    link.symlink_to(precious)
    before = state(precious)
    said = outcome(command, run, capsys)
    assert state(precious) == before
    if name in WRITTEN.get(command, []):
        assert "is a symbolic link" in said


@pytest.mark.parametrize(
    "name", ["evaluation.json", "gallery.json", "metrics.jsonl", "embeddings.safetensors"]
)
def test_a_link_to_any_file_is_not_written_through(run, tmp_path, capsys, name):
    precious = tmp_path / "precious"
    precious.write_text("precious\n")
    (run / name).unlink()
    (run / name).symlink_to(precious)
    before = state(precious)
    for command in ("evaluate", "report", "suggest", "resume"):
        outcome(command, run, capsys)
    assert state(precious) == before


@pytest.mark.parametrize("content", ["nothing", "a file", "a run"])
@pytest.mark.parametrize(("command", "name"), FOLDERS)
def test_a_planted_link_to_a_folder_is_not_filled(run, tmp_path, capsys, monkeypatch, command, name, content):
    elsewhere = tmp_path / "elsewhere"
    if content == "a run":
        shutil.copytree(run, elsewhere)
        (elsewhere / "model.safetensors").unlink()  # as if it were to be resumed
    else:
        elsewhere.mkdir()
        (elsewhere / "config.json").write_text("precious\n")
        if content == "nothing":
            (elsewhere / "config.json").unlink()
    before = {path: state(path) for path in elsewhere.rglob("*") if path.is_file()}
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(elsewhere)
    if command == "evaluate":
        monkeypatch.setitem(COMMANDS, "evaluate", ["evaluate", "RUN", "--only", "supervised"])
    if command == "resume":  # from a step before the last snapshot
        (run / "checkpoint.previous.pt").replace(run / "checkpoint.pt")
    assert "is a symbolic link" in outcome(command, run, capsys)
    assert {path: state(path) for path in elsewhere.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "name", ["config.json", "data.json", "metrics.jsonl", "checkpoint.pt", "model.safetensors"]
)
def test_a_new_run_is_not_written_through_links(tmp_path, name):
    """A folder that was prepared by someone else, without a config."""
    config = tiny.config(tiny.write_data(tmp_path / "data.npz"), steps=1)
    precious, run = tmp_path / "precious", tmp_path / "run"
    run.mkdir()
    precious.write_text("precious\n")
    (run / name).symlink_to(precious)
    before = state(precious)
    with contextlib.suppress(OSError):
        ropaws.train(config, run)
    assert state(precious) == before
