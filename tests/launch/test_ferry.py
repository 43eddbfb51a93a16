"""What is sent here with a descriptor arrives there with one of its kind: messages with channels, in their order."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launch.ferries import (
    SECONDS,
    Ferries,
    content_of,
    give,
    has_ended,
    memory_file,
    read_all,
    take,
    take_and_answer,
)
from torchopt_dist.launch import frames
from torchopt_dist.launch.departures import Departures
from torchopt_dist.launch.messages import LARGEST, MOST_DESCRIPTORS, pair
from torchopt_dist.launch.ports import Channel

pytestmark = pytest.mark.timeout(60)


def test_messages_go_both_ways_and_keep_their_bounds(channel):
    here, there = channel
    for message in (b"one", b"two", bytes(LARGEST - 1000)):
        here.send(message)
        there.send(message[::-1])
    assert [take(there)[0] for _ in range(3)] == [b"one", b"two", bytes(LARGEST - 1000)]
    assert [take(here)[0] for _ in range(3)] == [b"eno", b"owt", bytes(LARGEST - 1000)]


@pytest.mark.parametrize("closer", [0, 1])
def test_the_end_of_a_channel_arrives_after_what_was_said(channel, closer):
    closed, other = channel[closer], channel[1 - closer]
    closed.send(b"last words")
    closed.close()
    assert take(other)[0] == b"last words"
    assert has_ended(other)


def test_what_is_sent_to_one_who_has_gone_is_the_end_of_the_channel(ferries):
    both = ferries()
    here, there = both.channel()
    there.close()
    assert has_ended(here)
    with pytest.raises(ConnectionError):
        here.send(b"anybody?")
    assert b"still" in take_and_answer(*both.channel())


def test_a_channel_travels_in_a_message(channel):
    here, there = channel
    ours, theirs = pair()
    give(here, b"have this", theirs.detach())
    data, end = take(there, 1)
    with ours, socket.socket(fileno=end) as arrived:
        assert data == b"have this"
        assert take_and_answer(ours, arrived) == b"still there"
        assert take_and_answer(arrived, ours) == b"still there"
        arrived.close()
        assert has_ended(ours)


def test_a_channel_that_came_over_carries_channels_in_its_turn(channel):
    ends = []
    carriers = channel
    for _ in range(5):
        ours, theirs = pair()
        give(carriers[0], b"deeper", theirs.detach())
        _, end = take(carriers[1], 1)
        carriers = (socket.socket(fileno=end), ours)  # and back the other way
        ends += carriers
    assert take_and_answer(*carriers) == b"still there"
    for end in ends:
        end.close()


def test_two_hundred_channels_at_once(ferries):
    both = ferries()
    channels = [both.channel(str(index).encode()) for index in range(200)]
    for round_ in range(3):
        for index, (here, there) in enumerate(channels):
            here.send(b"%d to %d" % (round_, index))
            there.send(b"%d from %d" % (round_, index))
        for index, (here, there) in enumerate(channels):
            assert take(there)[0] == b"%d to %d" % (round_, index)
            assert take(here)[0] == b"%d from %d" % (round_, index)
    for here, there in channels[::2]:
        here.close()
        assert has_ended(there)
    assert all(take_and_answer(*ends) == b"still there" for ends in channels[1::2])


# Order.


@pytest.mark.parametrize("late", [False, True], ids=["together", "late"])
def test_what_a_worker_has_said_arrives_before_its_agent_tells_of_its_end(ferries, monkeypatch, late):
    """Even if all of it is said when the ferry has seen already that the agent, and it alone, has something to say."""
    take_from, last_words = Departures._take_from, []

    def take_late(self, port):
        if last_words and isinstance(port, Channel) and port.root:
            last_words.pop()()
        take_from(self, port)

    monkeypatch.setattr(Departures, "_take_from", take_late)
    agent_here, agent_there = ferries().channel()
    for index in range(50):
        worker_here, for_worker = pair()
        out, for_out = os.pipe()
        give(agent_here, b"start", for_worker.detach(), for_out)
        _, end, out_there = take(agent_there, 2)

        def end_worker(end=end, out_there=out_there, index=index):
            os.write(out_there, b"line %d" % index)
            with socket.socket(fileno=end) as worker_there:
                worker_there.send(b"returned")
            agent_there.send(b"exited")

        if late:
            last_words.append(end_worker)
            agent_there.send(b"alive")
            assert take(agent_here)[0] == b"alive"
        else:
            end_worker()
        assert take(agent_here)[0] == b"exited"
        with worker_here:
            worker_here.setblocking(False)
            os.set_blocking(out, False)
            assert take(worker_here)[0] == b"returned"
            assert os.read(out, 100) == b"line %d" % index
        os.close(out)
        os.close(out_there)


# Any messages.


CARGO = st.one_of(
    st.tuples(st.just("file"), st.binary(max_size=3000)),
    st.tuples(st.just("pipe"), st.binary(max_size=3000)),
    st.tuples(st.just("channel"), st.binary(min_size=1, max_size=3000)),
)


MESSAGES = st.lists(
    st.tuples(
        st.booleans(), st.binary(min_size=1, max_size=2000), st.lists(CARGO, max_size=MOST_DESCRIPTORS)
    ),
    max_size=12,
)


@pytest.fixture(scope="module")
def standing():
    both = Ferries()
    yield both
    both.close()


@settings(max_examples=60, deadline=None)
@given(messages=MESSAGES, piece_size=st.sampled_from([1, 100, 1 << 18]))
def test_any_messages_with_any_cargo_arrive_in_order_and_whole(standing, messages, piece_size):
    ends = standing.channel()
    before, frames.PIECE_SIZE = frames.PIECE_SIZE, piece_size
    try:
        kept = []
        for back, data, cargo in messages:
            lent, held = [], []
            for kind, content in cargo:
                if kind == "file":
                    lent.append(memory_file(content))
                elif kind == "pipe":
                    end, into = os.pipe()
                    lent.append(into)
                    held.append((end, content))
                else:
                    ours, theirs = pair()
                    ours.settimeout(SECONDS)
                    lent.append(theirs.detach())
                    held.append((ours, content))
            give(ends[back], data, *lent)
            kept.append(held)
        for (back, data, cargo), held in zip(messages, kept, strict=True):
            arrived, *descriptors = take(ends[not back], len(cargo))
            assert arrived == data
            for (kind, content), descriptor in zip(cargo, descriptors, strict=True):
                if kind == "file":
                    assert content_of(descriptor) == content
                elif kind == "pipe":
                    assert os.write(descriptor, content) == len(content)
                else:
                    with socket.socket(fileno=os.dup(descriptor)) as end:
                        end.send(content)
                os.close(descriptor)
            for end, content in held:
                if isinstance(end, int):
                    assert read_all(end) == content
                else:
                    assert take(end)[0] == content
                    assert has_ended(end)
                    end.close()
    finally:
        frames.PIECE_SIZE = before
        for end in ends:
            end.close()
        standing.sockets.clear()
