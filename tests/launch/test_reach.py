"""Hosts that are reached by SSH: all at once, each once, and again when they are lost."""

from __future__ import annotations

import asyncio
import threading

import pytest

import torchopt_dist as todist
from torchopt_dist import Liveness
from torchopt_dist.launching import _cluster as cluster
from torchopt_dist.launching import _machines as machines
from torchopt_dist.launching._elastic import UnreachedMachine
from torchopt_dist.launching._machines import Machine

pytestmark = pytest.mark.timeout(60)


class Made(Machine):
    """Stands for a machine that has been reached."""

    here = False

    def __init__(self, name):
        self.name, self.why = name, None

    def connect(self, env):
        raise NotImplementedError

    def kill(self, pid):
        raise NotImplementedError

    def why_lost(self, seconds=0.0):
        return self.why

    async def close(self):
        pass


@pytest.fixture
def started(monkeypatch):
    """The names that are tried, and what tries them: `bad...` is not reached, and no host before `number` are tried."""
    tried, enough = [], asyncio.Event()

    async def start(name, options, seconds):
        tried.append(name)
        if len(tried) >= start.number:
            enough.set()
        await asyncio.wait_for(enough.wait(), 20)
        if name.startswith("bad"):
            raise todist.errors.InitializationError(f"{name} is unknown")
        return Made(name)

    start.number = 1
    monkeypatch.setattr(machines.RemoteMachine, "start", start)
    monkeypatch.setattr(cluster, "_machines", {})
    return tried, start


def connect(*names, otherwise=None, **env):
    return cluster.connect(
        names, machines.RemoteOptions("python3", None, None, None, Liveness(), env), 5.0, otherwise
    )


def test_hosts_are_reached_at_the_same_time_and_stay(started):
    tried, start = started
    start.number = 3
    found = connect("a", "b", "c")
    assert [machine.name for machine in found.values()] == ["a", "b", "c"]
    assert connect("c", "a") == {"c": found["c"], "a": found["a"]}
    assert tried == ["a", "b", "c"]


def test_a_host_that_two_launches_reach_at_the_same_time_is_one(started):
    tried, start = started
    start.number = 2
    found = []
    threads = [
        threading.Thread(target=lambda names=names: found.append(connect(*names))) for names in ("ax", "ay")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0]["a"] is found[1]["a"]
    assert sorted(tried) == ["a", "x", "y"]


def test_a_host_that_is_lost_is_reached_again(started):
    tried, _ = started
    first = connect("a")["a"]
    first.why = "it burns"
    second = connect("a")["a"]
    assert second is not first
    assert connect("a")["a"] is second
    assert tried == ["a", "a"]


def test_variables_that_libraries_read_need_another_forkserver(started):
    tried, _ = started
    plain = connect("a", MY_OWN="1")["a"]
    assert connect("a", MY_OWN="2", OMP_NUM_THREADS="3")["a"] is plain
    assert connect("a", TORCH_LOGS="+dynamo")["a"] is not plain
    assert tried == ["a", "a"]


def test_all_that_cannot_be_reached_are_named_and_tried_again(started):
    tried, _ = started
    with pytest.raises(todist.errors.InitializationError, match=r"^bad1 is unknown\nbad2 is unknown$"):
        connect("bad1", "a", "bad2")
    with pytest.raises(todist.errors.InitializationError, match=r"^bad1 is unknown$"):
        connect("a", "bad1")
    assert tried == ["bad1", "a", "bad2", "bad1"]


def test_something_may_stand_for_a_host_that_cannot_be_reached(started):
    found = connect("a", "bad", otherwise=UnreachedMachine)
    assert found["a"].why_lost() is None
    assert found["bad"].why_lost() == "bad is unknown"
    with pytest.raises(todist.errors.InitializationError, match="bad is unknown"):
        found["bad"].connect({})
