"""The role of receiving: short messages stay with one thread, and nobody waits for a message that is not received."""

from __future__ import annotations

import queue
import threading
import time
import weakref

import pytest

from torchopt_dist.distributed.transport.receiver import SHORT_IN_A_ROW, Receiver
from torchopt_dist.process.threads import ThreadPool

SECONDS = 30


class Line:
    """A receiver of functions, each of which is called, and the threads that have called them."""

    def __init__(self):
        self.pool = ThreadPool()
        self.ended = threading.Event()
        self.handled = queue.SimpleQueue()
        self._messages = queue.SimpleQueue()
        self.receiver = Receiver(self._messages.get, self._handle, self.pool, self.ended.set)
        self.receiver.start()

    def _handle(self, message):
        message()
        self.handled.put(threading.get_ident())

    def send(self, message):
        self._messages.put(message)

    def ask(self, message=lambda: None):
        """Send a message and wait until it has been handled; returns the thread that has done so."""
        self.send(message)
        return self.handled.get(timeout=SECONDS)

    def be_short(self):
        """Send short messages until one thread keeps the role; a slow machine may take a message for a long one."""
        deadline = time.monotonic() + SECONDS
        while self.receiver._short < SHORT_IN_A_ROW:
            assert time.monotonic() < deadline
            self.ask()

    def close(self):
        self.send(None)
        assert self.ended.wait(SECONDS)
        self.pool.close(SECONDS)
        assert not self.pool._working


@pytest.fixture
def line(limits):
    """All messages are short by the clock, also on a busy machine, unless they wait."""
    limits(short_seconds=10.0)
    made = Line()
    yield made
    made.close()


@pytest.fixture
def line_without_keeper(monkeypatch, limits):
    limits(short_seconds=10.0)
    monkeypatch.setattr(Receiver, "_keep_time", lambda self: None)
    made = Line()
    yield made
    made.close()


def test_short_messages_stay_with_one_thread(line_without_keeper):
    line_without_keeper.be_short()
    assert len({line_without_keeper.ask() for _ in range(20)}) == 1


def test_after_a_long_message_others_are_received_meanwhile(line_without_keeper, limits):
    line = line_without_keeper
    line.be_short()
    limits(short_seconds=0.0)  # the next one is found to be long
    line.ask()
    go, waited = threading.Event(), []
    line.send(lambda: waited.append(go.wait(SECONDS)))
    line.ask(go.set)
    line.handled.get(timeout=SECONDS)
    assert waited == [True]


def test_a_message_that_takes_longer_than_expected_keeps_no_other_one(line):
    line.be_short()
    go, waited = threading.Event(), []
    line.send(lambda: waited.append(go.wait(SECONDS)))
    line.ask(go.set)
    line.handled.get(timeout=SECONDS)
    assert waited == [True]


def test_who_is_about_to_wait_gives_the_role_on(line_without_keeper):
    line = line_without_keeper
    line.be_short()
    go, waited = threading.Event(), []

    def nested():
        line.receiver.about_to_wait()
        line.receiver.about_to_wait()  # it has the role no longer
        waited.append(go.wait(SECONDS))

    line.send(nested)
    line.ask(go.set)
    line.handled.get(timeout=SECONDS)
    assert waited == [True]
    line.receiver.about_to_wait()  # nor has a thread that handles no message
    assert len({line.ask() for _ in range(20)}) == 1


def test_the_keeper_takes_the_role_from_nobody_who_is_done(line, monkeypatch):
    line.be_short()
    started = []
    monkeypatch.setattr(line.pool, "run", started.append)
    deadline = time.monotonic() + SECONDS
    while line.receiver._keeps_time.is_set():  # until the keeper waits for the next message
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not started
    monkeypatch.undo()


def test_a_message_is_let_go_of_when_it_has_been_handled(line):
    class Message:
        def __call__(self):
            pass

    line.be_short()
    message = Message()
    gone = weakref.ref(message)
    line.ask(message)
    del message
    deadline = time.monotonic() + SECONDS
    while gone() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
