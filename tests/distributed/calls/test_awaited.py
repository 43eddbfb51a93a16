"""The future of an asynchronous call raises its exception each time, and does not hold it for ever."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from torchopt_dist.distributed.calls.futures import Awaited


class _WrongError(Exception):
    pass


def _failed():
    future = Awaited()
    future.set_exception(_WrongError("so"))
    return future


def test_the_same_exception_is_raised_each_time():
    future = _failed()
    raised = []
    for ask in (future.wait, future.value, future.wait):
        with pytest.raises(_WrongError, match="so") as caught:
            ask()
        raised.append(caught.value)
    assert raised[0] is raised[1] is raised[2]
    with pytest.raises(_WrongError, match="so"):
        torch.futures.wait_all([future])
    assert future.then(_error_of).wait() == "so"


def test_an_exception_that_nobody_has_asked_for_reaches_those_who_come_after_the_future():
    later = torch.futures.collect_all([_failed()])
    for _ in range(2):
        with pytest.raises(_WrongError, match="so"):
            later.wait()


def test_an_exception_that_was_raised_ends_with_its_future():
    future = _failed()
    later = torch.futures.collect_all([future])
    with pytest.raises(_WrongError):
        future.wait()
    del future
    gc.collect()
    with pytest.raises(RuntimeError, match="raised before: _WrongError: so"):
        later.wait()


def _error_of(future):
    try:
        future.wait()
    except _WrongError as error:
        return str(error)


def test_a_frame_that_waits_is_freed():
    def waits(mark):
        future = _failed()
        with pytest.raises(_WrongError):
            future.wait()
        return weakref.ref(mark)

    mark = waits(torch.ones(1))
    gc.collect()
    assert mark() is None
