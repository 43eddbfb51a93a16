"""Too few descriptors → an error of each worker that names the limit, before libraries fail for it.

A moment without descriptors → an error of the call that needs one, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
import time

import pytest
import torch
import zmq

import torchopt_dist as todist
from tests.processes import World
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.life import own_process
from torchopt_dist.distributed.membership.stopped import StoppedProcesses, is_running


def leave(number: int) -> None:
    """Let this process open so many files more."""
    limit = len(os.listdir("/proc/self/fd")) - 1 + number
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


@contextlib.contextmanager
def none_left():
    """Let this process open no file meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        with contextlib.suppress(OSError):
            while True:
                opened.callback(os.close, os.dup(1))
        yield


@pytest.mark.parametrize(("transport", "enough"), [("rpc", 256), ("zmq", 64)])
def test_too_few_descriptors_are_told_by_each_worker_before_libraries_fail(transport, enough):
    def work():
        leave(8)
        with pytest.raises(todist.errors.InitializationError, match="`ulimit -n`") as caught:
            todist.auto_init_rpc(transport=transport)(todist.get_rank)()
        return str(caught.value)

    for ending in World(2, rpc=False).endings(work, timeout=60):
        assert ending.error is None, ending.trace
        assert "needs at least" in ending.value
        assert re.search(r"and can have \d, where the limit of open files \(`ulimit -n`\) is", ending.value)

    def start():
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, enough))
        return todist.auto_init_rpc(transport=transport)(todist.get_rank)()

    assert [ending.value for ending in World(2, rpc=False).endings(start, timeout=60)] == [0, 1]


def test_an_error_of_a_library_that_has_no_descriptor_is_told_in_our_words():
    raw = RuntimeError('In Loop at tensorpipe/transport/uv/loop.cc:21 "rv < 0: too many open files"')
    assert "`ulimit -n`" in str(own_process.too_many_files(raw))
    assert own_process.too_many_files(RuntimeError("something else")) is None


def test_the_files_that_are_opened_to_see_are_closed():
    before = os.listdir("/proc/self/fd")
    own_process.check_descriptors(50)
    assert os.listdir("/proc/self/fd") == before


def hangs_in_backward(x):
    y = x.clone()
    y.register_hook(lambda _: threading.Event().wait())
    return y.sum()


def test_time_outs_and_releases_outlive_a_moment_without_descriptors():
    def main():
        if todist.get_rank() != 0:
            return
        transport, releaser = current_group().transport, current_group().releaser
        usual, probed = transport._mesh.probe, threading.Event()

        def probe():
            try:
                usual()
            except zmq.ZMQError:
                probed.set()
                raise

        transport._mesh.probe = probe
        with none_left():
            with pytest.raises(todist.WorkerLostError, match="Too many open files"):
                todist.remote_sync_call(os.getpid, partitioner=1)  # which opens a connection
            assert probed.wait(60)
        x = torch.ones(2, requires_grad=True)
        (out,) = todist.remote_sync_call(hangs_in_backward, args=(x,), partitioner=1, timeout=60)
        out.grad_fn.graph.siblings.seconds = 0.05  # from now on
        with pytest.raises(todist.CallTimeoutError):
            out.backward()
        releaser.release(None, 1, "not sent")  # there is no such transport
        releaser.release(transport, 1, (0, 0))
        deadline = time.monotonic() + 60
        while not releaser._requests.empty():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert releaser._thread.is_alive()

    def program():
        todist.auto_init_rpc(transport="zmq")(main)()

    for ending in World(2, rpc=False).endings(program, timeout=200):
        assert ending.error is None, ending.trace


def test_a_process_that_cannot_be_seen_for_lack_of_descriptors_has_not_ended():
    this = StoppedProcesses({0: os.getpid()}, todist.Liveness())
    with none_left():
        assert [this.look() for _ in range(3)] == [[], [], []]
        assert is_running(os.getpid())
