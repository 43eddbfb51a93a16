"""A worker that dies is an error that names it; the others can catch it, and end or go on, as asked."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time

import pytest
import torch

import torchopt_dist as todist
from tests.distributed.programs import rank_of_worker
from tests.processes import World
from tests.waits import say, soon, watch
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.transport import shutdown

DEATHS = {
    "os._exit(7)": lambda: os._exit(7),
    # Sent to the process, a signal that dumps core may end it after `os.kill` has returned; to the thread, at once.
    "SIGSEGV": lambda: signal.raise_signal(signal.SIGSEGV),
}


@pytest.mark.parametrize("die", DEATHS.values(), ids=DEATHS.keys())
def test_a_worker_that_dies_in_a_call_is_an_error_that_can_be_caught(world, tmp_path, die):
    def last_words():
        say(tmp_path / "raised", str(time.monotonic()))
        die()

    def main():
        if todist.get_rank() == 2:
            say(tmp_path / "in main", "")  # a rank that hears of a death before that does not start
        if todist.get_rank() == 0:
            assert watch(tmp_path / "in main")
            with pytest.raises(todist.WorkerLostError, match="worker1"):
                todist.remote_sync_call(last_words, partitioner=1)
            say(tmp_path / "caught", str(time.monotonic() - float((tmp_path / "raised").read_text())))
            # The others can be called as before.
            say(tmp_path / "answer", str(todist.remote_sync_call(rank_of_worker, partitioner=2)))
            assert todist.alive() == (0, 2)

    endings = world(3).endings(main, timeout=100, on_loss="continue")
    assert endings[0].error is None, endings[0].trace
    assert float((tmp_path / "caught").read_text()) < soon(0.5)
    assert (tmp_path / "answer").read_text() == "[2]"
    assert [endings[rank].exitcode for rank in (0, 2)] == [0, 0]


def test_survivors_go_on_and_end_well(world):
    def main():
        rank = todist.get_rank()
        todist.barrier()
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            with pytest.raises(todist.WorkerLostError, match="rank 2 died") as caught:
                todist.remote_sync_call(lambda: os.kill(os.getpid(), signal.SIGKILL), partitioner=2)
            lost = pickle.loads(pickle.dumps(caught.value))
            assert (lost.rank, lost.worker, lost.cause) == (2, "worker2", "died")
            assert lost.host == socket.gethostname()
        todist.barrier()  # opens as soon as both are dead
        assert todist.alive() == (0, 1)
        with pytest.raises(todist.WorkerLostError, match="rank 3 died"):
            todist.remote_sync_call(rank_of_worker, partitioner=3)
        todist.barrier(["worker0", "worker1", "worker3"])
        return todist.remote_sync_call(rank_of_worker, partitioner=1 - rank)

    endings = world(4).endings(main, timeout=100, on_loss="continue")
    assert [ending.exitcode for ending in endings] == [0, 0, -signal.SIGKILL, -signal.SIGKILL]
    assert [ending.value for ending in endings[:2]] == [[1], [0]], endings[0].trace


@pytest.mark.torch_rpc
@pytest.mark.parametrize("when", ["before the last barrier", "in RPC's own handshake"])
def test_a_death_at_the_end_that_the_group_goes_on_without(tmp_path, monkeypatch, when):
    from torchopt_dist.distributed.transport.rpc import RPCTransport

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def program():
        if os.environ["RANK"] == "1":
            where = (RPCTransport, "wait_for_replies") if "barrier" in when else (shutdown.rpc, "shutdown")
            monkeypatch.setattr(*where, die)
        return todist.auto_init_rpc(on_loss="continue")(todist.get_rank)()

    endings = World(3, rpc=False).endings(program, timeout=60)
    assert [ending.exitcode for ending in endings] == [0, -signal.SIGKILL, 0], endings
    assert [ending.value for ending in endings] == [0, None, 2]


def test_the_graphs_that_a_lost_caller_left_are_forgotten(world):
    def main():
        rank = todist.get_rank()
        if rank == 1:
            x = torch.ones(3, requires_grad=True)
            y = todist.remote_sync_call(torch.exp, args=(x,), partitioner=2)
        todist.barrier()
        graphs = current_group().kept_graphs
        before = len(graphs)
        todist.barrier()
        if rank == 1:
            assert y
            os.kill(os.getpid(), signal.SIGKILL)
        todist.barrier()  # opens when the loss is known
        return before, len(graphs)

    endings = world(3).endings(main, timeout=60, on_loss="continue")
    assert endings[2].value == (1, 0)


def test_a_loss_that_main_does_not_handle_ends_all(world):
    def main():
        if todist.get_rank() == 0:
            todist.remote_sync_call(os._exit, args=(0,), partitioner=1)
        threading.Event().wait()

    endings = world(3).endings(main, timeout=60, on_loss="continue")
    assert (endings[0].error.rank, endings[0].error.cause) == (1, "died")
    assert endings[2].exitcode == 1


@pytest.mark.parametrize("where", ["in main", "at its end"])
def test_a_worker_that_dies_is_told_at_the_end(world, tmp_path, where):
    def main():
        if todist.get_rank() == 1:
            assert where == "at its end" or watch(tmp_path / "busy")
            if where == "at its end":
                threading.Thread(
                    target=lambda: watch(tmp_path / "busy") and os.kill(os.getpid(), signal.SIGKILL),
                    daemon=True,
                ).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        if todist.get_rank() == 0:
            say(tmp_path / "busy")

    endings = world(3).endings(main, timeout=100)
    assert endings[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        # Who hears it second hears of it from the first.
        assert isinstance(endings[rank].error, (todist.WorkerLostError, todist.PeerFailedError))
        assert "rank 1 died" in str(endings[rank].error)
        assert endings[rank].exitcode == 1


def test_when_rank_zero_dies_the_others_end(world, tmp_path):
    def main():
        if todist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    started = time.monotonic()
    endings = world(3).endings(main, timeout=100)
    assert time.monotonic() - started < soon(4)
    for rank in (1, 2):
        assert isinstance(endings[rank].error, todist.WorkerLostError)
        assert "rank 0" in str(endings[rank].error)


def test_a_call_to_a_dead_worker_fails_at_once(world, tmp_path):
    def main():
        if todist.get_rank() != 0:
            return
        with pytest.raises(todist.WorkerLostError, match="worker1"):
            todist.remote_sync_call(os._exit, args=(0,), partitioner=1)
        started = time.monotonic()
        with pytest.raises(todist.WorkerLostError, match="worker1"):
            todist.remote_sync_call(rank_of_worker, partitioner="worker1")
        say(tmp_path / "took", str(time.monotonic() - started))

    world(2).endings(main, timeout=100, on_loss="continue")
    assert float((tmp_path / "took").read_text()) < soon(0.5)


def test_a_barrier_with_a_dead_worker_is_an_error_at_once(world, tmp_path):
    def main():
        if todist.get_rank() == 1:
            assert watch(tmp_path / "waiting")
            say(tmp_path / "raised", str(time.monotonic()))
            os._exit(0)
        if todist.get_rank() == 0:
            say(tmp_path / "waiting")
            with pytest.raises(todist.WorkerLostError, match="rank 1 died"):
                todist.barrier()
            say(tmp_path / "first", str(time.monotonic() - float((tmp_path / "raised").read_text())))

    world(3).endings(main, timeout=100)
    assert float((tmp_path / "first").read_text()) < soon(0.5)
