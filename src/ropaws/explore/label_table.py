"""labels.csv: the answers as a table that `ropaws train --labeled` reads, written anew after each answer."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ropaws.core.files import replacing
from ropaws.pool.listing import write_csv

RETRY_SECONDS = 5.0
HEAD = ("path", "label", "out_of_class")
Row = tuple[str, str, bool]  # path, class name (empty: none), out-of-class


class LabelTable:
    """Writes the latest rows in a thread of its own, so that an answer does not wait for a long table.

    The log of answers is on disk before; a table that could not be written is tried again until it is.

    Args:
        path: The file; always whole.
        state: Called with a line when it cannot be written, and with None when it is written again.
    """

    def __init__(self, path: Path, state: Callable[[str | None], object]) -> None:
        self.path = path
        self._state = state
        self._latest: Sequence[Row] | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._follow, name="labels.csv", daemon=True)
        self._thread.start()

    def write(self, rows: Sequence[Row]) -> None:
        """These rows take the place of those before."""
        with self._changed:
            self._latest = rows
            self._changed.notify()

    def close(self) -> None:
        """Write what is waiting, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _follow(self) -> None:
        rows: Sequence[Row] | None = None  # that could not be written
        while True:
            with self._changed:
                if self._latest is None and not self._closing:
                    self._changed.wait(None if rows is None else RETRY_SECONDS)
                is_closing, latest, self._latest = self._closing, self._latest, None
            rows = rows if latest is None else latest
            if rows is not None:
                rows = None if self._write(rows) else rows
            if is_closing:
                return

    def _write(self, rows: Sequence[Row]) -> bool:
        try:
            write_table(self.path, rows)
        except (OSError, ValueError) as error:
            self._state(f"{self.path} could not be written ({error}); your answers are in the log")
            return False
        self._state(None)
        return True


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """A row for each answered image. An out-of-class image has no label, and so is unlabeled in training."""
    found = (
        dict(zip(HEAD, (name, label, str(outside)), strict=True)) for name, label, outside in sorted(rows)
    )
    with replacing(path) as temporary:
        if write_csv(temporary, found) == 0:
            temporary.write_text(",".join(HEAD) + "\n")
