"""``on_loss="continue"``: the loss of a worker is no end, the result tells who was lost, and calls go on by retries."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch

import torchopt_dist as todist
from tests.waits import say, watch
from torchopt_dist.errors import AgentFailedError, RemoteError, WorkerFailedError
from torchopt_dist.launching import Launcher, launch

pytestmark = pytest.mark.timeout(60)


def rank_unless_killed(victim):
    rank = int(os.environ["RANK"])
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def test_the_others_go_on_and_the_result_tells_who_was_lost():
    result = launch(rank_unless_killed, (1,), nproc_per_host=3, on_loss="continue")
    assert result.rank(0) == 0
    assert result.rank(2) == 2
    assert list(result.lost) == [1]
    assert result.lost[1].signal == "SIGKILL"
    for ask in (lambda: result.rank(1), lambda: result.index("localhost", 1)):
        with pytest.raises(WorkerFailedError, match="rank 1 on localhost was ended by SIGKILL"):
            ask()


def sees_the_stopped_one_end(folder):
    """Rank 1 stops itself; rank 0 goes on until its process has gone."""
    note = folder / "1"
    if os.environ["RANK"] == "1":
        say(note, str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif watch(note):
        return not psutil.wait_procs([psutil.Process(int(note.read_text()))], timeout=10)[1]
    return None


def test_the_others_go_on_without_one_that_is_stopped_which_is_killed(tmp_path):
    result = launch(
        sees_the_stopped_one_end,
        (tmp_path,),
        nproc_per_host=2,
        on_loss="continue",
        liveness=todist.Liveness(patience=3.0, interval=0.2),
    )
    assert result.rank(0) is True
    assert "was stopped by SIGSTOP and did not go on for 3 s" in str(result.lost[1])


@pytest.mark.parametrize(("victim", "on_loss"), [(0, "continue"), (1, "end")])
def test_rank_zero_cannot_be_spared_nor_any_other_by_default(victim, on_loss):
    with pytest.raises(WorkerFailedError, match=f"rank {victim} .* was ended by SIGKILL"):
        launch(rank_unless_killed, (victim,), nproc_per_host=2, on_loss=on_loss)


def raise_on(rank):
    if int(os.environ["RANK"]) == rank:
        raise KeyError("of this rank")
    time.sleep(60)


def test_an_exception_ends_all():
    with pytest.raises(KeyError, match="of this rank") as caught:
        launch(raise_on, (1,), nproc_per_host=2, on_loss="continue")
    assert isinstance(caught.value, RemoteError)


def square_or_die(x, mark):
    if todist.get_rank() == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return (x**2).sum()


def gradient(mark):
    if todist.get_rank():
        return None
    x = torch.arange(6.0, requires_grad=True)
    spread = todist.parallelize(todist.batch_partitioner, todist.sum_reducer, retries=1)(square_or_die)
    spread(x, todist.replicated(mark)).backward()
    return x.grad, todist.alive()


def test_a_call_goes_on_by_retries(tmp_path):
    result = launch(gradient, (tmp_path / "dead",), nproc_per_host=3, rpc=True, on_loss="continue")
    grad, alive = result.rank(0)
    assert torch.equal(grad, 2 * torch.arange(6.0))
    assert alive == (0, 2)
    assert list(result.lost) == [1]


def kill_my_agent(rank):
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return int(os.environ["RANK"])


def test_a_host_is_spared_too():
    result = launch(kill_my_agent, (1,), hosts=["localhost"] * 2, nproc_per_host=1, on_loss="continue")
    assert result.rank(0) == 0
    assert isinstance(result.lost[1], AgentFailedError)
    with pytest.raises(
        AgentFailedError, match="the agent on localhost#2 died; rank 1 on localhost#2 was ended with it"
    ):
        result.index("localhost#2", 0)


def test_bad_options():
    with pytest.raises(ValueError, match="`on_loss` must be 'end' or 'continue' or 'replace', got 'stop'"):
        launch(rank_unless_killed, (1,), on_loss="stop")
    with pytest.raises(ValueError, match=r"`on_loss` must be 'end' with `min_hosts`.*got 'continue'"):
        Launcher(on_loss="continue", min_hosts=1)  # and not when it runs
