"""Starting worker processes from any program, also one without a main guard, and under Ctrl-C."""

import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting_workers() -> Iterator[None]:
    """While inside, new processes import neither the caller's script nor see Ctrl-C.

    A spawned process imports the main module again, to find functions in it; ours are all in ropaws. A
    script without `if __name__ == "__main__"` would run, and train, once more in every worker. Ctrl-C
    is held back until the start is over and is inherited as blocked: the parent decides what it means.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    hold_back = hasattr(signal, "pthread_sigmask") and threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hold_back else None
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
