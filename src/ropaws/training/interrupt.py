"""Ctrl-C and SIGTERM end training between two steps, so that the state saved is a whole one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Set by the first signal; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


@contextmanager
def stop_between_steps() -> Iterator[StopRequest]:
    """While inside, SIGINT and SIGTERM only leave a note. Outside the main thread: no change."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
