"""A worker process of worker_pool.py, and the messages it exchanges with its parent.

Only the standard library is imported here, for a fast start; loading the function imports the rest.
"""

import functools
import os
import pickle
import signal
import struct
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, Any, NoReturn

Parts = list[bytes | bytearray | memoryview]  # a pickle, then the buffers of its arrays


def dump(value: object) -> Parts:
    """A value as bytes; large arrays are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [data, *(buffer.raw() for buffer in buffers)]


def load(parts: Parts) -> Any:
    return pickle.loads(parts[0], buffers=parts[1:])


def write(stream: IO[bytes], parts: Parts) -> None:
    """Number of parts, length of each, then the parts themselves."""
    stream.write(struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts)))
    for part in parts:
        stream.write(part)
    stream.flush()


def read(stream: IO[bytes]) -> Parts:
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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    requests, answers = _take_pipes()
    messages: SimpleQueue[Parts] = SimpleQueue()
    threading.Thread(target=_listen, args=(requests, messages), daemon=True).start()
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


def _listen(requests: IO[bytes], messages: SimpleQueue[Parts]) -> None:
    """Runs in a thread of its own: a parent that is gone is noticed in the middle of a call, too."""
    try:
        while True:
            messages.put(read(requests))
    finally:
        os._exit(0)


def _answer(function: Callable[[object], object], request: Parts) -> Parts:
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


if __name__ == "__main__":
    main()
