"""Too few descriptors → an error of each worker that names the limit, before libraries fail for it."""

from __future__ import annotations

import os
import re
import resource

import pytest

import torchopt_dist as todist
from tests.distributed.bare import Bare
from torchopt_dist.distributed import _descriptors


def leave(number: int) -> None:
    """Let this process open so many files more."""
    limit = len(os.listdir("/proc/self/fd")) - 1 + number
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


@pytest.mark.parametrize(("transport", "enough"), [("rpc", 256), ("zmq", 64)])
def test_too_few_descriptors_are_told_by_each_worker_before_libraries_fail(transport, enough):
    def work():
        leave(8)
        with pytest.raises(todist.InitializationError, match="`ulimit -n`") as caught:
            todist.auto_init_rpc(transport=transport)(todist.get_rank)()
        return str(caught.value)

    for ending in Bare(2).endings(work, timeout=60):
        assert ending.error is None, ending.trace
        assert "needs at least" in ending.value
        assert re.search(r"and can have \d, where the limit of open files \(`ulimit -n`\) is", ending.value)

    def start():
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, enough))
        return todist.auto_init_rpc(transport=transport)(todist.get_rank)()

    assert [ending.value for ending in Bare(2).endings(start, timeout=60)] == [0, 1]


def test_an_error_of_a_library_that_has_no_descriptor_is_told_in_our_words():
    raw = RuntimeError('In Loop at tensorpipe/transport/uv/loop.cc:21 "rv < 0: too many open files"')
    assert "`ulimit -n`" in str(_descriptors.too_many_files(raw))
    assert _descriptors.too_many_files(RuntimeError("something else")) is None


def test_the_files_that_are_opened_to_see_are_closed():
    before = os.listdir("/proc/self/fd")
    _descriptors.check_descriptors(50)
    assert os.listdir("/proc/self/fd") == before
