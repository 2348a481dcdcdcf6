"""Memory that the processes of one machine share: each writes into its own room and reads those of all."""

import contextlib
import mmap
import os
from collections.abc import Sequence


class Rooms:
    """One room of the same size for each process, in their order."""

    def __init__(self, rank: int, maps: Sequence[mmap.mmap]) -> None:
        self._maps = maps
        self.of = [memoryview(each) for each in maps]
        self.own = self.of[rank]

    def close(self) -> None:
        """Give the memory back; what someone still looks at goes with them."""
        for view, each in zip(self.of, self._maps, strict=True):
            with contextlib.suppress(BufferError):
                view.release()
                each.close()


def new_room(nbytes: int) -> int | None:
    """An open file without a name, in memory; None where the system has no such files."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.memfd_create("ropaws")
    except OSError:
        return None
    os.ftruncate(file, nbytes)
    return file


def see_rooms(rank: int, files: Sequence[int | None], nbytes: int) -> Rooms | None:
    """The rooms behind the files, which are closed; None if one is missing or cannot be mapped."""
    given = [file for file in files if file is not None]
    try:
        if len(given) < len(files):
            return None
        return Rooms(rank, [mmap.mmap(file, nbytes) for file in given])
    except (OSError, ValueError):  # no memory, or a limit of this process
        return None
    finally:
        for file in given:
            os.close(file)
