"""A failure of another rank → an error in the thread that runs ``main``, once, and never after ``main``."""

from __future__ import annotations

import contextlib
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torchopt_dist as todist
from tests.functions import spin
from torchopt_dist.distributed.life import interruption as interruption_module
from torchopt_dist.distributed.life.interruption import (
    Interruption,
    end_threads,
    is_cleaning_up,
    is_in_backward,
)


@pytest.fixture
def error():
    error = todist.PeerFailedError("rank 1 failed:\n\na traceback")
    error.summary = "rank 1 failed: KeyError: 'x'"
    return error


class Main:
    """A thread that runs ``body`` as ``main`` until it ends, handling an error all the while, as a caller may."""

    def __init__(self, body):
        self.interruption, self.unwound = Interruption(), threading.Event()
        self._began = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._end = self._thread.submit(self._run, body)
        self._began.wait()

    def _run(self, body):
        try:
            raise LookupError("the caller's")
        except LookupError:
            try:
                with self.interruption:
                    self._began.set()
                    body()
            finally:
                self.unwound.set()

    def unwind(self, error):
        return self.interruption.unwind(error, self.unwound)

    def raised(self):
        return self._end.exception(timeout=20)


def test_main_is_interrupted_by_an_error_that_is_the_other_ranks(error):
    main = Main(spin)
    assert main.unwind(error)
    raised = main.raised()
    assert (str(raised), raised.summary) == (str(error), error.summary)
    assert repr(type(raised)) == repr(todist.PeerFailedError)
    copy = pickle.loads(pickle.dumps(raised))
    assert type(copy) is todist.PeerFailedError
    assert (str(copy), copy.summary) == (str(error), error.summary)


def test_main_that_is_in_a_finally_block_is_left_there(error, limits):
    limits(grace_seconds=0.02)
    entered, leave = threading.Event(), threading.Event()

    def body():
        try:
            raise ValueError("its own")
        finally:
            entered.set()
            while not leave.is_set():
                pass

    main = Main(body)
    entered.wait()
    threading.Timer(0.1, leave.set).start()
    assert main.unwind(error)
    assert isinstance(main.raised(), ValueError)


def test_main_that_is_in_c_is_given_up(error, limits):
    limits(grace_seconds=0.02)
    wake = threading.Lock()
    wake.acquire()
    main = Main(wake.acquire)
    for _ in range(2):  # two ranks may fail
        assert not main.unwind(error)
    wake.release()
    assert isinstance(main.raised(), todist.PeerFailedError)


def test_what_runs_after_main_is_not_interrupted(error, limits):
    limits(grace_seconds=0.02)
    interruption = Interruption()
    with interruption:
        pass
    with ThreadPoolExecutor(1) as other:
        given_up = other.submit(interruption.unwind, error, threading.Event())
        while not given_up.done():
            pass
    assert not given_up.result()


class Closes:
    def __init__(self, close):
        self._close = close

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._close()


def _by_finally(work, close):
    try:
        work()
    finally:
        for _ in range(1):
            close()


def _by_with(work, close):
    with Closes(close):
        work()


@pytest.mark.parametrize("enter", [_by_finally, _by_with])
def test_a_block_that_main_has_entered_in_order_is_left_alone_first(error, monkeypatch, limits, enter):
    """The block ends, and not what comes after it; the one in which ``main`` itself was called does not count."""
    limits(grace_seconds=0.02)
    entered, leave, steps = threading.Event(), threading.Event(), []

    def close():
        entered.set()
        while not leave.is_set():
            pass
        steps.append("closed")

    def body():
        enter(lambda: steps.append("worked"), close)
        spin()

    main = Main(body)
    entered.wait()
    with ThreadPoolExecutor(1) as other:
        looked = []
        monkeypatch.setattr(
            interruption_module,
            "is_cleaning_up",
            lambda *frames: looked.append(is_cleaning_up(*frames)) or looked[-1],
        )
        unwinding = other.submit(main.unwind, error)
        while len(looked) < 3:  # nothing has been raised meanwhile
            assert not unwinding.done()
        leave.set()
        assert unwinding.result(timeout=20)
    assert isinstance(main.raised(), todist.PeerFailedError)
    assert steps == ["worked", "closed"]


def test_a_block_that_does_not_end_is_given_up(error, limits):
    limits(grace_seconds=0.02)
    limits(finally_seconds=0.1)
    leave = threading.Event()
    main = Main(lambda: _by_finally(lambda: None, leave.wait))
    assert not main.unwind(error)
    leave.set()
    assert main.raised() is None


def test_threads_that_run_python_are_ended_and_those_in_c_are_named():
    def until_ended(work):
        with contextlib.suppress(SystemExit):  # which pytest would tell
            work()

    wake = threading.Lock()
    wake.acquire()
    threads = [
        threading.Thread(target=until_ended, args=(work,), daemon=True) for work in (spin, wake.acquire, bool)
    ]
    for thread in threads:
        thread.start()
    assert end_threads([*threads, threading.current_thread()], 2) == [threads[1]]
    wake.release()
    threads[1].join(20)
    assert not threads[1].is_alive()


def test_a_thread_in_a_backward_is_known():
    entered, wake = threading.Event(), threading.Event()
    x = torch.ones(2, requires_grad=True)
    y = x.clone()
    y.register_hook(lambda _: (entered.set(), wake.wait(20))[0])
    thread = threading.Thread(target=y.sum().backward, daemon=True)
    assert not is_in_backward(thread)
    thread.start()
    assert entered.wait(20)
    assert is_in_backward(thread)
    assert not is_in_backward(threading.current_thread())
    wake.set()
    thread.join(20)
