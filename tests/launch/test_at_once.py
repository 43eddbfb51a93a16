"""Hosts that are reached at once: values in order, the first error, nobody waited for in vain."""

from __future__ import annotations

import threading
import time

import pytest

from tests.distributed.bare import soon
from torchopt_dist.launch import remote
from torchopt_dist.launch.at_once import at_once
from torchopt_dist.launch.elastic import reach_some
from torchopt_dist.launch.remote import SshOptions

pytestmark = pytest.mark.timeout(30)


def test_values_are_in_the_order_of_the_items_and_calls_at_the_same_time():
    barrier = threading.Barrier(3)

    def work(seconds):
        barrier.wait(10)
        time.sleep(seconds)
        return seconds

    assert at_once(work, [0.2, 0.1, 0.0]) == [0.2, 0.1, 0.0]
    assert at_once(work, []) == []


def test_an_error_is_raised_though_others_go_on():
    hold = threading.Event()

    def work(name):
        if name == "bad":
            raise ValueError(name)
        hold.wait(20)

    started = time.monotonic()
    with pytest.raises(ValueError, match="bad"):
        at_once(work, ["slow", "bad"])
    hold.set()
    assert time.monotonic() - started < soon(5)


OPTIONS = SshOptions("python3", None, 5.0)


@pytest.fixture
def machines(monkeypatch):
    """Stands for machines: made when two are, at the same time."""
    made, both = [], threading.Barrier(2)

    class Made:
        def __init__(self, name, options, seconds):
            both.wait(10)
            self.name, self.closed = name, False
            made.append(self)

        def why_lost(self):
            return None

        def close(self):
            self.closed = True

    monkeypatch.setattr(remote, "RemoteMachine", Made)
    monkeypatch.setattr(remote, "_machines", {})
    return made


def connect(names):
    return remote.connect(names, OPTIONS, 5.0)


def test_hosts_of_an_elastic_launch_are_reached_at_once(machines):
    found = reach_some(connect)(["a", "b"])
    assert [found["a"].name, found["b"].name] == ["a", "b"]
    assert connect(["b", "a"]) == found  # which are there, and not made again
    assert len(machines) == 2


def test_a_host_that_two_launches_reach_at_the_same_time_is_one(machines):
    first, second = at_once(connect, [["a"], ["a"]])
    assert first["a"] is second["a"]
    assert sorted(machine.closed for machine in machines) == [False, True]
    assert not first["a"].closed
