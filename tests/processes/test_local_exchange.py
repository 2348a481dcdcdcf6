"""Small messages through sockets; the processes are threads here."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ropaws.processes import local_exchange, shared_rooms
from ropaws.processes.gradient_exchange import MemoryLane
from ropaws.processes.local_exchange import LARGE, SMALL, LocalExchange, connect


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


@pytest.mark.parametrize("size", [2, 4])
def test_large_messages_go_through_memory(size):
    """In turn with small ones, and of many sizes: none may overwrite one that is still read."""

    def exchange(rank, tell_all):
        lane = connect(rank, size, tell_all, seconds=10)
        assert not lane.suits(torch.zeros(SMALL + 1, dtype=torch.uint8))
        lane.take_large()
        assert lane.suits(torch.zeros(LARGE, dtype=torch.uint8))
        assert not lane.suits(torch.zeros(LARGE + 1, dtype=torch.uint8))
        found = []
        for turn in range(40):
            count = (turn * 7919) % (LARGE // 64) + SMALL
            found.append(lane.stack(torch.full((count,), rank + 10 * turn)).double().mean(dim=1))
            found.append(lane.stack(torch.tensor([rank + 10.0 * turn], dtype=torch.double))[:, 0])
        lane.close()
        return found

    for found in run_together(size, exchange):
        for turn in range(40):
            expected = [float(rank + 10 * turn) for rank in range(size)]
            assert found[2 * turn].tolist() == found[2 * turn + 1].tolist() == expected


@pytest.mark.parametrize("lacking", ["file", "memory"])
def test_without_shared_memory_in_one_process_all_do_without(monkeypatch, lacking):
    def exchange(rank, tell_all):
        lane = connect(rank, 3, tell_all, seconds=10)
        lane.take_large()
        found = lane.suits(torch.zeros(SMALL + 1, dtype=torch.uint8))
        assert lane.stack(torch.tensor(rank)).tolist() == [0, 1, 2]  # nothing is left on the way
        lane.close()
        return found

    calls, lock = [], threading.Lock()

    def second_time(*_, **__):
        with lock:
            calls.append(1)
            if len(calls) == 2:
                raise OSError("no more")

    if lacking == "file":
        create = os.memfd_create
        monkeypatch.setattr(os, "memfd_create", lambda name: (second_time(), create(name))[1])
    else:
        fallible = type("mmap", (), {"mmap": staticmethod(lambda *a: (second_time(), real(*a))[1])})
        real = shared_rooms.mmap.mmap
        monkeypatch.setattr(shared_rooms, "mmap", fallible)
    assert run_together(3, exchange) == [False] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_through_memory_have_the_same_bits_everywhere(size):
    """Two lanes on one way, as when a model is trained twice; buckets of two types."""

    def exchange(rank, tell_all):
        way = connect(rank, size, tell_all, seconds=10)
        random = torch.Generator().manual_seed(rank)
        found = []
        for _ in range(2):
            kinds = (torch.float32, torch.float64)
            buckets = [[torch.nn.Parameter(torch.zeros(5, dtype=kind))] * 2 for kind in kinds]
            lane = MemoryLane(way, way.open_rooms(512), buckets)
            for _ in range(20):
                sent = [torch.randn(12, dtype=kind, generator=random) for kind in kinds]
                for number in (1, 0):
                    lane.send(number, [sent[number][:5], sent[number][5:]])
                found.append((sent, [lane.total(number).clone() for number in (1, 0)][::-1]))
                lane.done()
        way.close()
        return found

    everyone = run_together(size, exchange)
    for step, (_, totals) in enumerate(everyone[0]):
        for number, total in enumerate(totals):
            expected = sum(found[step][0][number] for found in everyone)
            assert all(torch.equal(found[step][1][number], expected) for found in everyone)
            assert total.dtype == expected.dtype


def test_a_process_that_does_not_answer_in_time_is_an_error():
    mine, theirs = socket.socketpair()
    with mine, theirs, pytest.raises(RuntimeError, match=r"process 1 does not answer .*waited 0 s"):
        LocalExchange(0, {1: mine}, seconds=0.05).stack(torch.zeros(3))


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
            LocalExchange(0, {1: mine}, seconds=10).stack(torch.zeros(3))


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
        LocalExchange(0, {1: mine}, seconds=10).stack(torch.zeros(3))
