"""A function over many items, in worker processes that never import the caller's script.

multiprocessing imports the main module again in every process it spawns, so a script without a main
guard runs once more in each. Here a worker is a plain `python -m ropaws.core.worker_pool`. Only the standard
library is imported here, for a fast start; loading the function imports the rest.
"""

import atexit
import contextlib
import functools
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import IO, Any, NamedTuple, NoReturn, TypeVar

Message = list[bytes | bytearray | memoryview]  # a pickle, then the buffers of its arrays


def dump(value: object) -> Message:
    """A value as bytes; large arrays are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [data, *(buffer.raw() for buffer in buffers)]


def load(parts: Message) -> Any:
    return pickle.loads(parts[0], buffers=parts[1:])


def write(stream: IO[bytes], parts: Message) -> None:
    """Number of parts, length of each, then the parts themselves."""
    stream.write(struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts)))
    for part in parts:
        stream.write(part)
    stream.flush()


def read(stream: IO[bytes]) -> Message:
    """What `write` has written; EOFError where the other side is gone."""
    (count,) = struct.unpack("<Q", _read_exactly(stream, 8))
    lengths = struct.unpack(f"<{count}Q", _read_exactly(stream, 8 * count))
    return [_read_exactly(stream, length) for length in lengths]


def _read_exactly(stream: IO[bytes], length: int) -> bytearray:
    data = bytearray(length)  # not bytes: an array loaded from it can be written to
    if stream.readinto(data) < length:  # type: ignore[attr-defined]
        raise EOFError("the other side has closed the pipe")
    return data


def main() -> NoReturn:
    """Receive a function, then answer each item with (True, result) or (False, exception)."""
    # The parent decides what Ctrl-C and a scheduler's SIGTERM mean; a worker ends when its pipe closes.
    saves = SAVES in sys.argv
    for number in (signal.SIGINT,) if saves else (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    requests, answers = _take_pipes()
    messages: SimpleQueue[Message] = SimpleQueue()
    threading.Thread(target=_listen, args=(requests, messages, saves), daemon=True).start()
    function: Callable[[object], object]
    try:
        function = load(messages.get())
    except BaseException as error:
        function = functools.partial(_fail, error)
    while True:
        answer = _answer(function, messages.get())
        try:
            write(answers, answer)
        except OSError:  # the parent is gone
            os._exit(1)
        del answer  # frees the result while waiting for the next item


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """The pipes from and to the parent. From now on stdin is empty and stdout goes to stderr."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _listen(requests: IO[bytes], messages: SimpleQueue[Message], saves: bool) -> None:
    """Runs in a thread of its own: a parent that is gone is noticed in the middle of a call, too."""
    try:
        while True:
            messages.put(read(requests))
    finally:
        if not saves:
            os._exit(0)
        os.kill(os.getpid(), signal.SIGTERM)  # training saves a checkpoint and ends


def _answer(function: Callable[[object], object], request: Message) -> Message:
    try:
        return dump((True, function(load(request))))
    except BaseException as error:
        return dump((False, _portable(error)))


def _fail(error: BaseException, _item: object) -> NoReturn:
    raise error


def _portable(error: BaseException) -> BaseException:
    """The exception, or where it does not survive pickling a RuntimeError with its text."""
    where = "In a worker process:\n" + "".join(traceback.format_exception(error))
    try:
        survives = type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        survives = False
    if not survives:
        error = RuntimeError("".join(traceback.format_exception_only(error)).strip())
    error.add_note(where)
    return error


T = TypeVar("T")
R = TypeVar("R")

# torch, scikit-learn and NumPy's BLAS read these when a process loads them.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
SAVES = "--saves"


def map_in_workers(
    function: Callable[[T], R], items: Iterable[T], *, workers: int, ahead: int = 4
) -> Generator[R, None, None]:
    """function(item) for every item, in order, computed in `workers` processes.

    At most ahead * workers results are held. Function and items must be picklable; the function must be
    defined in an importable module, not in the main script. Closing the generator ends all workers at
    once, also in the middle of a call.
    """
    for name, value in (("workers", workers), ("ahead", ahead)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return _in_order(dump(function), items, workers, ahead * workers)


class _Call(NamedTuple):
    item: Any
    result: Future[Any]


def _in_order(
    function: Message, items: Iterable[Any], workers: int, at_most: int
) -> Generator[Any, None, None]:
    calls: SimpleQueue[_Call | None] = SimpleQueue()
    drivers: list[_Driver] = []
    pending: deque[Future[Any]] = deque()
    end = functools.partial(_end, drivers, calls)
    # A generator still open at exit would be closed after the interpreter has stopped the driver threads:
    # Python 3.13 would then wait for them forever.
    atexit.register(end)
    try:
        for item in items:
            pending.append(Future())
            calls.put(_Call(item, pending[-1]))
            if len(drivers) < workers:
                drivers.append(_Driver(function, calls))
                drivers[-1].start()
            if len(pending) == at_most:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        end()
        atexit.unregister(end)


def _end(drivers: Sequence["_Driver"], calls: SimpleQueue[_Call | None]) -> None:
    for driver in drivers:
        driver.worker.kill()
        calls.put(None)  # wakes one that waits for a call
    for driver in drivers:
        if driver.is_alive():
            driver.join()


class _Driver(threading.Thread):
    """Passes one worker process one call after the other.

    The process is started and reaped in this thread: KeyboardInterrupt is raised in the main thread
    only, so it cannot leave a process behind.
    """

    def __init__(self, function: Message, calls: SimpleQueue[_Call | None]) -> None:
        super().__init__(name="ropaws-worker", daemon=True)
        self.worker = Worker(function)
        self.calls = calls

    def run(self) -> None:
        while not self.worker.ended:
            call = self.calls.get()
            if call is None or self.worker.ended:
                break
            try:
                call.result.set_result(self.worker.answer(call.item))
            except BaseException as error:
                call.result.set_exception(error)
            del call  # it holds the result, which is the caller's now
        self.worker.reap(0)


class Worker:
    """A process that calls a function with one item after the other. It starts with the first item.

    Args:
        function: As `dump` has made it.
        threads: Of the libraries that it loads, unless the user's own settings say otherwise.
        saves: What is under way may save what it has when it is asked to end, as training does at SIGTERM.
    """

    def __init__(self, function: Message, *, threads: int = 1, saves: bool = False) -> None:
        self.function = function
        self.environment = dict.fromkeys(THREADS, str(threads))
        self.options = [SAVES] if saves else []
        self.process: subprocess.Popen[bytes] | None = None
        self.ended = False

    def answer(self, item: Any) -> Any:
        """What the function returns or raises; OSError where the process has ended instead."""
        messages = [dump(item)]
        if self.process is None:
            self.process = self._start()
            messages.insert(0, self.function)
            if self.ended:
                self.process.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            for message in messages:
                write(self.process.stdin, message)
            answer = read(self.process.stdout)
        except (OSError, EOFError):
            self.ended = True
            raise _lost(self.process) from None
        succeeded, value = load(answer)
        if not succeeded:
            raise value
        return value

    def kill(self) -> None:
        """End the process; one that is being started right now is killed by `answer`."""
        self.ended = True
        if self.process is not None:
            self.process.kill()

    def ask_to_end(self) -> None:
        """Close the pipe to the process; see saves."""
        self.ended = True
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def reap(self, seconds: float) -> None:
        """Wait until the process has ended; it is killed if that takes longer."""
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            if seconds:
                self.process.wait(seconds)
        self.process.kill()
        with contextlib.suppress(OSError), self.process:  # closes the pipes and waits
            pass

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(map(os.path.abspath, sys.path))  # "" is the current directory
        return subprocess.Popen(
            # -P: do not add the current directory to sys.path; -u: do not buffer what the function prints
            [sys.executable, "-P", "-u", "-m", "ropaws.core.worker_pool", *self.options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**self.environment, **os.environ, "PYTHONPATH": path},
            # Ctrl-C goes to the process group of the parent, so it cannot hit a worker that is starting up.
            process_group=0,  # POSIX; no effect on Windows
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows
        )


def _lost(process: subprocess.Popen[bytes]) -> OSError:
    """The error for a worker that has closed its pipe."""
    process.kill()  # in case it still runs; a dead process keeps its exit code
    code = process.wait()
    if code < 0:
        return OSError(
            f"a worker process ended unexpectedly (killed by signal {-code}); it may have run out of "
            "memory: use fewer workers (--data.workers; of a benchmark --workers)"
        )
    return OSError(f"a worker process ended unexpectedly (exit code {code}); see its output above")


if __name__ == "__main__":
    main()
