"""Short requests over torch's RPC go by a TorchScript function, and are answered where they have arrived."""

from __future__ import annotations

import secrets
import threading
import time

import pytest
import torch
from torch.distributed import rpc

import torchopt_dist as todist
from tests.distributed.bare import Bare
from tests.worlds import World
from torchopt_dist.distributed._group import current_group

pytestmark = pytest.mark.processes

RPC = {"TODIST_TRANSPORT": "rpc"}
ENOUGH = 1000
"""Of calls; on a busy machine many short ones take long."""


def in_group_s_thread(_=None):
    return threading.current_thread().name == "todist-work"


def are_short():
    """Call until calls are answered where they arrive."""
    assert any(not todist.remote_call(1, in_group_s_thread) for _ in range(ENOUGH))


def test_a_short_request_is_answered_where_it_arrives_and_the_next_after_a_long_one_is_not():
    def body():
        first = todist.remote_call(1, in_group_s_thread)
        for _ in range(3):
            are_short()
            todist.remote_call(1, time.sleep, 0.02)
            assert todist.remote_call(1, in_group_s_thread)
        return first

    assert World(2, env=RPC).on_zero(body)


def test_all_kinds_of_answers_come_to_short_requests():
    def body():
        for value in (
            bytes(range(256)),
            "ä€😀\0",
            "x" * 100_000,
            b"\xff" * 100_000,
            None,
            {"a": [1.5, (2,)]},
        ):
            are_short()
            assert todist.remote_call(1, lambda value=value: value) == value
            assert todist.remote_call(1, lambda x: x, value) == value
        are_short()
        assert torch.equal(todist.remote_call(1, torch.arange, 5), torch.arange(5))
        are_short()
        assert torch.equal(todist.remote_call(1, torch.arange, 200_000), torch.arange(200_000))
        are_short()
        assert list(todist.remote_call(1, lambda: torch.nn.Linear(2, 3)).state_dict()) == ["weight", "bias"]
        are_short()
        assert todist.remote_call(1, rpc.RRef, 7).to_here() == 7
        are_short()
        with pytest.raises(ZeroDivisionError):
            todist.remote_call(1, divmod, 1, 0)
        are_short()
        with pytest.raises(todist.SerializationError, match="lock"):
            todist.remote_call(1, threading.Lock)
        return True

    assert World(2, env=RPC).on_zero(body)


released: dict[str, threading.Event] = {}


def wait_for_release(name):
    return released.setdefault(name, threading.Event()).wait(60)


def release(name):
    released.setdefault(name, threading.Event()).set()


def test_requests_that_wait_for_a_later_one_leave_threads_that_receive_it():
    def body():
        name = secrets.token_hex(8)
        are_short()
        waits = [
            todist.remote_async_call(wait_for_release, args=(name,), partitioner=1, timeout=30)
            for _ in range(40)
        ]
        time.sleep(0.2)
        todist.remote_sync_call(release, args=(name,), partitioner=1, timeout=30)
        return [wait.wait() for wait in waits]

    assert World(2, env=RPC).on_zero(body) == [[True]] * 40


def test_the_group_ends_though_a_function_goes_on_where_its_request_arrived():
    def body():
        are_short()
        with pytest.raises(todist.CallTimeoutError):
            todist.remote_sync_call(wait_for_release, args=("never",), partitioner=1, timeout=0.1)
        todist.remote_call(1, release, "never")

    began = time.monotonic()
    World(2, env=RPC).on_zero(body)
    assert time.monotonic() - began < 60


def test_settings_of_the_group_s_threads_hold_for_short_requests():
    def body():
        return {(todist.remote_call(1, in_group_s_thread), *made_on()) for _ in range(60)}

    def made_on():
        return (str(todist.remote_call(1, lambda: torch.empty(1).device.type)),)

    answers = World(2, env=RPC).on_zero(body, worker_init_fn=lambda: torch.set_default_device("meta"))
    assert answers == {(True, "meta")}


def test_calls_need_no_torchscript():
    def main():
        if todist.get_rank() == 0:
            assert current_group().transport._scripted is None
            return [todist.remote_call(1, in_group_s_thread) for _ in range(30)]
        return None

    def program():
        torch.jit.script = lambda function: function  # as it is with PYTORCH_JIT=0
        return todist.auto_init_rpc()(main)()

    assert Bare(2, env=RPC).run(program)[0] == [True] * 30


def test_a_worker_that_has_torchscript_asks_one_that_has_none():
    def body():
        todist.remote_call(1, lambda: vars(current_group().transport._short).update(_places=()))
        return [todist.remote_call(1, in_group_s_thread) for _ in range(30)]

    assert World(2, env=RPC).on_zero(body) == [True] * 30
