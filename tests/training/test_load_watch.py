"""Cores that other programs keep busy, and what training says about it."""

import os
import subprocess
import sys
import time

import pytest
import torch

from ropaws.core import hardware
from ropaws.core.cores import CoreTimes, busy_elsewhere, core_times
from ropaws.core.files import read_json, write_json
from ropaws.core.hardware import LoadWatch, leave_room, threads_for
from ropaws.run.config import to_json
from tests import tiny

START = CoreTimes(moment=100.0, machine=5000.0, own=40.0)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def later(seconds, *, others, own):
    return CoreTimes(START.moment + seconds, START.machine + others + own, START.own + own)


def test_what_others_use_is_what_we_do_not():
    assert busy_elsewhere(START, later(10, others=12, own=7)) == pytest.approx(1.2)
    assert busy_elsewhere(START, later(10, others=-0.3, own=7)) == 0  # counters tick at different moments


def test_counters_of_the_system(tmp_path):
    stat = tmp_path / "stat"
    ticks = os.sysconf("SC_CLK_TCK")
    stat.write_text(f"cpu  {3 * ticks} {ticks} {2 * ticks} 999 888 0 {ticks} 0 {50 * ticks} 0\ncpu0 1 2 3\n")
    assert core_times(stat).machine == 7  # without idle, waiting, and guests, who are counted already
    assert core_times(tmp_path / "missing") is None


@pytest.mark.skipif(core_times() is None, reason="only Linux counts the time of its cores")
def test_a_program_beside_is_seen():
    before = core_times()
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.0)
        assert busy_elsewhere(before, core_times()) > 0.2  # a share of a core, however crowded they are
    finally:
        program.kill()
        program.wait()


@pytest.mark.usefixtures("two_threads")
def test_advice_is_given_once_and_only_when_it_is_true():
    watch = LoadWatch(START)
    assert watch.advice(later(5, others=10, own=1)) is None  # too early to say
    advice = watch.advice(later(12, others=12, own=9))
    assert "1.0 of" in advice
    assert "--train.threads 1" in advice
    assert watch.advice(later(30, others=30, own=9)) is None
    assert LoadWatch(START).advice(later(12, others=3, own=20)) is None  # nearly quiet


def test_one_thread_waits_for_nobody():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert LoadWatch(START).advice(later(12, others=20, own=9)) is None
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_fewer_threads_where_others_compute(monkeypatch):
    monkeypatch.setattr(hardware, "core_times", lambda: later(2, others=3.8, own=0.5))
    line = leave_room(START, {})
    assert torch.get_num_threads() == 1
    assert "1.9 of" in line
    assert "OMP_NUM_THREADS=2" in line


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("others", "environment"),
    [(0.4, {}), (3.8, {"OMP_NUM_THREADS": "2"}), (3.8, {"LOCAL_WORLD_SIZE": "2"})],
    ids=["quiet", "the user has chosen", "several processes"],
)
def test_all_threads_where_alone_or_chosen(monkeypatch, others, environment):
    monkeypatch.setattr(hardware, "core_times", lambda: later(2, others=others, own=0.5))
    assert leave_room(START, environment) is None
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_resumed_run_keeps_its_number_of_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(hardware, "own_cores", lambda _=None: 2)
    for asked, recorded, expected in [(None, 1, 1), (None, 64, 2), (2, 1, 2), (None, None, 2)]:
        with threads_for(asked, recorded):
            assert torch.get_num_threads() == expected


def test_the_command_computes_with_fewer_threads_beside_another(tmp_path):
    """The whole way: the load is seen while torch is loaded, and the run records the number."""
    if core_times() is None or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores and their counters")
    beside = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("OMP", "MKL"))}
    data = tiny.write_data(tmp_path / "data.npz")
    write_json(tmp_path / "config.json", to_json(tiny.config(data, steps=2)))
    command = [sys.executable, "-m", "ropaws", "train", "config.json", "--no-report", "--out", "run"]
    try:
        done = subprocess.run(command, cwd=tmp_path, env=plain, check=True, capture_output=True, text=True)
    finally:
        beside.kill()
        beside.wait()
    assert "cores busy" in done.stderr
    cores = len(os.sched_getaffinity(0))
    assert 1 <= read_json(tmp_path / "run" / "environment.json")["threads"] < cores
