"""Work → threads, as few as it takes: the last that became free works next, and those without work end."""

from __future__ import annotations

import functools
import queue
import threading
import time
import weakref

import pytest

from torchopt_dist.process.threads import ThreadPool


@pytest.fixture
def pool():
    made = []

    def make(idle_seconds):
        made.append(ThreadPool(idle_seconds))
        return made[-1]

    yield make
    for each in made:
        each.close()


def busy(pool, count):
    """``count`` threads that each tell who they are, and work until their event is set."""
    told, goes = queue.SimpleQueue(), [threading.Event() for _ in range(count)]
    for number, go in enumerate(goes):
        pool.run(lambda number=number, go=go: (told.put((number, threading.current_thread())), go.wait(30)))
    return [thread for _, thread in sorted(told.get(timeout=30) for _ in goes)], goes


def free(pool, count):
    deadline = time.monotonic() + 30
    while len(pool._free) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_threads_of_a_burst_end(pool):
    threads, goes = busy(pool(0.01), 40)
    assert len(set(threads)) == 40
    for go in goes:
        go.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_the_thread_that_became_free_last_works_next(pool):
    pool = pool(60)
    threads, goes = busy(pool, 3)
    for number, go in enumerate(goes, 1):
        go.set()
        free(pool, number)
    for _ in range(5):
        again, (go,) = busy(pool, 1)
        assert again == threads[-1:]
        go.set()
        free(pool, 3)


def test_no_work_is_lost_where_threads_end(pool):
    pool = pool(0)
    done = queue.SimpleQueue()
    for number in range(500):
        pool.run(lambda number=number: done.put(number))
    assert sorted(done.get(timeout=30) for _ in range(500)) == list(range(500))


def test_a_closed_pool_keeps_no_thread(pool):
    pool = pool(60)
    threads, goes = busy(pool, 2)
    goes[0].set()
    free(pool, 1)
    pool.close()
    goes[1].set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_closing_waits_for_work_under_way_but_not_for_ever(pool):
    pool = pool(60)
    _, (go,) = busy(pool, 1)
    pool.close(0.01)  # work that does not end keeps nobody
    closer = threading.Thread(target=pool.close, args=(60,))
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    go.set()
    closer.join(30)
    assert not closer.is_alive()


def test_threads_have_ended_when_a_closed_pool_was_waited_for(pool):
    pool = pool(60)
    threads, goes = busy(pool, 20)
    for go in goes:
        go.set()
    free(pool, 20)
    pool.close(30)
    assert not any(thread.is_alive() for thread in threads)


def test_a_thread_that_waits_holds_nothing_of_its_work(pool):
    class Tensors:
        pass

    def work(held=None):
        assert held is not None

    threads, held = pool(30.0), Tensors()
    gone = weakref.ref(held)
    for _ in range(2):  # the thread's first work, and its next
        threads.run(functools.partial(work, held))
        free(threads, 1)
    del held
    assert gone() is None
