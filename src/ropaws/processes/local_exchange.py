"""Small messages between the processes of one machine.

A norm layer exchanges a few hundred numbers, forward and backward, and the computation waits for them. gloo
hands a message through several threads of each process; here the thread that computes writes it into a
socket and reads those of the others (benchmarks/communication.py has the times of both).
"""

import contextlib
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

SMALL = 1 << 15  # bytes: two messages fit into the buffer of a socket, so that sending never waits
FEW = 8  # processes; each sends to each

RANK = struct.Struct("<i")


class LocalExchange:
    """One socket to each other process. All processes exchange the same messages in the same order."""

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.peers = peers

    def suits(self, value: Tensor) -> bool:
        return value.device.type == "cpu" and value.nbytes <= SMALL

    def stack(self, value: Tensor) -> Tensor:
        """The same-shaped tensor of every process.   (...)  ->  (processes, ...)"""
        together = value.new_empty((len(self.peers) + 1, *value.shape))
        together[self.rank] = value
        parts = [_flat_bytes(part) for part in together]
        for other, peer in self.peers.items():
            with _naming(other):
                peer.sendall(parts[self.rank])
        for other, peer in self.peers.items():
            with _naming(other):
                _receive(peer, parts[other])
        return together

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()


def _flat_bytes(value: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return value.view(-1).view(torch.uint8).numpy().data


def _receive(peer: socket.socket, room: memoryview) -> None:
    while room:
        count = peer.recv_into(room)
        if not count:
            raise ConnectionError("it has ended")
        room = room[count:]


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
    for peer in peers.values():
        peer.settimeout(seconds)
    return LocalExchange(rank, peers)


def _listen(door: socket.socket, path: str, size: int) -> str | None:
    """Where others may connect; None if the path is too long for a socket."""
    try:
        door.bind(path)
    except OSError:
        return None
    door.listen(size)
    return path
