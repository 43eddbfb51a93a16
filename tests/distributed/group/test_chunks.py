"""Tensors in chunks are the tensors again; chunks that nobody wants or sends are let go of, and waits end."""

from __future__ import annotations

import threading

import pytest
import torch

from torchopt_dist.distributed.group.chunks import CHUNK, Deferred, Streams, chunks_of
from torchopt_dist.errors import CallTimeoutError, WorkerLostError


def test_chunks_put_together_are_the_tensors():
    tensors = [
        torch.arange(CHUNK // 8 + 5, dtype=torch.float64),
        torch.randn(3, 7),
        torch.zeros(0),
        torch.arange(CHUNK, dtype=torch.int16).reshape(2, -1),
        torch.arange(CHUNK - 8, dtype=torch.uint8),
        torch.arange(3 * CHUNK + 1, dtype=torch.uint8),
    ]
    chunks = chunks_of(tensors)
    sizes = [sum(piece.values.nbytes for piece in chunk) for chunk in chunks]
    assert all(CHUNK - 8 < size <= CHUNK for size in sizes[:-1])
    again = [torch.full_like(tensor, -1) for tensor in tensors]
    for chunk in reversed(chunks):
        for number, start, values in chunk:
            again[number].view(-1)[start : start + len(values)] = values
    assert all(map(torch.equal, again, tensors))


def test_chunks_that_nobody_wants_or_nobody_sends_are_let_go_of():
    streams, chunk = Streams(), chunks_of([torch.ones(3)])[0]
    streams.put((1, 0), 1, chunk)  # before the request, and before the first
    with streams.opened((1, 0), 3, 10) as arriving:
        streams.put((1, 0), 0, chunk)
        assert [next(arriving), next(arriving)] == [chunk, chunk]
    streams.put((1, 0), 2, chunk)
    for key, ended, error in (
        ((1, 1), streams.forget_sender, WorkerLostError),
        ((2, 1), None, CallTimeoutError),
    ):
        with streams.opened(key, 1, 10 if ended else 0.01) as arriving:
            if ended:
                threading.Thread(target=ended, args=(key[0],)).start()
            with pytest.raises(error):
                next(arriving)
        streams.put(key, 0, chunk)
    with streams.opened((2, 0), 1, 10) as arriving:
        streams.forget((2, 0))
        with pytest.raises(WorkerLostError, match="will not come"):
            next(arriving)
    streams.put((2, 0), 0, chunk)
    assert not vars(streams)["_arriving"]


@pytest.mark.parametrize("began", [False, True])
def test_chunks_of_a_request_that_is_given_up_outside_of_it_are_dropped(limits, began):
    """Before it has begun, as where its worker could not read it, or after its end."""
    limits(over=2)
    streams, chunk, key = Streams(), chunks_of([torch.ones(3)])[0], (0, 7)
    if began:
        with streams.opened(key, 3, 10):
            pass
    streams.put(key, 0, chunk)
    streams.forget(key)
    streams.put(key, 1, chunk)
    with pytest.raises(WorkerLostError, match="given up before it began"), streams.opened(key, 3, 0):
        pass
    for number in range(5):
        streams.forget((0, number))
    left = vars(streams)
    assert [*left["_over"]] == [(0, 3), (0, 4)]
    assert not left["_arriving"]


def test_chunks_that_come_after_their_request_was_given_up_twice_are_not_waited_for():
    streams, chunk, key = Streams(), chunks_of([torch.ones(3)])[0], (0, 7)
    with streams.opened(key, 4, 0) as arriving:
        streams.put(key, 0, chunk)
        for index in (1, 2):  # by the caller, and by a chunk that was late
            streams.forget(key)
            streams.put(key, index, chunk)
        with pytest.raises(WorkerLostError, match="will not come"):
            list(arriving)
    streams.put(key, 3, chunk)
    assert not vars(streams)["_arriving"]


def test_gradients_that_come_in_chunks_are_taken_by_number_and_a_failure_ends_the_wait():
    streams, key, leaf = Streams(), (0, 1), torch.zeros(CHUNK // 4 + 7)
    values = torch.randn_like(leaf)
    chunks = chunks_of([leaf, values])
    arriving = streams.expect(key)
    for index in reversed(range(len(chunks))):
        streams.put(key, index, chunks[index])
    assert arriving.take(0) is chunks[0]
    streams.put(key, 0, chunks[0])
    streams.forget(key)
    whole = arriving.put_together([leaf, leaf])
    assert torch.equal(whole[0], leaf)
    assert torch.equal(whole[1], values)

    def fails():
        raise ArithmeticError("in backward")

    with pytest.raises(ArithmeticError):
        Deferred([leaf], arriving, fails).take(len(chunks))
    streams.put(key, len(chunks), chunks[0])  # nobody waits any more
    assert not vars(streams)["_arriving"]


def test_chunks_can_be_put_together_after_they_were_taken_for_a_sum():
    """In a recorded backward, whose whole gradients have a graph."""
    streams, values = Streams(), torch.randn(CHUNK // 4 + 7)
    arriving = streams.expect((0, 1), keeps=True)
    for index, chunk in enumerate(chunks_of([values])):
        streams.put((0, 1), index, chunk)
        assert arriving.take(index) is chunk
    streams.forget((0, 1))
    assert torch.equal(arriving.put_together([values])[0], values)
