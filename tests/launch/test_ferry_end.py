"""Slow ones hold up nobody; a ferry ends by its stream, by silence or when asked to, and keeps nothing."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time

import pytest

from tests.launch.descriptors import no_new_descriptors
from tests.launch.ferries import (
    SECONDS,
    End,
    Ferries,
    give,
    has_ended,
    memory_file,
    pipe_across,
    read_all,
    silent_partner,
    take,
    take_and_answer,
)
from torchopt_dist.launch.ferry import NO_LIFE
from torchopt_dist.launch.frames import HEAD, Kind
from torchopt_dist.launch.messages import pair

pytestmark = pytest.mark.timeout(60)


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


def cargo():
    """Ends of a channel and of a pipe to hold here, and what goes with a message: the other ends, and a file."""
    ours, theirs = pair()
    out, into = os.pipe()
    return ours, out, (theirs.detach(), into, memory_file(b"file"))


def test_no_descriptor_is_kept_of_what_has_ended(ferries):
    both = ferries()
    with no_new_descriptors():
        for _ in range(20):
            here, there = both.channel()
            ours, out, descriptors = cargo()
            give(here, b"start", *descriptors, os.dup(descriptors[-1]))
            arrived = take(there, 4)[1:]
            os.write(arrived[1], b"output")
            for descriptor in arrived:
                os.close(descriptor)
            assert read_all(out) == b"output"
            assert has_ended(ours)
            for end in (here, there, ours):
                end.close()


def test_no_descriptor_is_kept_by_ferries_that_have_ended():
    with no_new_descriptors():
        both = Ferries()
        here, there = both.channel()
        ours, out, descriptors = cargo()
        give(here, b"start", *descriptors)
        for descriptor in take(there, 3)[1:]:
            os.close(descriptor)
        both.close()
        ours.close()
        os.close(out)


def test_no_descriptor_is_kept_of_files_that_were_not_sent():
    """The stream is full, and then it ends."""
    with no_new_descriptors():
        end, other = silent_partner(SECONDS)
        channel = end.ferry.open(b"x")
        for _ in range(5):
            give(channel, b"files", memory_file(bytes(3_000_000)), memory_file(b"small"))
        time.sleep(0.3)
        other.close()
        end.ended()
        channel.close()


def test_no_descriptor_is_kept_of_files_that_came_without_their_message():
    with no_new_descriptors():
        end, other = silent_partner(SECONDS)
        for number in (2, 4):
            other.sendall(HEAD.pack(Kind.PIECE, number, 5) + b"piece")
        other.close()
        assert end.ended() == "the other end closed it"


def test_no_descriptor_is_kept_of_a_message_to_one_who_has_gone(ferries):
    both = ferries()
    with no_new_descriptors():
        for _ in range(20):
            here, there = both.channel()
            there.close()
            ours, out, descriptors = cargo()
            with contextlib.suppress(ConnectionError):
                socket.send_fds(here, [b"start"], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            assert has_ended(ours)
            assert read_all(out) == b""
            here.close()
            ours.close()
