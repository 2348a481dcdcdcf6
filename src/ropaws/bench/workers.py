"""Cells in worker processes: one that fails, or whose process is killed, does not stop the others."""

import functools
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

from ropaws.core.cores import available_cores
from ropaws.core.worker_pool import Worker, dump

Item = TypeVar("Item")
PATIENCE = 30  # seconds in which a stopped worker saves what it has


class WorkResult(NamedTuple):
    """What became of an item."""

    number: int
    result: Any  # None if it failed
    reason: str  # why it failed, else empty
    details: str = ""  # the traceback of an unexpected error


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
        work: A function of a module that another process can import.
        items: Its arguments.
        workers: Number of processes, with the cores of the machine shared out among them.
        started: Called with the number of an item that is begun.
    """
    function, threads = dump(functools.partial(_attempt, work)), max(1, available_cores() // workers)
    begun: list[Worker] = []
    idle: list[Worker] = []
    waiting, pending = deque(range(len(items))), set[Future[WorkResult]]()

    def attempt(number: int) -> WorkResult:
        """Raises KeyboardInterrupt where the worker has noticed one."""
        if idle:
            worker = idle.pop()
        else:
            begun.append(worker := Worker(function, threads=threads, saves=True))
        try:
            found = WorkResult(number, *worker.answer(items[number]))
        except OSError as lost:
            return WorkResult(number, None, str(lost))
        idle.append(worker)
        return found

    pool = ThreadPoolExecutor(workers)
    try:
        while waiting or pending:
            while waiting and len(pending) < workers:
                number = waiting.popleft()
                started(number)
                pending.add(pool.submit(attempt, number))
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    finally:
        for worker in begun:
            worker.ask_to_end()
        for worker in begun:
            worker.reap(PATIENCE)
        pool.shutdown()


def _attempt(work: Callable[[Any], Any], item: Any) -> tuple[Any, str, str]:
    try:
        return work(item), "", ""
    except Exception as error:  # whatever a method raises is the row of its cell
        expected = isinstance(error, ValueError | OSError) or type(error).__name__ == "TrainingDivergedError"
        kind = "" if expected else f"{type(error).__name__}: "
        return None, f"{kind}{' '.join(str(error).split())}", "" if expected else traceback.format_exc()
