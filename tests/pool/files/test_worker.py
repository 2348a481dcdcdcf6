"""A worker process by itself: which signals it leaves to its parent, and what ends it."""

import operator
import signal
import subprocess
import sys

import pytest

from ropaws.core.worker_pool import dump, load, read, write


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_ignores_signals_and_ends_when_its_pipe_closes(number):
    command = [sys.executable, "-m", "ropaws.core.worker_pool"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        write(worker.stdin, dump(operator.neg))
        for item in (3, 4):
            write(worker.stdin, dump(item))
            assert load(read(worker.stdout)) == (True, -item)
            worker.send_signal(number)
        worker.stdin.close()
        assert worker.wait(timeout=20) == 0
