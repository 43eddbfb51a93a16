"""Two ferries over one stream, in threads: what is sent here with a descriptor arrives there with one of its kind."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import queue
import random
import select
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchopt_dist.launch import ferry, frames
from torchopt_dist.launch.ferry import NO_LIFE, Ferry
from torchopt_dist.launch.frames import HEAD, PIECE_SIZE, Frames, Kind
from torchopt_dist.launch.messages import LARGEST, MOST_DESCRIPTORS, pair

pytestmark = pytest.mark.timeout(60)

SECONDS = 20.0
"""For what comes at once."""


class End:
    """One ferry in a thread, and the channels that the other has opened."""

    def __init__(self, descriptor, odd, patience, opener="pair", early=b""):
        self.opened = queue.Queue()
        options = {"odd": odd, "patience": patience, "early": early}
        opener = self.open_pair if opener == "pair" else opener
        self.ferry = Ferry(descriptor, descriptor, opener=opener, **options)
        self.why = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        self.why = self.ferry.run()

    def open_pair(self, payload):
        ours, theirs = pair()
        self.opened.put((payload, theirs))
        return ours

    def ended(self, seconds=SECONDS):
        """Why it has ended."""
        self.thread.join(seconds)
        assert not self.thread.is_alive()
        return self.why


class Ferries:
    """``near`` and ``far``, and channels between them that are closed at the end."""

    def __init__(self, patience=SECONDS, opener="pair"):
        near, far = socket.socketpair()
        self.near = End(near.detach(), True, patience)
        self.far = End(far.detach(), False, patience, opener)
        self.sockets = []

    def channel(self, payload=b"agent"):
        """Both ends of a new channel."""
        ours = self.keep(self.near.ferry.open(payload))
        said, theirs = self.far.opened.get(timeout=SECONDS)
        assert said == payload
        return ours, self.keep(theirs)

    def keep(self, end):
        end.settimeout(SECONDS)
        self.sockets.append(end)
        return end

    def close(self):
        for end in (self.near, self.far):
            end.ferry.close()
            end.ended()
        for end in self.sockets:
            end.close()


@pytest.fixture
def ferries():
    made = []

    def make(*args, **kwargs):
        made.append(Ferries(*args, **kwargs))
        return made[-1]

    yield make
    for both in made:
        both.close()


@pytest.fixture
def channel(ferries):
    return ferries().channel()


def give(channel, data, *descriptors):
    """Send, and close the descriptors here."""
    socket.send_fds(channel, [data], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def take(channel, number=0):
    """The next message's data, and so many descriptors."""
    data, descriptors, _, _ = socket.recv_fds(channel, LARGEST, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    assert len(descriptors) == number
    return (data, *descriptors)


def memory_file(content):
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    return descriptor


def content_of(descriptor):
    return os.pread(descriptor, os.fstat(descriptor).st_size + 1, 0)


def read_all(descriptor):
    """What comes out of a pipe until its end."""
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def has_ended(channel):
    """Wait for the end of a channel."""
    channel.settimeout(SECONDS)
    try:
        return channel.recv(1) == b""
    except ConnectionError:
        return True


@contextlib.contextmanager
def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    yield thread
    thread.join(SECONDS)
    assert not thread.is_alive()


@contextlib.contextmanager
def nothing_leaks():
    """As many descriptors are open after as before. What is collected late is collected."""
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    deadline = time.monotonic() + SECONDS
    while True:
        gc.collect()
        after = sorted(os.listdir("/proc/self/fd"))
        if len(after) == len(before):
            return
        assert time.monotonic() < deadline, set(after) - set(before)
        time.sleep(0.01)


# Messages.


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


def take_and_answer(here, there):
    here.send(b"still there")
    there.send(take(there)[0])
    return take(here)[0]


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


# Pipes.


def pipe_across(channel):
    """A pipe's end to read from here, and that to write into which has arrived there."""
    reader, writer = os.pipe()
    give(channel[0], b"write into it", writer)
    return reader, take(channel[1], 1)[1]


def test_what_is_written_there_comes_out_here_until_the_end(channel):
    reader, writer = pipe_across(channel)
    text = random.Random(0).randbytes(3_000_000)

    def write():
        with os.fdopen(writer, "wb") as file:
            file.write(text)

    with in_thread(write):
        assert read_all(reader) == text


def test_a_pipe_that_is_shared_ends_with_its_last_writer(channel):
    reader, writer = pipe_across(channel)
    other = os.dup(writer)
    os.write(writer, b"one ")
    os.close(writer)
    assert os.read(reader, 100) == b"one "
    assert not select.select([reader], [], [], 0.2)[0]
    os.write(other, b"two")
    os.close(other)
    assert read_all(reader) == b"two"


def test_a_writer_there_learns_that_the_reader_here_has_gone(channel):
    reader, writer = pipe_across(channel)
    os.close(reader)

    def write_on():
        while True:
            os.write(writer, b"x" * 1000)

    with pytest.raises(BrokenPipeError):
        write_on()
    os.close(writer)
    assert take_and_answer(*channel) == b"still there"


def test_a_pipe_goes_the_other_way_too(channel):
    reader, writer = pipe_across(channel[::-1])
    os.write(writer, b"back")
    os.close(writer)
    assert read_all(reader) == b"back"


# Files in memory.


@pytest.fixture
def pieces(monkeypatch):
    """The files' numbers of all pieces that are received."""
    seen = []
    following = Frames.next

    def next_(self):
        frame = following(self)
        if frame is not None and frame[0] is Kind.PIECE:
            seen.append(frame[1])
        return frame

    monkeypatch.setattr(Frames, "next", next_)
    return seen


@pytest.mark.parametrize("size", [0, 1, PIECE_SIZE - 1, PIECE_SIZE, PIECE_SIZE + 1, 50_000_000])
def test_a_file_arrives_whole(channel, size):
    content = random.Random(size).randbytes(size)
    give(channel[0], b"a file", memory_file(content))
    _, arrived = take(channel[1], 1)
    assert content_of(arrived) == content
    os.close(arrived)


def test_a_file_that_is_shared_by_messages_is_sent_once(ferries, pieces):
    both = ferries()
    here, there = both.channel()
    shared, other = memory_file(b"a" * (PIECE_SIZE + 1)), memory_file(b"b")
    give(here, b"1", os.dup(shared))
    give(here, b"2", os.dup(shared), other)
    give(here, b"3", shared, os.dup(shared))
    arrived = [*take(there, 1)[1:], *take(there, 2)[1:], *take(there, 2)[1:]]
    assert [content_of(descriptor)[:1] for descriptor in arrived] == [b"a", b"a", b"b", b"a", b"a"]
    first, other_number = dict.fromkeys(pieces)
    assert pieces == [first, first, other_number]
    # Another channel is another launch, whose end must not take the file from this one.
    here2, there2 = both.channel()
    give(here2, b"4", memory_file(b"c"))
    arrived += take(there2, 1)[1:]
    assert len(pieces) == 4
    for descriptor in arrived:
        os.close(descriptor)


def test_the_next_file_is_another_one_though_the_first_is_closed(channel, pieces):
    """The kernel gives numbers of inodes anew."""
    for index in range(20):
        give(channel[0], b"next", memory_file(b"%d" % index))
        _, arrived = take(channel[1], 1)
        assert content_of(arrived) == b"%d" % index
        os.close(arrived)
    assert len(set(pieces)) == 20


# Order.


@pytest.mark.parametrize("late", [False, True], ids=["together", "late"])
def test_what_a_worker_has_said_arrives_before_its_agent_tells_of_its_end(ferries, monkeypatch, late):
    """Even if all of it is said when the ferry has seen already that the agent, and it alone, has something to say."""
    take_from, last_words = Ferry._take_from, []

    def take_late(self, port):
        if last_words and isinstance(port, ferry.Channel) and port.root:
            last_words.pop()()
        take_from(self, port)

    monkeypatch.setattr(Ferry, "_take_from", take_late)
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


# Slow ones.


def test_a_slow_reader_holds_up_neither_the_other_way_nor_the_connection(ferries):
    """Nobody takes what was sent here for three times as long as a silent ferry would be given."""
    both = ferries(patience=1.0)
    here, there = both.channel()
    here.setblocking(False)
    sent, until = 0, time.monotonic() + 3.0
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            here.send(sent.to_bytes(4, "big") * 10_000)
            sent += 1
        there.send(b"meanwhile")
        here.setblocking(True)
        assert take(here)[0] == b"meanwhile"
        here.setblocking(False)
        time.sleep(0.01)
    assert sent > 10
    assert [take(there)[0] for _ in range(sent)] == [i.to_bytes(4, "big") * 10_000 for i in range(sent)]
    assert both.near.thread.is_alive()
    assert both.far.thread.is_alive()


def test_a_reader_of_a_pipe_that_is_slow_makes_its_writer_wait(channel):
    """And no memory is filled with what is written meanwhile."""
    reader, writer = pipe_across(channel)
    os.set_blocking(writer, False)
    written, quiet = 0, time.monotonic() + 0.5
    while time.monotonic() < quiet:
        with contextlib.suppress(BlockingIOError):
            written += os.write(writer, bytes(1 << 16))
            quiet = time.monotonic() + 0.5
        assert written < 30_000_000
    os.close(writer)
    assert len(read_all(reader)) == written


def test_an_opener_may_take_longer_than_the_patience(ferries):
    ends = []

    def opener(payload):
        time.sleep(3.0)
        ours, theirs = pair()
        ends.append(theirs)
        return ours

    both = ferries(patience=1.0, opener=opener)
    here = both.keep(both.near.ferry.open(b"slow"))
    here.send(b"said meanwhile")
    deadline = time.monotonic() + SECONDS
    while not ends:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert take(both.keep(ends[0]))[0] == b"said meanwhile"
    assert both.near.thread.is_alive()
    assert both.far.thread.is_alive()


def test_an_opener_that_raises_ends_the_channel_alone(ferries, monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda told: seen.append(told.exc_value))
    ends = []

    def opener(payload):
        if payload == b"bad":
            raise RuntimeError("no such thing")
        ours, theirs = pair()
        ends.append(theirs)
        return ours

    both = ferries(opener=opener)
    assert has_ended(both.keep(both.near.ferry.open(b"bad")))
    assert str(seen[0]) == "no such thing"
    here = both.keep(both.near.ferry.open(b"good"))
    here.send(b"hello")
    deadline = time.monotonic() + SECONDS
    while not ends and time.monotonic() < deadline:
        time.sleep(0.001)
    assert take(both.keep(ends[0]))[0] == b"hello"


def test_one_who_opens_nothing_ends_the_channel():
    stream, other = socket.socketpair()
    end, mute = End(stream.detach(), True, SECONDS), End(other.detach(), False, SECONDS, opener=None)
    with end.ferry.open(b"x") as channel:
        assert has_ended(channel)
    end.ferry.close()
    assert (end.ended(), mute.ended()) == ("it was closed", "the other end closed it")


# The end.


def silent_partner(patience):
    """A ferry whose partner says nothing, and the partner's end of the stream."""
    stream, other = socket.socketpair()
    return End(stream.detach(), True, patience), other


@pytest.mark.parametrize("patience", [0.3, 1.5])
def test_silence_is_the_end_after_the_patience(patience):
    start = time.monotonic()
    end, other = silent_partner(patience)
    with other, end.ferry.open(b"x") as channel:
        assert has_ended(channel)
        assert end.ended() == f"{NO_LIFE} for {patience:g} s"
        assert patience <= time.monotonic() - start < patience + 2.0


@pytest.mark.parametrize("patience", [0.3, 1.0])
def test_idle_ferries_keep_each_other_alive(ferries, patience):
    both = ferries(patience=patience)
    ends = both.channel()
    time.sleep(4 * patience)
    assert take_and_answer(*ends) == b"still there"


def test_signs_of_life_come_though_there_is_other_traffic_one_way(ferries):
    """What is received must not delay what keeps the other end patient."""
    both = ferries(patience=1.0)
    here, there = both.channel()
    for _ in range(50):
        here.send(b"tick")
        assert take(there)[0] == b"tick"
        time.sleep(0.09)
    assert both.near.thread.is_alive()


def test_it_can_be_closed_from_another_thread(ferries):
    both = ferries()
    here, there = both.channel()
    reader, writer = pipe_across((here, there))
    both.near.ferry.close()
    assert both.near.ended() == "it was closed"
    assert both.far.ended() == "the other end closed it"
    assert both.near.ferry.ended
    assert has_ended(here)
    assert has_ended(there)
    assert read_all(reader) == b""
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"x")
    os.close(writer)
    assert has_ended(both.keep(both.near.ferry.open(b"too late")))
    both.near.ferry.close()  # which does nothing more


def test_the_end_of_the_stream_is_the_end_of_all():
    end, other = silent_partner(SECONDS)
    channels = [end.ferry.open(b"x") for _ in range(3)]
    reader, writer = os.pipe()
    give(channels[0], b"pipe", writer)
    while other.recv(1 << 16).find(b"pipe") < 0:
        pass
    other.close()
    assert end.ended() in ("the other end closed it", "it broke: Broken pipe")
    assert all(has_ended(channel) for channel in channels)
    assert read_all(reader) == b""
    for channel in channels:
        channel.close()


def test_what_came_before_the_ferry_is_the_stream_s_beginning():
    content = pickle.dumps((b"early", []))
    frame = HEAD.pack(Kind.MESSAGE, 2, len(content)) + content
    stream, other = socket.socketpair()
    ours, theirs = pair()
    opening = HEAD.pack(Kind.OPEN, 2, 1) + b"x"
    end = End(stream.detach(), True, SECONDS, opener=lambda payload: theirs, early=opening + frame[:7])
    other.sendall(frame[7:])
    ours.settimeout(SECONDS)
    assert take(ours)[0] == b"early"
    other.close()
    end.ended()
    ours.close()


# What is kept.


def test_no_descriptor_is_kept_of_what_has_ended(ferries):
    both = ferries()
    with nothing_leaks():
        for _ in range(20):
            here, there = both.channel()
            ours, theirs = pair()
            out, into = os.pipe()
            file = memory_file(b"file")
            give(here, b"start", theirs.detach(), into, os.dup(file), file)
            arrived = take(there, 4)[1:]
            os.write(arrived[1], b"output")
            for descriptor in arrived:
                os.close(descriptor)
            assert read_all(out) == b"output"
            assert has_ended(ours)
            for end in (here, there, ours):
                end.close()


def test_no_descriptor_is_kept_by_ferries_that_have_ended():
    with nothing_leaks():
        both = Ferries()
        here, there = both.channel()
        ours, theirs = pair()
        out, into = os.pipe()
        give(here, b"start", theirs.detach(), into, memory_file(b"file"))
        for descriptor in take(there, 3)[1:]:
            os.close(descriptor)
        both.close()
        ours.close()
        os.close(out)


def test_no_descriptor_is_kept_of_files_that_were_not_sent():
    """The stream is full, and then it ends."""
    with nothing_leaks():
        end, other = silent_partner(SECONDS)
        channel = end.ferry.open(b"x")
        for _ in range(5):
            give(channel, b"files", memory_file(bytes(3_000_000)), memory_file(b"small"))
        time.sleep(0.3)
        other.close()
        end.ended()
        channel.close()


def test_no_descriptor_is_kept_of_a_message_to_one_who_has_gone(ferries):
    both = ferries()
    with nothing_leaks():
        for _ in range(20):
            here, there = both.channel()
            there.close()
            ours, theirs = pair()
            out, into = os.pipe()
            descriptors = (theirs.detach(), into, memory_file(b"file"))
            with contextlib.suppress(ConnectionError):
                socket.send_fds(here, [b"start"], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            assert has_ended(ours)
            assert read_all(out) == b""
            here.close()
            ours.close()


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
