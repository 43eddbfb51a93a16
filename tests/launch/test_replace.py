"""``on_loss="replace"``: a worker dies, a new process has its rank, joins the group that runs, and is called again."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import torchopt_dist as todist
from tests.distributed.calls.test_random_losses import LOSSES, WORKERS, trained
from tests.waits import say, watch
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.errors import InitializationError, WorkerFailedError
from torchopt_dist.launching import Launcher, launch

pytestmark = pytest.mark.timeout(100)

SECONDS = 60.0


def wait_for_all():
    deadline = time.monotonic() + SECONDS
    while len(todist.alive()) < todist.get_world_size():
        assert time.monotonic() < deadline, todist.alive()
        time.sleep(0.001)


def note_the_process():
    os.environ["MADE_BY_INIT"] = str(os.getpid())


def where():
    return os.getpid(), os.environ["MADE_BY_INIT"], os.environ["TODIST_INCARNATION"], todist.get_rank()


def folder_of_socket():
    path = current_group().transport._mesh._links[todist.get_rank()].contact.path
    return Path(path or "/nowhere/0").parent


def ask_1(x):
    return todist.remote_call(where, 1), todist.alive(), x.sum().item()


def twice(x, doom=None):
    if doom is not None and todist.get_rank() == 1 and not doom.exists():
        doom.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * x


PUT = []


def put_here(x):
    PUT.append(todist.put(x))
    return PUT[-1]


def value_of(x):
    return x


def meet_1():
    both = ["worker0", "worker1"]
    meets = todist.remote_async_call(todist.barrier, args=(both,), partitioner=1)
    todist.barrier(both)
    meets.wait()


def lose_a_worker_and_get_a_new_one(folder):
    before = todist.remote_call(where, 1)
    socket = todist.remote_call(folder_of_socket, 1)
    x = torch.arange(6.0, requires_grad=True)
    constant = todist.put(torch.ones(5))
    assert todist.remote_call(value_of, 1, constant).sum() == 5
    meet_1()
    meet_1()
    theirs = todist.remote_call(put_here, 1, torch.ones(2))
    old = todist.remote_call(twice, 1, x)
    kept = todist.remote_sync_call(twice, args=(x,), partitioner=1, retries=1)

    spread = todist.parallelize(todist.batch_partitioner, todist.sum_reducer, retries=1)(twice)
    assert torch.equal(spread(x, todist.replicated(folder / "dead")), 2 * (x[:2] + x[2:4] + x[4:]))
    wait_for_all()

    after = todist.remote_call(where, 1)
    assert after[0] != before[0]
    assert after == (after[0], str(after[0]), "1", 1)  # `worker_init_fn` has run there
    assert not socket.exists()
    # Nothing of the lost process is asked of the new one.
    with pytest.raises(todist.WorkerLostError, match="rank 1 died"):
        old.sum().backward()
    assert x.grad is None
    kept[0].sum().backward()  # made again elsewhere
    assert torch.equal(x.grad, torch.full((6,), 2.0))
    with pytest.raises(todist.WorkerLostError, match="rank 1 died"):
        todist.remote_call(value_of, 2, theirs)
    with pytest.raises(todist.WorkerLostError, match="rank 1 died"):
        todist.remote_call(value_of, 1, theirs)
    # A new one is as good as the old: with gradients, as a home of values, asked by others, for barriers.
    todist.remote_call(twice, 1, x).sum().backward()
    assert torch.equal(x.grad, torch.full((6,), 4.0))
    assert todist.remote_call(value_of, 1, constant).sum() == 5
    assert todist.remote_call(value_of, 2, todist.remote_call(put_here, 1, torch.ones(3))).sum() == 3
    assert todist.remote_call(ask_1, 2, constant) == (after, (0, 1, 2), 5)
    meet_1()
    status = todist.status()
    assert [worker.incarnation for worker in status] == [0, 1, 0]
    assert "alive, process 2" in str(status)
    return before[0], after[0]


in_a_group = todist.auto_init_rpc(note_the_process, on_loss="replace")


def main(folder):
    return in_a_group(todist.rank_zero_only(lose_a_worker_and_get_a_new_one))(folder)


ONE_HOST = {"nproc_per_host": 3}
HOSTS = {"nproc_per_host": 1, "hosts": ["localhost"] * 3, "env": {"TODIST_ZMQ_IPC": "0"}}


@pytest.mark.parametrize("options", [ONE_HOST, HOSTS], ids=["one host", "hosts, encrypted"])
def test_a_new_process_has_the_rank_of_a_lost_one(tmp_path, options):
    result = launch(main, (tmp_path,), on_loss="replace", timeout=SECONDS, **options)
    before, after = result.rank(0)
    assert (result.rank(1), result.rank(2), result.lost) == (None, None, {})
    assert [error.signal for error in result.replaced[1]] == ["SIGKILL"]
    assert not psutil.pid_exists(before)
    assert not psutil.pid_exists(after)


def die_always():
    if todist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.01)


def die_again():
    if os.environ["TODIST_INCARNATION"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_again_and_again_ends_all():
    with pytest.raises(WorkerFailedError, match=r"rank 1 .* SIGKILL .*, as the 2 processes") as caught:
        launch(
            todist.auto_init_rpc(die_again, on_loss="replace")(die_always),
            nproc_per_host=2,
            on_loss="replace",
            max_replacements=2,
            timeout=SECONDS,
        )
    assert "`max_replacements`" in str(caught.value)


def die_in_main(folder):
    if todist.get_rank() == 1:
        say(folder / "began")
        os.kill(os.getpid(), signal.SIGKILL)
    watch(folder / "began")
    wait_for_loss()
    return todist.get_rank()


def wait_for_loss():
    deadline = time.monotonic() + SECONDS
    while 1 in todist.alive():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def come_too_late(folder):
    if os.environ["TODIST_INCARNATION"] == "1":
        assert watch(folder / "ended")
    value = todist.auto_init_rpc(on_loss="replace")(die_in_main)(folder)
    if value == 0:
        say(folder / "ended")
        assert watch(folder / "late", SECONDS)
    return value


def leave_and_tell(folder):
    try:
        return come_too_late(folder)
    finally:
        if os.environ["TODIST_INCARNATION"] == "1":
            say(folder / "late")


def test_a_new_process_that_comes_when_the_others_are_done_ends_well(tmp_path):
    result = launch(leave_and_tell, (tmp_path,), nproc_per_host=3, on_loss="replace", timeout=SECONDS)
    assert [result.rank(rank) for rank in range(3)] == [0, None, 2]
    assert list(result.replaced) == [1]


def meet_often(folder):
    """On every rank: barriers, after the first of which one rank dies, once."""
    todist.barrier()
    if todist.get_rank() == 1 and not (folder / "dead").exists():
        (folder / "dead").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        todist.barrier()
    return todist.get_rank()


def test_barriers_on_every_rank_do_not_hang(tmp_path):
    result = launch(
        todist.auto_init_rpc(on_loss="replace")(meet_often),
        (tmp_path,),
        nproc_per_host=3,
        on_loss="replace",
        timeout=SECONDS,
    )
    assert [result.rank(0), result.rank(2)] == [0, 2]
    assert result.rank(1) in (1, None)  # `None` where it came when the others were done


def raise_in_new(folder):
    if os.environ["TODIST_INCARNATION"] != "0":
        raise KeyError("of the new process")


def test_what_a_new_process_raises_ends_all(tmp_path):
    def main():
        if todist.get_rank() == 0:
            with pytest.raises(todist.WorkerLostError):
                todist.remote_call(os._exit, 1, 0)
            while True:
                time.sleep(0.01)

    with pytest.raises(KeyError, match="of the new process"):
        launch(
            todist.auto_init_rpc(lambda: raise_in_new(tmp_path), on_loss="replace")(main),
            nproc_per_host=2,
            on_loss="replace",
            timeout=SECONDS,
        )


def rank_of(expected):
    """In no group."""
    if os.environ["RANK"] == "1" and os.environ["TODIST_INCARNATION"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(os.environ["RANK"]), expected


def test_a_function_in_no_group_runs_again():
    result = launch(rank_of, ("x",), nproc_per_host=2, on_loss="replace", timeout=SECONDS)
    assert [result.rank(0), result.rank(1)] == [(0, "x"), (1, "x")]
    with pytest.raises(WorkerFailedError, match=r"rank 0 .* SIGKILL"):
        launch(die_on_zero, nproc_per_host=2, on_loss="replace", timeout=SECONDS)


def die_on_zero():
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SECONDS)


def train_with_losses(seed, losses):
    """How many trainings were disturbed; each ends with the parameters of an undisturbed one."""
    chance = random.Random(seed)
    split = chance.choice([todist.batch_partitioner, todist.dim_partitioner(0, exclusive=True, keepdim=True)])
    undisturbed = trained(split)
    began = time.monotonic()
    assert all(map(torch.equal, trained(split), undisturbed))
    took = time.monotonic() - began
    for _ in range(losses):
        rank = chance.randrange(1, WORKERS)
        process = todist.remote_call(os.getpid, rank)
        killer = threading.Timer(chance.uniform(0, took), os.kill, (process, signal.SIGKILL))
        killer.start()
        parameters = trained(split)
        killer.join()
        assert all(map(torch.equal, parameters, undisturbed)), f"rank {rank}"
        deadline = time.monotonic() + SECONDS
        while todist.status()[rank].process in (process, 0):
            assert time.monotonic() < deadline
            time.sleep(0.002)
    return [worker.incarnation for worker in todist.status()]


def test_workers_that_are_killed_at_random_moments_and_replaced_change_no_parameter():
    seed, losses = int(os.environ.get("TODIST_FUZZ_SEED", time.time_ns() % 10**6)), max(LOSSES // 2, 1)
    print(f"TODIST_FUZZ_SEED={seed}")
    result = launch(
        todist.auto_init_rpc(on_loss="replace")(todist.rank_zero_only(train_with_losses)),
        (seed, losses),
        nproc_per_host=WORKERS,
        on_loss="replace",
        max_replacements=losses,
    )
    assert sum(result.rank(0)) == losses == sum(map(len, result.replaced.values()))


def test_bad_options(monkeypatch):
    with pytest.raises(ValueError, match=r"`backend` must be None with on_loss='replace'.*got 'gloo'"):
        Launcher(on_loss="replace", backend="gloo")  # and not when it runs
    with pytest.raises(ValueError, match=r"`on_loss` must be 'end' with `min_hosts`.*got 'replace'"):
        Launcher(on_loss="replace", min_hosts=1)
    with pytest.raises(ValueError, match="`max_replacements` must be at least 0, got -1"):
        launch(rank_of, (1,), on_loss="replace", max_replacements=-1)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        InitializationError, match=r"which torchrun does not.*--on-loss replace.*on_loss='continue'"
    ):
        todist.auto_init_rpc(on_loss="replace")(where)()
    monkeypatch.setenv("TODIST_INCARNATION", "0")
    with pytest.raises(InitializationError, match=r"transport='zmq'.*got transport='rpc'"):
        todist.auto_init_rpc(on_loss="replace", transport="rpc")(where)()
    with pytest.raises(InitializationError, match=r"launched with on_loss='replace'.*got on_loss='continue'"):
        todist.auto_init_rpc(on_loss="continue")(where)()
    monkeypatch.setenv("TODIST_INCARNATION", "first")
    with pytest.raises(InitializationError, match="must be a number below 65536, got 'first'"):
        todist.auto_init_rpc(on_loss="replace")(where)()
