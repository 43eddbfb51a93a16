"""The ranks of one run meet in a store and agree on a nonce, whatever earlier runs left; who is missing is named."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

import torchopt_dist as todist
from tests.processes import World, free_port
from tests.waits import say, watch
from torchopt_dist.distributed.rendezvous import store as store_module
from torchopt_dist.distributed.rendezvous.store import GroupEndedError


def handshake(store, world_size, seconds=10.0, order=None):
    """The nonces by rank of a handshake of threads, which begin in ``order``."""
    deadline = time.monotonic() + seconds

    def rank(number):
        if number == 0:
            return store_module._welcome(store, world_size, deadline)
        return store_module._say_hello(store, number, deadline)

    with ThreadPoolExecutor(world_size) as threads:
        futures = {number: threads.submit(rank, number) for number in order or range(world_size)}
    return [futures[number].result() for number in range(world_size)]


@pytest.fixture
def agent_store():
    """A store that outlives the workers, as torchrun's agent keeps one across restarts; and its address."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))
    return store, {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


# The handshake.


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_ranks_agree_on_a_nonce(order):
    nonces = handshake(dist.HashStore(), 3, order=order)
    assert len(set(nonces)) == 1
    assert nonces[0]


def test_a_rank_alone_waits_for_nobody():
    assert handshake(dist.HashStore(), 1)


def test_every_handshake_on_a_store_has_a_nonce_of_its_own():
    store = dist.HashStore()
    nonces = [handshake(store, 3) for _ in range(4)]
    assert all(len(set(run)) == 1 for run in nonces)
    assert len({run[0] for run in nonces}) == 4


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_what_an_earlier_run_has_left_does_not_matter(order):
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"hello/{rank}", f"token{rank}")
        store.set(f"welcome/token{rank}", "stale")
        store.set(f"ack/stale/{rank}", "")
    store.set("membership", "stale")
    nonces = handshake(store, 3, order=order)
    assert len(set(nonces)) == 1
    assert nonces[0] != "stale"


def test_a_hello_of_the_dead_is_not_taken_for_the_living():
    store = dist.HashStore()
    store.set("hello/1", "dead")
    with pytest.raises(todist.errors.InitializationError, match="missing: rank 1"):
        store_module._welcome(store, 2, time.monotonic() + 0.1)
    # It has been answered, and nobody has read the answer.
    assert store.check(["welcome/dead"])
    nonces = handshake(store, 2)
    assert nonces[0] == nonces[1]


def test_the_missing_are_named(monkeypatch):
    monkeypatch.setenv("TODIST_INIT_TIMEOUT", "0.2")
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        deadline = time.monotonic() + 0.2
        hub = threads.submit(store_module._welcome, store, 4, deadline)
        threads.submit(store_module._say_hello, store, 2, deadline)
        with pytest.raises(todist.errors.InitializationError) as caught:
            hub.result()
    assert "0.2 s (TODIST_INIT_TIMEOUT) for all 4 workers; missing: rank 1, 3" in str(caught.value)


def test_without_rank_zero_the_others_say_so(monkeypatch):
    monkeypatch.setenv("TODIST_INIT_TIMEOUT", "0.1")
    with pytest.raises(todist.errors.InitializationError, match=r"rank 3 waited 0\.1 s .* for rank 0"):
        store_module._say_hello(dist.HashStore(), 3, time.monotonic() + 0.1)


# How long to wait.


@pytest.mark.parametrize(("text", "seconds"), [(None, 300.0), ("5", 5.0), ("0.25", 0.25), ("1e3", 1000.0)])
def test_the_timeout_is_read_when_asked(monkeypatch, text, seconds):
    monkeypatch.delenv("TODIST_INIT_TIMEOUT", raising=False)
    if text is not None:
        monkeypatch.setenv("TODIST_INIT_TIMEOUT", text)
    assert store_module.init_timeout() == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf"])
def test_a_bad_timeout_is_told(monkeypatch, text):
    monkeypatch.setenv("TODIST_INIT_TIMEOUT", text)
    with pytest.raises(todist.errors.InitializationError) as caught:
        store_module.init_timeout()
    assert f"TODIST_INIT_TIMEOUT must be a positive number of seconds, got {text!r}" in str(caught.value)


def test_a_bad_timeout_is_told_on_every_rank():
    for ending in World(2, env={"TODIST_INIT_TIMEOUT": "soon"}, rpc=False).endings(
        todist.auto_init_rpc()(lambda: None)
    ):
        assert isinstance(ending.error, todist.errors.InitializationError)
        assert "'soon'" in str(ending.error)


# Meeting.


def test_a_world_of_one_meets_nobody_and_opens_no_port(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setenv("MASTER_PORT", "1")
    first, store = store_module.rendezvous(0, 1, "env://")
    second, _ = store_module.rendezvous(0, 1, "env://")
    assert first != second
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_stores_of_two_runs_in_one_place_share_no_key(agent_store, monkeypatch):
    _, env = agent_store
    for name, value in {"MASTER_ADDR": "127.0.0.1", **env}.items():
        monkeypatch.setenv(name, value)
    with ThreadPoolExecutor(2) as threads:

        def meet():
            ranks = [threads.submit(store_module.rendezvous, rank, 2, "env://") for rank in range(2)]
            return [rank.result()[1] for rank in ranks]

        (first, first_seen), (second, _) = meet(), meet()
    first.set("key", "first")
    assert first_seen.get("key") == b"first"
    assert not second.check(["key"])


def test_a_rank_that_does_not_come_is_named_in_time():
    def program():
        if os.environ["RANK"] == "1":
            return
        todist.auto_init_rpc()(lambda: None)()

    started = time.monotonic()
    endings = World(3, env={"TODIST_INIT_TIMEOUT": "1"}, rpc=False).endings(program, timeout=100)
    for rank in (0, 2):
        assert isinstance(endings[rank].error, todist.errors.InitializationError)
        assert endings[rank].seconds >= 1
    assert time.monotonic() - started < 10
    assert "missing: rank 1" in str(endings[0].error)
    assert "1 s (TODIST_INIT_TIMEOUT)" in str(endings[0].error)


def test_without_rank_zero_the_store_is_named():
    port = str(free_port())

    def program():
        if os.environ["RANK"] != "0":
            todist.auto_init_rpc()(lambda: None)()

    env = {"TODIST_INIT_TIMEOUT": "1", "MASTER_PORT": port}
    error = World(2, env=env, rpc=False).endings(program, timeout=100)[1].error
    assert isinstance(error, todist.errors.InitializationError)
    assert f"127.0.0.1:{port}" in str(error)
    assert "rank 1 of 2 cannot reach the store" in str(error)


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = {"TODIST_INIT_TIMEOUT": "2", "MASTER_PORT": port}
        endings = World(2, env=env, rpc=False).endings(todist.auto_init_rpc()(lambda: None), timeout=100)
    for ending in endings:
        assert isinstance(ending.error, todist.errors.InitializationError)
        assert f":{port}" in str(ending.error)


def test_a_world_forms_again_and_again_on_a_store_with_an_earlier_run_s_keys(agent_store):
    store, env = agent_store
    stale = dist.PrefixStore("torchopt_dist", store)
    stale.set("hello/1", "dead")
    stale.set("welcome/dead", "stale")
    stale.set("ack/stale/1", "")

    def main():
        return todist.remote_sync_call(
            pow, args=(2, 3 + todist.get_rank()), partitioner=1 - todist.get_rank()
        )

    def program():
        return [todist.auto_init_rpc()(main)() for _ in range(2)]

    assert World(2, env=env, rpc=False).run(program) == [[[8]] * 2, [[16]] * 2]
    assert World(2, env=env, rpc=False).run(program) == [[[8]] * 2, [[16]] * 2]


def test_a_world_forms_after_one_that_was_killed(agent_store, tmp_path):
    _, env = agent_store

    def killed():
        todist.auto_init_rpc()(lambda: os.kill(os.getpid(), 9))()

    def killed_while_meeting():
        if os.environ["RANK"] == "1":
            store_module.POLL_SECONDS = 0.0
            store_module.time = Fatal()
            store_module.rendezvous(1, 2, "env://")
        assert not watch(tmp_path / "never", 0.0)

    class Fatal:
        """Time, at whose first reading the process dies."""

        def __init__(self):
            self.readings = 0

        def monotonic(self):
            self.readings += 1
            if self.readings > 1:  # after its hello
                say(tmp_path / "died")
                os._exit(9)
            return time.monotonic()

        def sleep(self, seconds):
            time.sleep(seconds)

    # One may have heard of the other's end before it came to its own.
    assert -9 in [ending.exitcode for ending in World(2, env=env, rpc=False).endings(killed)]
    World(2, env=env, rpc=False).endings(killed_while_meeting)
    assert (tmp_path / "died").exists()
    assert World(2, env=env, rpc=False).run(todist.auto_init_rpc()(lambda: todist.get_rank())) == [0, 1]


def test_a_new_process_takes_the_nonce_of_the_run_that_is_there():
    base = dist.HashStore()
    outer = dist.PrefixStore("all", base)
    run = dist.PrefixStore("nonce", outer)
    hello = partial(store_module._say_hello, outer, 1, comes_late=True)
    with pytest.raises(todist.errors.InitializationError, match=r"rank 1 waited"):  # none runs yet
        hello(time.monotonic() + 0.05)
    store_module.note_start(run, "nonce")
    assert hello(time.monotonic() + 5) == "nonce"
    store_module.note_end(run)
    with pytest.raises(GroupEndedError):
        hello(time.monotonic() + 5)
