"""Frames of bytes → pieces of them, and back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rows import each_row
from torchopt_dist.distributed.serialization import frames
from torchopt_dist.distributed.serialization.wire import ALIGNMENT

PIECE = 16
SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 5 * PIECE + 3]


@pytest.fixture(autouse=True)
def _in_small_pieces(monkeypatch):
    monkeypatch.setattr(frames, "PIECE", PIECE)


@each_row("size", SIZES)
def test_a_frame_is_joined_where_a_tensor_would_begin(size):
    frame = memoryview(bytearray(range(size)))
    pieces = [*frames.in_pieces([frame])]
    assert max(map(len, pieces)) <= PIECE
    (got,) = frames.joined(pieces)
    assert got == frame
    if len(pieces) > 1:
        memory = np.frombuffer(got, np.uint8)
        assert memory.ctypes.data % ALIGNMENT == 0
        assert memory.flags.writeable


@each_row("kind", [bytes, lambda frame: memoryview(bytearray(frame))], ids=["bytes", "memory"])
def test_frames_of_all_sizes_follow_one_another(kind):
    sent = [kind(bytes([number] * size)) for number, size in enumerate([*SIZES, *reversed(SIZES)])]
    assert [*map(bytes, frames.joined(frames.in_pieces(sent)))] == [*map(bytes, sent)]


def test_pieces_are_the_frame_s_own_memory():
    frame = bytearray(3 * PIECE)
    pieces = [*frames.in_pieces([memoryview(frame)])]
    frame[:] = b"x" * len(frame)
    assert [bytes(piece) for piece in pieces] == [b"x" * PIECE] * 3 + [b""]
