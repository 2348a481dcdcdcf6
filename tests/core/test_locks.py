"""Two writers of one folder: one writes, the other is told."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ropaws.bench.bench import Bench, run_bench
from ropaws.cli.main import main
from ropaws.core.files import LOCK, LockedError, locked
from ropaws.run.config import to_json
from tests import tiny
from tests.photos import fails

HOLD = """
import sys, time
from pathlib import Path
from ropaws.core.files import locked, locked_file
with (locked_file if sys.argv[2] == "file" else locked)(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder():
    """Starts processes that hold a lock."""
    started = []

    def hold(path, kind="folder"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path), kind], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_second_process_is_refused_and_told_by_whom(tmp_path, holder):
    process = holder(tmp_path / "run")
    with (
        pytest.raises(LockedError, match=f"run is being written by process {process.pid} on "),
        locked(tmp_path / "run"),
    ):
        pass


def test_a_lock_ends_with_its_process(tmp_path, holder):
    process = holder(tmp_path / "run")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "run" / LOCK).exists()  # left behind, and locks nothing
    with locked(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").joinpath(LOCK).exists()


def test_blocks_of_one_process_may_overlap(tmp_path):
    with locked(tmp_path):
        with locked(tmp_path):
            pass
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()


def test_the_lock_lasts_until_the_last_thread_has_left(tmp_path, holder):
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with locked(tmp_path):
            inside.set()
            leave.wait(30)

    with locked(tmp_path):
        thread = threading.Thread(target=stay)
        thread.start()
        inside.wait(30)
    assert (tmp_path / LOCK).exists()
    leave.set()
    thread.join()
    assert not (tmp_path / LOCK).exists()


def test_a_folder_that_stays_empty_is_removed(tmp_path):
    with locked(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a").exists()
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").touch()
    assert (tmp_path / "a" / "b" / "file").exists()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_planted_lock_file_is_not_used(tmp_path, kind):
    (tmp_path / "precious").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK).symlink_to(tmp_path / "precious") if kind == "link" else os.mkfifo(run / LOCK)
    with (
        pytest.raises(OSError, match="symbolic link" if kind == "link" else "not a regular file"),
        locked(run),
    ):
        pass
    assert (tmp_path / "precious").read_text() == "precious"


def test_the_lock_of_another_that_took_the_place_of_a_moved_folder_stays(tmp_path, holder):
    run = tmp_path / "run"
    with locked(run):
        run.rename(tmp_path / "moved")
        holder(run)
    assert (run / LOCK).exists()
    with pytest.raises(LockedError), locked(run):
        pass


def test_a_file_system_without_locks_is_written_without_one(tmp_path, monkeypatch):
    def refuse(*_arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        (tmp_path / "file").touch()


def config_file(folder, **train):
    config = tiny.config(tiny.write_data(folder / "data.npz"), **train)
    path = folder / "base.json"
    path.write_text(json.dumps(to_json(config)))
    return path


def test_of_two_trainings_into_one_folder_one_is_refused(tmp_path):
    """Both at once: one ends with 0, the other with 2, and the folder is of the one."""
    base = config_file(tmp_path, steps=60)
    words = [
        sys.executable,
        "-m",
        "ropaws",
        "train",
        str(base),
        "--out",
        str(tmp_path / "run"),
        "--no-report",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([*words, "--train.seed", str(seed)], **pipes) for seed in (1, 2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], said
    assert "is being written by" in said[codes.index(2)] or "holds a run already" in said[codes.index(2)]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["seed"] == (1, 2)[codes.index(0)]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 60
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_run_that_is_being_trained_is_neither_resumed_nor_evaluated(tmp_path, capsys, tiny_run, holder):
    run = tiny.copy(tiny_run, tmp_path / "run")
    holder(run)
    for words in (["train", "--resume", run], ["evaluate", run], ["finetune", run]):
        assert "is being written by" in fails(capsys, *words)


def test_two_predictions_into_one_table_are_refused(tmp_path, capsys, tiny_run, holder):
    out = tmp_path / "out.csv"
    holder(out, "file")
    words = ["predict", tiny_run, tiny_run.parent / "data.npz", "--out"]
    assert "out.csv is being written by" in fails(capsys, *words, out)
    main([*map(str, words), str(tmp_path / "other.csv")])
    assert not list(tmp_path.glob(".other*"))


def test_two_benches_in_one_folder_are_refused(tmp_path, holder):
    holder(tmp_path / "bench")
    bench = Bench(methods=("supervised",), seeds=1, steps=2, out=tmp_path / "bench")
    with pytest.raises(LockedError, match="bench is being written by"):
        run_bench(bench, None)


def test_a_page_is_whole_whenever_it_is_read(tmp_path, tiny_run):
    """While another process writes it again and again."""
    run = tiny.copy(tiny_run, tmp_path / "run")
    code = (
        "import sys\nfrom pathlib import Path\nfrom ropaws.report.run_page import write_report\n"
        "while True:\n    write_report(Path(sys.argv[1]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(run)])
    try:
        page, seen, deadline = run / "report.html", 0, time.monotonic() + 60
        while seen < 300 and time.monotonic() < deadline:
            if page.exists():
                assert page.read_text().endswith("</body></html>\n")
                seen += 1
    finally:
        process.kill()
        process.wait()
    assert seen == 300
