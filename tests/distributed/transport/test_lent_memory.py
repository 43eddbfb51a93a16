"""Large tensors between processes of one machine over ZeroMQ: read where they are, and nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import zmq

import torchopt_dist as todist
from tests.distributed.transport.by_hand import ENCRYPTED, TRANSPORTS
from tests.processes import World
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.serialization import frames
from torchopt_dist.distributed.transport import lent_memory
from torchopt_dist.distributed.transport.contacts import Endpoint
from torchopt_dist.distributed.transport.mesh import Mesh

ZMQ = TRANSPORTS["zmq"]
ELEMENTS = 1 << 19  # 2 MiB
state = torch.ones(ELEMENTS)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not lent_memory.can_lend(), reason="this system reads no other process's memory"),
]


@contextlib.contextmanager
def two_meshes():
    """Ends of rank 0 and 1 of a group, both in this process."""
    contexts = [zmq.Context() for _ in range(2)]
    ends = [Endpoint(rank) for rank in range(2)]
    for end, context in zip(ends, contexts, strict=True):
        end.open(context)
    contacts = [end._listen_at_path() for end in ends]
    meshes = [Mesh(*each, contacts) for each in zip(contexts, ends, strict=True)]
    try:
        yield meshes
    finally:
        for mesh, end, context in zip(meshes, ends, contexts, strict=True):
            mesh.close_all()
            end.remove_folder()
            context.destroy(linger=0)


def test_frames_that_are_lent_are_copied_when_they_are_received():
    with two_meshes() as (here, there):
        lent = memoryview(bytearray(lent_memory.LARGE))
        here.send(1, [b"a message", lent, b"and more"])
        rank, first, got = there.receive()
        assert (rank, first) == (0, b"a message")
        lent[0] = 1
        assert got == [bytes(lent_memory.LARGE), b"and more"]
        assert here._links[1].lends
        there.send(0, [b"an answer"])
        assert here.receive()[:2] == (1, b"an answer")
        assert not here._links[1].kept  # the memory is the sender's alone again


def test_frames_that_are_not_lent_go_in_pieces():
    with two_meshes() as (here, there):
        here._links[1].lends = False
        here.send(1, [b"a message", memoryview(bytearray(2 * frames.PIECE + 5)), b"and more"])
        _, *pieces = there._here.socket.recv_multipart()
        assert [*map(len, pieces)] == [frames.PIECE, frames.PIECE, 5, len(b"and more")]


def test_what_cannot_be_read_comes_in_frames_and_so_does_all_that_follows(monkeypatch):
    large = memoryview(b"x" * lent_memory.LARGE)
    stale = lent_memory.new_token()
    loan = lent_memory.lend([large], stale)
    lent_memory.erase(stale)
    monkeypatch.setattr(lent_memory, "lend", lambda frames, token: loan)
    with two_meshes() as (here, there):
        hears = threading.Thread(target=here.receive, daemon=True)
        hears.start()
        for number in range(4):
            here.send(1, [b"%d" % number, large])
            if number == 2:
                assert [there.receive() for _ in range(3)] == [(0, b"%d" % n, [large]) for n in range(3)]
                assert not here._links[1].lends
        assert there.receive() == (0, b"3", [large])
        there.send(0, [b"an end"])
        hears.join()


def test_memory_of_a_link_that_is_closed_is_lent_no_more():
    large = bytes(100)
    with two_meshes() as (here, _):
        loan = lent_memory.lend([large], here._links[1].token)
        assert [*map(bytes, lent_memory.read(loan))] == [large]
        here.close(1)
        with pytest.raises(OSError, match="does not lend this memory"):
            lent_memory.read(loan)


def test_memory_of_a_process_that_has_ended_cannot_be_read(monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(os, "getpid", lambda: ended.pid)
    token, large = lent_memory.new_token(), bytes(100)
    with pytest.raises(OSError, match=f"process {ended.pid} cannot be read"):
        lent_memory.read(lent_memory.lend([large], token))


@pytest.mark.parametrize(("scope", "asked"), [("1\n", True), ("0\n", False), ("2\n", False), (None, False)])
def test_only_where_ancestors_alone_may_read_a_process_its_siblings_are_let(
    monkeypatch, tmp_path, scope, asked
):
    """Whom it lets are the descendants of its parent; the kernel here may not have that rule."""
    calls = []

    class Library:
        def prctl(self, option, process, *rest):
            calls.append((option, process.value, rest))

    if scope is not None:
        (tmp_path / "scope").write_text(scope)
    monkeypatch.setattr(lent_memory, "_YAMA", tmp_path / "scope")
    monkeypatch.setattr(lent_memory, "_LIBRARY", Library())
    lent_memory.let_siblings_read()
    assert calls == [(lent_memory.PR_SET_PTRACER, os.getppid(), (0, 0, 0))] * asked


def count_loans():
    """How many loans this process has read since it was first asked."""
    if not hasattr(lent_memory.read, "count"):
        usual = lent_memory.read

        def read(loan):
            read.count += 1
            return usual(loan)

        read.count = 0
        lent_memory.read = read
    return lent_memory.read.count


def refuse_loans():
    def read(loan):
        del loan
        raise PermissionError("another process's memory")

    lent_memory.read = read


def times(x, factor, changed):
    changed.zero_()
    return x * factor


def its_state():
    return state


def derivatives():
    x = torch.linspace(0, 1, ELEMENTS, requires_grad=True)
    factor = torch.linspace(1, 2, ELEMENTS, requires_grad=True)
    ones = torch.ones(ELEMENTS)
    (y,) = todist.remote_sync_call(times, args=(x, factor, ones), partitioner=1)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    first.sum().backward()
    assert torch.equal(y, x * factor)
    assert torch.equal(first, 2 * x * factor * factor)
    assert torch.allclose(factor.grad, 4 * x * factor)
    assert (ones == 1).all()


@pytest.mark.parametrize(("environment", "lent"), [(ZMQ, True), (ENCRYPTED, False)], ids=["near", "over TCP"])
def test_values_derivatives_and_changes_are_those_of_frames(world, environment, lent):
    def body():
        counts = count_loans(), todist.remote_call(count_loans, 1)
        derivatives()
        got = todist.remote_call(its_state, 1)
        got.zero_()
        assert (todist.remote_call(its_state, 1) == 1).all()
        assert counts == (0, 0)
        return count_loans() > 0, todist.remote_call(count_loans, 1) > 0

    assert world(2, env=environment).on_zero(body) == (lent, lent)


@pytest.mark.parametrize("refusing", [(0,), (1,), (0, 1)], ids=str)
def test_where_a_process_may_not_read_another_one_calls_go_on(world, refusing):
    def body():
        if todist.get_rank() in refusing:
            refuse_loans()
        todist.barrier()
        if todist.get_rank() == 0:
            for _ in range(3):
                derivatives()
        todist.barrier()
        (other,) = {0, 1} - {todist.get_rank()}
        return current_group().transport._mesh._links[other].lends

    assert world(2, env=ZMQ).run(body) == [1 not in refusing, 0 not in refusing]


@pytest.mark.parametrize("environment", [ZMQ, ENCRYPTED], ids=["lent", "in pieces"])
def test_no_room_for_what_comes_is_an_error_of_the_call(world, environment):
    def body():
        if todist.get_rank() == 1:
            lent_memory.read = frames._in_one = no_room
        todist.barrier()
        if todist.get_rank() == 0:
            with pytest.raises(MemoryError, match="no room"):
                todist.remote_call(torch.sum, 1, state)
            return todist.remote_call(torch.sum, 1, torch.ones(3)).item()
        return None

    def no_room(large):
        raise MemoryError("no room")

    assert world(2, env=environment).run(body)[0] == 3


def shared_memory(process="self"):
    """What a process has of files in memory, which others could find or keep."""
    places = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [place for place in places if "/dev/shm" in place or "memfd:" in place]


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_nothing_grows_with_the_number_of_calls(world):
    def body():
        x = torch.ones(ELEMENTS, requires_grad=True)

        def call():
            todist.remote_call(torch.Tensor.square, 1, x).sum().backward()

        call()
        before = open_files(), todist.remote_call(open_files, 1)
        for _ in range(200):
            call()
        assert torch.equal(x.grad, torch.full_like(x, 2 * 201))
        assert (open_files(), todist.remote_call(open_files, 1)) == before
        return shared_memory(), todist.remote_call(shared_memory, 1)

    assert world(2, env=ZMQ).on_zero(body) == ([], [])


def kill_in_the_middle(victim):
    """Let this process kill the sender, or itself, when it has read half of what it is lent."""
    usual, copied = lent_memory._copy, []

    def copy(process, address, size):
        if size != lent_memory.TOKEN:
            copied.append(usual(process, address, size // 2))
            assert not shared_memory(process)
            assert not shared_memory()
            os.kill({"sender": process, "receiver": os.getpid()}[victim], signal.SIGKILL)
            while Path(f"/proc/{process}/maps").read_bytes():  # a process that has ended has no memory
                pass
        return usual(process, address, size)

    lent_memory._copy = copy


@pytest.mark.parametrize("victim", ["sender", "receiver"])
@pytest.mark.parametrize("message", ["request", "reply"])
def test_a_death_in_the_middle_of_reading_leaves_nothing(message, victim):
    """Rank 2 calls rank 1, and one of them dies. Neither has memory with a name, which would stay."""
    reader, sender = {"request": (1, 2), "reply": (2, 1)}[message]
    dead = {"sender": sender, "receiver": reader}[victim]

    def main():
        rank = todist.get_rank()
        if rank == reader:
            kill_in_the_middle(victim)
        todist.barrier()
        if rank == 2:
            call = (torch.sum, 1, state) if message == "request" else (its_state, 1)
            with pytest.raises(todist.WorkerLostError, match="worker1"):
                todist.remote_call(*call)
        while rank == 0 and dead in todist.alive():
            todist.remote_call(int, 3 - dead)  # the other one answers
        return shared_memory()

    endings = World(3, env=ZMQ, rpc=False).endings(todist.auto_init_rpc(on_loss="continue")(main), timeout=60)
    assert [ending.exitcode == -signal.SIGKILL for ending in endings] == [rank == dead for rank in range(3)]
    assert [ending.value for ending in endings if ending.rank != dead] == [[], []]
