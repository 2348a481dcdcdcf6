"""Cores that other programs keep busy, and what training says about it."""

import os
import subprocess
import sys
import time

import pytest
import torch

from ropaws.core.cores import CoreTimes, busy_elsewhere, core_times
from ropaws.core.hardware import LoadWatch

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
