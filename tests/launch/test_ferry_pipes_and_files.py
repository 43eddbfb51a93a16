"""What is written into a pipe here comes out there; a file in memory is copied, once."""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading

import pytest

from tests.launch.ferries import (
    SECONDS,
    content_of,
    give,
    memory_file,
    pipe_across,
    read_all,
    take,
    take_and_answer,
)
from torchopt_dist.launch.frames import PIECE_SIZE, Frames, Kind

pytestmark = pytest.mark.timeout(60)


# Pipes.


@contextlib.contextmanager
def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    yield thread
    thread.join(SECONDS)
    assert not thread.is_alive()


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
