"""Messages between the processes of one machine that compute on its CPU.

A norm layer exchanges a few hundred numbers, forward and backward, and the computation waits for them. gloo
hands a message through several threads of each process; here the thread that computes writes it into a
socket, or into memory that the others see, and reads theirs (benchmarks/communication.py has the times).
"""

import contextlib
import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ropaws.processes import cores
from ropaws.processes.shared_rooms import Rooms, new_room, see_rooms

SMALL = 1 << 15  # bytes: two messages fit into the buffer of a socket, so that sending never waits
LARGE = 1 << 22  # bytes; what is larger is left to gloo
FEW = 8  # processes; each sends to each
SPIN = 2e-4  # seconds in which an answer is asked for before the process sleeps: waking takes as long

RANK = struct.Struct("<i")
SIGN = b"!"  # that a message lies in a room


class LocalExchange:
    """One socket to each other process. All processes exchange the same messages in the same order.

    seconds: that one waits for another.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], *, seconds: float) -> None:
        self.rank = rank
        self.peers = peers
        self.seconds = seconds
        self._rooms: Rooms | None = None
        self._turn = 0
        # Whoever spins on a core that another process needs keeps it from answering.
        self._spin = SPIN if len(peers) < cores.available_cores() else 0.0
        for peer in peers.values():
            peer.setblocking(False)

    def open_rooms(self, nbytes: int) -> Rooms | None:
        """Memory of every process that all of them see; None in every one if one of them cannot."""
        rooms = see_rooms(self.rank, self._pass_files(new_room(nbytes)), nbytes)
        if bool(self.stack(torch.tensor(rooms is not None)).all()):
            return rooms
        if rooms is not None:
            rooms.close()
        return None

    def take_large(self) -> None:
        """Let messages of up to LARGE bytes go through memory, where that can be had."""
        self._rooms = self.open_rooms(2 * LARGE)

    def suits(self, value: Tensor) -> bool:
        limit = SMALL if self._rooms is None else LARGE
        return value.device.type == "cpu" and value.nbytes <= limit

    def stack(self, value: Tensor) -> Tensor:
        """The same-shaped tensor of every process.   (...)  ->  (processes, ...)"""
        together = value.new_empty((len(self.peers) + 1, *value.shape))
        together[self.rank] = value
        everything = together.view(-1).view(torch.uint8).numpy().data
        parts = [everything[k * value.nbytes : (k + 1) * value.nbytes] for k in range(len(together))]
        if value.nbytes <= SMALL:
            self.send(parts[self.rank])
            for other in self.peers:
                self.receive(other, parts[other])
        else:
            self._stack_in_rooms(parts)
        return together

    def _stack_in_rooms(self, parts: list[memoryview]) -> None:
        """In two halves by turns: who writes its next message has read the one before, which may go."""
        assert self._rooms is not None
        start, count = LARGE * self._turn, len(parts[0])
        self._turn = 1 - self._turn
        self._rooms.own[start : start + count] = parts[self.rank]
        self.send(SIGN)
        for other in self.peers:
            self.receive(other)
            parts[other][:] = self._rooms.of[other][start : start + count]

    def send(self, message: bytes | memoryview) -> None:
        """To all others."""
        for other, peer in self.peers.items():
            with _naming(other):
                rest = memoryview(message)
                while rest:
                    try:
                        rest = rest[peer.send(rest) :]
                    except BlockingIOError:  # it has not read what came before
                        self._sleep([], [peer])

    def receive(self, other: int, room: memoryview | None = None) -> None:
        """Fill the room with what another process has sent; without one, wait for its sign."""
        room = memoryview(bytearray(len(SIGN))) if room is None else room
        peer, end = self.peers[other], time.perf_counter() + self._spin
        with _naming(other):
            while room:
                try:
                    count = peer.recv_into(room)
                except BlockingIOError:
                    if time.perf_counter() > end:
                        self._sleep([peer], [])
                    continue
                if not count:
                    raise ConnectionError("it has ended")
                room = room[count:]

    def _sleep(self, readable: list[socket.socket], writable: list[socket.socket]) -> None:
        if not any(select.select(readable, writable, [], self.seconds)):
            raise TimeoutError(f"waited {self.seconds:.0f} s")

    def _pass_files(self, own: int | None) -> list[int | None]:
        """The open files of all processes, or None for one that has none."""
        files: list[int | None] = [own] * (len(self.peers) + 1)
        for other, peer in self.peers.items():
            with _naming(other):
                socket.send_fds(peer, [SIGN], [] if own is None else [own])
        for other, peer in self.peers.items():
            with _naming(other):
                self._sleep([peer], [])
                _, found, *_ = socket.recv_fds(peer, len(SIGN), 1)
                files[other] = found[0] if found else None
        return files

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        if self._rooms is not None:
            self._rooms.close()


@contextlib.contextmanager
def _naming(other: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"process {other} does not answer in the middle of a step ({error})") from None


def connect(
    rank: int, size: int, tell_all: Callable[[Any], list[Any]], *, seconds: float
) -> LocalExchange | None:
    """Connect the processes if all of them can reach one another; else None in every one.

    tell_all: gives what every process has said, in their order. seconds: that one waits for another.
    """
    if size > FEW or not hasattr(socket, "AF_UNIX"):
        return None
    peers: dict[int, socket.socket] = {}
    # Only this user may enter a folder that mkdtemp makes, so nobody else can connect.
    with tempfile.TemporaryDirectory(prefix="ropaws-") as folder, socket.socket(socket.AF_UNIX) as door:
        paths = tell_all(_listen(door, os.path.join(folder, "door"), size))
        reached = all(paths)
        with contextlib.suppress(OSError):  # on another machine, or out of sight
            for other in range(rank if reached else 0):
                reached = False
                peers[other] = socket.socket(socket.AF_UNIX)
                peers[other].connect(paths[other])
                peers[other].sendall(RANK.pack(rank))
                reached = True
        if all(tell_all(reached)):  # every connection waits at the door by now
            for _ in range(rank + 1, size):
                peer, _address = door.accept()
                peers[RANK.unpack(peer.recv(RANK.size, socket.MSG_WAITALL))[0]] = peer
        else:
            for peer in peers.values():
                peer.close()
            return None
    return LocalExchange(rank, peers, seconds=seconds)


def _listen(door: socket.socket, path: str, size: int) -> str | None:
    """Where others may connect; None if the path is too long for a socket."""
    try:
        door.bind(path)
    except OSError:
        return None
    door.listen(size)
    return path
