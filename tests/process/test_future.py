"""Futures of replies: the first result counts, and whoever waits, or is called, has it once, in whatever thread."""

from __future__ import annotations

import queue
import signal
import threading
import weakref

import pytest

from tests.waits import wait_until
from torchopt_dist.process.future import Future, as_completed

SECONDS = 30


def in_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_the_first_result_counts():
    future, failed = Future(), Future()
    assert future.set_result(1)
    assert not future.set_result(2)
    assert not future.set_exception(ValueError())
    assert failed.set_exception(KeyError("x"))
    assert not failed.set_result(2)
    assert (future.result(), future.exception(), future.done()) == (1, None, True)
    assert type(failed.exception()) is KeyError
    for _ in range(2):
        with pytest.raises(KeyError):
            failed.result()


def test_all_threads_that_wait_have_the_result_after_the_functions_were_called():
    future, order = Future(), queue.SimpleQueue()
    waits = [lambda: order.put(future.result())] * 3

    def settle():
        wait_until(lambda: len(future._waiting) == len(waits))
        future.add_done_callback(lambda done: order.put(-done.result()))
        future.set_result(5)

    in_threads(settle, *waits)
    assert [order.get(timeout=SECONDS) for _ in range(4)] == [-5, 5, 5, 5]


def test_each_function_is_called_once_while_others_add_and_settle():
    for _ in range(300):
        future, called, settled = Future(), queue.SimpleQueue(), queue.SimpleQueue()
        start = threading.Barrier(4)

        def add(number, future=future, called=called, start=start):
            start.wait(SECONDS)
            future.add_done_callback(lambda _: called.put(number))

        def settle(number, future=future, settled=settled, start=start):
            start.wait(SECONDS)
            settled.put((future.set_result(number), number))

        in_threads(lambda: add(0), lambda: add(1), lambda: settle(2), lambda: settle(3))
        assert sorted(called.get_nowait() for _ in range(called.qsize())) == [0, 1]
        (won,) = {number for first, number in [settled.get(), settled.get()] if first}
        assert future.result() == won


def test_a_function_that_raises_is_logged_and_keeps_nobody_waiting(caplog):
    future, called = Future(), []
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(called.append)
    assert future.set_result(0)
    assert called == [future]
    assert "ZeroDivisionError" in caplog.text


def test_a_wait_can_be_interrupted_and_begun_again():
    future, main = Future(), threading.get_ident()

    def interrupt():
        wait_until(lambda: future._waiting)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        future.result()
    thread.join(SECONDS)
    in_threads(lambda: future.set_result(3))
    assert future.result() == 3


def test_a_future_keeps_no_function_that_it_has_called():
    class Tensors:
        pass

    future, held = Future(), Tensors()
    gone = weakref.ref(held)
    future.add_done_callback(lambda _, held=held: held)
    del held
    assert gone() is not None
    future.set_result(0)
    assert gone() is None


def test_futures_come_as_they_are_completed_until_the_time_is_up():
    first, second, never = Future(), Future(), Future()
    second.set_result(2)
    coming = as_completed([first, second, never])
    assert next(coming) is second
    first.set_exception(ValueError())
    assert next(coming) is first
    assert list(as_completed([never, first, second], 0.01)) == [first, second]
    with pytest.raises(TimeoutError, match=r"no result after 0\.01 s"):
        never.result(0.01)
    assert list(as_completed([])) == []
