"""Messages: whole, in order, over whatever pieces the bytes come in, and with nobody waiting."""

from __future__ import annotations

import os
import random
import socket
import threading

import pytest

from torchopt_dist.launching._messages import FULL, Alive, FrameReader, Output, Raised, Stop, Stream, frame
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
        Alive(7),
        Output(1, "stdout", b"line\n"),
        Stop(1e20),
        Raised(SerializedException.told("text", "trace"), 3, b"x" * 9),
    ]
    for message in said:
        ours.put(message)
    assert all_of(theirs, 4) == said
    assert theirs.receive() is None


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(8, 20))]
)
def test_the_pieces_in_which_bytes_come_make_no_difference(seed):
    chance = random.Random(seed)
    said = [Output(rank, "stderr", chance.randbytes(chance.choice([0, 1, 100, 70_000]))) for rank in range(9)]
    data = b"".join(part for message in said for part in frame(message))
    reader, found = FrameReader(), []
    while data:
        size = chance.choice([1, 5, 11, 12, 13, 1000, 100_000])
        found += reader.feed(data[:size])
        data = data[size:]
    assert found == said


def test_the_end_is_told_after_all_that_was_sent(pair):
    ours, theirs = pair
    ours.put(Alive(1))
    ours.put(Output(0, "report", b"x" * 1000))
    ours.close()
    assert theirs.waits_to_be_read
    assert len(all_of(theirs, 2)) == 2
    with pytest.raises(EOFError):
        theirs.receive()
    with pytest.raises(OSError, match=r"closed|Broken pipe|reset"):
        theirs.put(Alive(2))


def test_nobody_waits_for_one_who_does_not_read_and_a_stream_tells_that_it_is_full(pair):
    ours, theirs = pair
    large = os.urandom(3 << 20)
    ours.put(Output(0, "stdout", large))
    ours.put(Alive(3))
    assert ours.is_full
    assert ours.waits_to_send
    ours.send_all(0.01)  # is over when its time is
    assert ours.waits_to_send
    found = []
    while len(found) < 2:
        found += theirs.receive() or []
        ours.send()
    assert found == [Output(0, "stdout", large), Alive(3)]
    assert not ours.waits_to_send
    assert not ours.is_full


def test_a_stream_is_full_only_when_more_waits_than_it_should(pair):
    ours, _ = pair
    while not ours.waits_to_send:
        ours.put(Output(0, "stdout", bytes(1000)))
    assert not ours.is_full
    ours.put(Output(0, "stdout", bytes(FULL)))
    assert ours.is_full


def test_all_is_sent_as_soon_as_the_other_end_takes_it(pair):
    ours, theirs = pair
    ours.put(Output(0, "stdout", bytes(10 << 20)))
    found = []
    reader = threading.Thread(target=lambda: found.extend(all_of(theirs, 1)))
    reader.start()
    ours.send_all(30)
    reader.join(30)
    assert found == [Output(0, "stdout", bytes(10 << 20))]


def test_the_bytes_of_a_message_are_not_copied_before_they_are_sent():
    data = bytes(1 << 20)
    _, of_bytes = frame(Output(0, "stdout", data))
    assert of_bytes.obj is data
