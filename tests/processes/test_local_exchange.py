"""Small messages through sockets; the processes are threads here."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ropaws.processes import local_exchange
from ropaws.processes.local_exchange import SMALL, LocalExchange, connect


def run_together(size, function):
    """function(rank, tell_all) of every process."""
    said, barrier = [None] * size, threading.Barrier(size)

    def run(rank):
        def tell_all(what):
            said[rank] = what
            barrier.wait(10)
            answers = list(said)
            barrier.wait(10)
            return answers

        return function(rank, tell_all)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("size", [2, 4])
def test_everyone_gets_the_tensors_of_all_in_their_order(size):
    kinds = (torch.float32, torch.bfloat16, torch.long, torch.bool)

    def exchange(rank, tell_all):
        lane = connect(rank, size, tell_all, seconds=10)
        found = []
        for turn in range(50):
            found += [lane.stack(torch.full((3, 2), rank + turn).to(kind)) for kind in kinds]
            found.append(lane.stack(torch.tensor(rank)))
            large = torch.full((SMALL // 4,), float(rank))
            assert lane.suits(large)
            found.append(lane.stack(large))
        lane.close()
        return found

    results = run_together(size, exchange)
    for turn in range(50):
        *small, scalar, large = results[0][turn * 6 : turn * 6 + 6]
        for kind, value in zip(kinds, small, strict=True):
            expected = torch.stack([torch.full((3, 2), rank + turn).to(kind) for rank in range(size)])
            assert torch.equal(value, expected)
        assert scalar.tolist() == list(range(size))
        assert large.mean(dim=1).tolist() == list(range(size))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_large_messages_are_for_others():
    lane = LocalExchange(0, {})
    assert lane.suits(torch.zeros(SMALL, dtype=torch.uint8))
    assert not lane.suits(torch.zeros(SMALL + 1, dtype=torch.uint8))


def test_a_process_that_cannot_be_reached_leaves_all_without():
    """As on another machine: none must wait for it."""

    def exchange(rank, tell_all):
        def elsewhere(what):
            answers = tell_all(what)
            return ["/nowhere/door", *answers[1:]] if rank == 2 and isinstance(answers[0], str) else answers

        return connect(rank, 3, elsewhere, seconds=10)

    assert run_together(3, exchange) == [None] * 3


def test_a_process_that_ends_while_others_wait_is_an_error():
    mine, theirs = socket.socketpair()

    def read_and_end():
        theirs.recv(12)
        theirs.close()

    with mine:
        threading.Thread(target=read_and_end).start()
        with pytest.raises(RuntimeError, match=r"process 1 does not answer .*it has ended"):
            LocalExchange(0, {1: mine}).stack(torch.zeros(3))


def test_a_path_that_no_socket_can_have_leaves_all_without(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(local_exchange.tempfile, "tempdir", str(long))
    assert run_together(2, lambda rank, tell_all: connect(rank, 2, tell_all, seconds=10)) == [None, None]


def test_a_process_that_has_ended_is_an_error():
    mine, theirs = socket.socketpair()
    theirs.sendall(b"\0\0")
    theirs.close()
    with mine, pytest.raises(RuntimeError, match="process 1 does not answer in the middle of a step"):
        LocalExchange(0, {1: mine}).stack(torch.zeros(3))
