"""Worker processes: order, bounds, errors, and that none outlives its parent."""

import functools
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ropaws.core.worker_pool import map_in_workers
from ropaws.pool.decoding import FIRST_SECONDS, in_workers

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
SLOW = 60  # seconds: a call that only ends when it is killed

# A script that prints the process ids of its workers, then waits for them.
SLEEPING = f"""
from ropaws.core.worker_pool import map_in_workers
from tests.pool.files.test_worker_pool import pid_then_sleep
for pid in map_in_workers(pid_then_sleep, [0, 0, {SLOW}, {SLOW}], workers=2):
    print(pid, flush=True)
"""


class TwoArgumentError(Exception):
    """Can be pickled, but not loaded again."""

    def __init__(self, place, reason):
        super().__init__(f"{place}: {reason}")


class BadPictureError(ValueError):
    def __init__(self, name):
        super().__init__(name)
        self.name = name


def slow_when_even(item):
    time.sleep(0.05 if item % 2 == 0 else 0)
    return item


def plus_one(array):
    array += 1  # in place: it must be writable
    return array


def pid_then_sleep(seconds):
    time.sleep(seconds)
    return os.getpid()


def raise_it(kind):
    raise {"custom": BadPictureError, "unloadable": functools.partial(TwoArgumentError, "a.jpg")}[kind]("bad")


def interrupted(item):
    os.kill(os.getpid(), signal.SIGINT)
    return item


def killed(_item):
    os.kill(os.getpid(), signal.SIGKILL)


def noisy(item):
    print("hello", item)
    os.system("echo from a child")
    os.write(1, b"straight to the file\n")
    return item, sys.stdin.read()


def children():
    """Processes whose parent is this one, zombies included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def drivers():
    return [thread for thread in threading.enumerate() if thread.name == "ropaws-worker"]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end_within(seconds, pids):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(map(is_running, pids)):
            return True
        time.sleep(0.02)
    return False


def start_script(text, folder, **options):
    path = folder / "script.py"
    path.write_text(text)
    return subprocess.Popen(
        [sys.executable, path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_results_come_in_order_whatever_finishes_first():
    assert list(map_in_workers(slow_when_even, range(12), workers=2)) == list(range(12))


def test_no_items_no_workers(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert list(map_in_workers(abs, [], workers=8)) == []


def test_no_more_workers_than_items(monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **o: started.append(popen(*a, **o)) or started[-1])
    assert list(map_in_workers(abs, [-1, -2], workers=8)) == [1, 2]
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_items_are_consumed_no_further_ahead_than_the_bound():
    taken = []
    results = map_in_workers(abs, (taken.append(i) or i for i in range(100)), workers=2, ahead=3)
    assert taken == []  # nothing before the first result is asked for
    for position, result in enumerate(results):
        assert position == result
        assert len(taken) <= position + 2 * 3


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 1, "ahead": 0}])
def test_impossible_numbers_are_named_at_the_call(options):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        map_in_workers(abs, [], **options)


def test_arrays_come_back_equal_and_writable():
    rng = np.random.default_rng(0)
    sent = [rng.integers(0, 255, shape, dtype=np.uint8) for shape in ((32, 224, 224, 3), (0, 3), ())]
    sent += [sent[0][:, ::2, ::3], np.asfortranarray(sent[0][0])]
    for before, after in zip(sent, map_in_workers(plus_one, sent, workers=1), strict=True):
        np.testing.assert_array_equal(after, before + np.uint8(1))
        after += 1


def test_an_error_keeps_its_type_and_its_attributes_and_tells_where_it_was_raised():
    with pytest.raises(BadPictureError) as caught:
        list(map_in_workers(raise_it, ["custom"], workers=1))
    assert caught.value.name == "bad"
    assert "in raise_it" in "".join(caught.value.__notes__)


def test_an_error_that_cannot_be_pickled_keeps_its_text():
    with pytest.raises(RuntimeError, match=r"TwoArgumentError: a\.jpg: bad"):
        list(map_in_workers(raise_it, ["unloadable"], workers=1))


def test_results_before_an_error_are_delivered():
    results = map_in_workers(functools.partial(operator.truediv, 6), [1, 2, 0, 3], workers=2)
    assert [next(results), next(results)] == [6, 3]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not drivers()


def test_what_cannot_be_sent_is_an_error_on_either_side():
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        map_in_workers(lambda item: item, [1], workers=1)
    with pytest.raises(TypeError, match="pickle"):
        list(map_in_workers(abs, [threading.Lock()], workers=1))
    with pytest.raises(TypeError, match="pickle"):
        list(map_in_workers(open, [os.devnull], workers=1))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals")
def test_a_killed_worker_is_one_clear_error():
    with pytest.raises(OSError, match=r"killed by signal 9\); it may have run out of memory: use fewer"):
        list(map_in_workers(killed, range(5), workers=2))
    with pytest.raises(OSError, match="exit code 3"):
        list(map_in_workers(os._exit, [3, 3, 3], workers=1))


def test_what_the_function_prints_goes_to_stderr(capfd):
    assert list(map_in_workers(noisy, range(2), workers=1)) == [(0, ""), (1, "")]
    out, err = capfd.readouterr()
    assert out == ""
    for text in ("hello 0\n", "hello 1\n", "from a child\n", "straight to the file\n"):
        assert text in err


def test_threads_of_libraries_are_one_unless_set(monkeypatch):
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS"]
    assert list(map_in_workers(os.getenv, names, workers=1)) == ["1", "7"]


@pytest.mark.skipif(os.name == "nt", reason="process groups are a POSIX thing")
def test_ctrl_c_in_a_terminal_does_not_reach_a_worker():
    assert list(map_in_workers(os.getpgid, [0], workers=1)) != [os.getpgid(0)]


def test_a_worker_ignores_ctrl_c():
    assert list(map_in_workers(interrupted, [1, 2], workers=1)) == [1, 2]


@linux
def test_closing_early_ends_workers_in_the_middle_of_a_call():
    before = children()
    results = map_in_workers(pid_then_sleep, [0, SLOW, SLOW, SLOW], workers=2)
    pid = next(results)
    assert pid in children()
    start = time.monotonic()
    results.close()
    assert time.monotonic() - start < 2
    assert children() <= before
    assert not drivers()


@pytest.fixture
def interruptible():
    """A shell starts background jobs with SIGINT ignored, and Python keeps it so, here and in scripts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@linux
def test_an_interrupt_while_waiting_ends_workers(interruptible):
    before = children()
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        list(map_in_workers(time.sleep, [SLOW] * 4, workers=2))
    timer.join()
    assert children() <= before
    assert not drivers()


@linux
@pytest.mark.parametrize("how", ["SIGINT to the group", "SIGKILL to the parent"])
def test_workers_end_with_their_parent(how, tmp_path, interruptible):
    with start_script(SLEEPING, tmp_path, process_group=0) as process:
        pids = {int(process.stdout.readline()), int(process.stdout.readline())}
        assert any(map(is_running, pids))
        if how == "SIGINT to the group":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.kill()
        assert end_within(5, pids)
        _, errors = process.communicate(timeout=5)
    # Only the parent has something to say, and only about an interrupt.
    assert errors.count("Traceback") == ("SIGINT" in how)


def test_a_script_without_main_guard_runs_once(tmp_path):
    text = """
import math
from ropaws.core.worker_pool import map_in_workers
print("once")
print(sum(map_in_workers(math.factorial, range(6), workers=2)))
"""
    with start_script(text, tmp_path) as process:
        assert process.communicate(timeout=10) == ("once\n154\n", "")


@pytest.mark.parametrize("last_line", ["", "1 / 0"])
def test_a_generator_left_open_does_not_hold_up_the_end_of_a_script(last_line, tmp_path):
    text = f"""
import time
from ropaws.core.worker_pool import map_in_workers
results = map_in_workers(time.sleep, [0, {SLOW}, {SLOW}], workers=2)
for _ in results:
    break
{last_line}
"""
    with start_script(text, tmp_path) as process:
        _, errors = process.communicate(timeout=5)
    assert errors.count("Traceback") == (last_line == "1 / 0")


def test_the_worker_itself_loads_nothing_heavy():
    code = "import sys, ropaws.core.worker_pool; print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_workers_that_read_images_do_not_load_torch():
    """It takes a second of each worker; no function of the others needs it for central squares."""
    code = "import sys, ropaws.pool.decoding; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_workers_are_started_once_the_work_takes_longer_than_their_start():
    assert set(in_workers(pid_then_sleep, [0] * 100, workers=2)) == {os.getpid()}
    pids = list(in_workers(pid_then_sleep, [FIRST_SECONDS / 2] * 2 + [0] * 98, workers=2))
    assert set(pids[:2]) == {os.getpid()}
    assert len(pids) == 100
    assert os.getpid() not in pids[2:]
