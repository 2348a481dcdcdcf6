"""labels.csv: the answers as a table that `ropaws train --labeled` reads, written anew after each answer."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ropaws.data.files.csv_cells import write_csv
from ropaws.runs.atomic import replacing

HEAD = ("path", "label", "out_of_class")
Row = tuple[str, str, bool]  # path, class name (empty: none), out-of-class


class LabelTable:
    """Writes the latest rows in a thread of its own, so that an answer does not wait for a long table.

    The log of answers is on disk before; a table that could not be written is written with the next answer.

    Args:
        path: The file; always whole.
        failed: Called with a line when it cannot be written.
    """

    def __init__(self, path: Path, failed: Callable[[str], object]) -> None:
        self.path = path
        self._failed = failed
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
        while True:
            with self._changed:
                while self._latest is None and not self._closing:
                    self._changed.wait()
                rows, self._latest = self._latest, None
            if rows is None:
                return
            try:
                write_table(self.path, rows)
            except (OSError, ValueError) as error:
                self._failed(f"{self.path} could not be written ({error}); your answers are in the log")


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """A row for each answered image. An out-of-class image has no label, and so is unlabeled in training."""
    found = (
        dict(zip(HEAD, (name, label, "yes" if outside else ""), strict=True))
        for name, label, outside in sorted(rows)
    )
    with replacing(path) as temporary:
        if write_csv(temporary, found) == 0:
            temporary.write_text(",".join(HEAD) + "\n")
