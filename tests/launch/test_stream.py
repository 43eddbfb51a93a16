"""Messages: whole, in order, over whatever pieces the bytes come in, and with nobody waiting."""

from __future__ import annotations

import math
import os
import random
import socket
import threading

import pytest

from torchopt_dist.launching._messages import FULL, FrameReader, Stream, ToAgent, ToLauncher, frame
from torchopt_dist.launching._processes import ready
from torchopt_dist.pickling.serialized_exception import SerializedException

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pair():
    ends = [Stream(end) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


def all_of(stream, number):
    """So many messages."""
    found = []
    while len(found) < number:
        found += stream.receive() or []
    return found


def test_messages_come_in_order(pair):
    ours, theirs = pair
    said = [
        (ToLauncher.alive, 7),
        (ToLauncher.written, 1, "stdout", b"line\n"),
        (ToAgent.stop, 1e20),
        (ToLauncher.raised, SerializedException.told("text", "trace"), 3, b"x" * 9),
    ]
    for message, *args in said:
        ours.put(message, *args)
    assert all_of(theirs, 4) == [(message.__name__, tuple(args)) for message, *args in said]
    assert theirs.receive() is None


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(8, 20))]
)
def test_the_pieces_in_which_bytes_come_make_no_difference(seed):
    chance = random.Random(seed)
    said = [(rank, "stderr", chance.randbytes(chance.choice([0, 1, 100, 70_000]))) for rank in range(9)]
    data = b"".join(part for args in said for part in frame(ToLauncher.written, *args))
    reader, found = FrameReader(), []
    while data:
        size = chance.choice([1, 5, 11, 12, 13, 1000, 100_000])
        found += reader.feed(data[:size])
        data = data[size:]
    assert found == [("written", args) for args in said]


def test_the_end_is_told_after_all_that_was_sent(pair):
    ours, theirs = pair
    ours.put(ToLauncher.alive, 1)
    ours.put(ToLauncher.written, 0, "report", b"x" * 1000)
    ours.close()
    assert theirs.waits_to_be_read
    assert len(all_of(theirs, 2)) == 2
    with pytest.raises(EOFError):
        theirs.receive()
    with pytest.raises(OSError, match=r"closed|Broken pipe|reset"):
        theirs.put(ToLauncher.alive, 2)


def test_nobody_waits_for_one_who_does_not_read_and_a_stream_tells_that_it_is_full(pair):
    ours, theirs = pair
    large = os.urandom(3 << 20)
    ours.put(ToLauncher.written, 0, "stdout", large)
    ours.put(ToLauncher.alive, 3)
    assert ours.is_full
    assert ours.waits_to_send
    ours.send_all(0.01)  # is over when its time is
    assert ours.waits_to_send
    found = []
    while len(found) < 2:
        found += theirs.receive() or []
        ours.send()
    assert found == [("written", (0, "stdout", large)), ("alive", (3,))]
    assert not ours.waits_to_send
    assert not ours.is_full


def test_a_stream_is_full_only_when_more_waits_than_it_should(pair):
    ours, _ = pair
    while not ours.waits_to_send:
        ours.put(ToLauncher.written, 0, "stdout", bytes(1000))
    assert not ours.is_full
    ours.put(ToLauncher.written, 0, "stdout", bytes(FULL))
    assert ours.is_full


def test_all_is_sent_as_soon_as_the_other_end_takes_it(pair):
    ours, theirs = pair
    ours.put(ToLauncher.written, 0, "stdout", bytes(10 << 20))
    found = []
    reader = threading.Thread(target=lambda: found.extend(all_of(theirs, 1)))
    reader.start()
    ours.send_all(30)
    reader.join(30)
    assert found == [("written", (0, "stdout", bytes(10 << 20)))]


def test_the_bytes_of_a_message_are_not_copied_before_they_are_sent():
    data = bytes(1 << 20)
    _, of_bytes = frame(ToLauncher.written, 0, "stdout", data)
    assert of_bytes.obj is data


def test_what_is_ready_is_what_can_be_read_or_is_to_be_written():
    (reading, writing), (silent, other) = os.pipe(), os.pipe()
    try:
        watched = [(reading, False, "read"), (silent, False, "silent"), (writing, True, "write")]
        assert ready(watched, math.inf) == ["write"]
        assert ready(watched[:2], 0.001) == ready(watched[:2], -1.0) == []
        os.write(writing, b"x")
        assert ready(watched, math.inf) == ["read", "write"]
        os.close(other)
        assert ready(watched[1:2], math.inf) == ["silent"]  # its end can be read
    finally:
        for descriptor in (reading, writing, silent):
            os.close(descriptor)
