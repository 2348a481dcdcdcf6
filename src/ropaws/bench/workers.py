"""Cells in worker processes: one that fails, or whose process is killed, does not stop the others."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, NoReturn, TypeVar

from ropaws.core.cores import available_cores

Item = TypeVar("Item")
PATIENCE = 30  # seconds in which a stopped worker saves what it has
STOPPED = 130  # exit code of a worker that has saved its work on Ctrl-C, as of a shell
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkResult(NamedTuple):
    """What became of an item."""

    number: int
    result: Any  # None if it failed
    reason: str  # why it failed, else empty
    details: str = ""  # the traceback of an unexpected error


class _Worker(NamedTuple):
    process: SpawnProcess
    pipe: Connection


def threads_of(workers: int) -> int:
    """Threads of each of several workers that share the cores of the machine."""
    return max(1, available_cores() // workers)


@contextmanager
def stopped_like_ctrl_c() -> Iterator[None]:
    """SIGTERM ends the workers too, instead of leaving them alone. Outside the main thread: no change."""

    def stop(_number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_all(
    work: Callable[[Item], Any],
    items: Sequence[Item],
    *,
    workers: int,
    started: Callable[[int], object],
) -> Iterator[WorkResult]:
    """The results of all items, each as soon as it is there.

    Args:
        work: A function that can be sent to another process.
        items: Its arguments.
        workers: Number of processes, with the cores of the machine shared out among them.
        started: Called with the number of an item that is begun.
    """
    context = multiprocessing.get_context("spawn")
    threads = threads_of(workers)
    waiting = list(range(len(items)))[::-1]
    busy: dict[Connection, tuple[_Worker, int]] = {}
    idle: list[_Worker] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = idle.pop() if idle else _start(context, work, threads)
                number = waiting.pop()
                worker.pipe.send(items[number])
                busy[worker.pipe] = (worker, number)
                started(number)
            ready = wait(list(busy))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                worker, number = busy.pop(pipe)
                try:
                    result, reason, details = pipe.recv()
                    idle.append(worker)
                except (EOFError, ConnectionError):
                    worker.process.join()
                    code = worker.process.exitcode or 0
                    if code == STOPPED:  # it noticed the Ctrl-C of all processes before this one did
                        raise KeyboardInterrupt from None
                    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
                    result, details = None, ""
                    reason = f"its process ended {how}; if memory ran out, use fewer --workers"
                yield WorkResult(number, result, reason, details)
    finally:
        _stop([*idle, *(worker for worker, _ in busy.values())])


def _start(context: Any, work: Callable[[Any], Any], threads: int) -> _Worker:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work), daemon=True)
    with _told(threads):
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _told(threads: int) -> Iterator[None]:
    """torch, scikit-learn and NumPy's BLAS read their number of threads when a new process loads them.

    Told to torch alone, the others would take every core in each worker, and wait for one another.
    """
    told = {name: str(threads) for name in THREADS if name not in os.environ}  # or the person has chosen
    os.environ.update(told)
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.pipe.close()
        if worker.process.is_alive():
            worker.process.terminate()  # training saves a checkpoint and ends
    for worker in workers:
        worker.process.join(PATIENCE)
        if worker.process.is_alive():
            worker.process.kill()


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process ends the others
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        while True:
            item = pipe.recv()
            pipe.send(_attempt(work, item))
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except (EOFError, BrokenPipeError):  # the first process needs no more
        pass


def _end_with(parent: int) -> None:
    """Stop when the first process is gone, however that ended: two might else write one run folder."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def _attempt(work: Callable[[Any], Any], item: Any) -> tuple[Any, str, str]:
    try:
        return work(item), "", ""
    except Exception as error:  # whatever a method raises is the row of its cell
        expected = isinstance(error, ValueError | OSError) or type(error).__name__ == "TrainingDivergedError"
        kind = "" if expected else f"{type(error).__name__}: "
        return None, f"{kind}{' '.join(str(error).split())}", "" if expected else traceback.format_exc()
