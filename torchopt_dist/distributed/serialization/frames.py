"""``WireMessage`` ⇄ frames of bytes: a pickle with the small buffers in it, then each large buffer.

A large buffer is not copied here: its frame is the tensor's memory at the sender, and a tensor on the frame's memory at
the receiver, which ``from_wire`` copies if that memory does not begin where a tensor's does.

Frames are sent in pieces, so that a piece is encrypted, another one is under way, and a third one is decrypted at the
same time, each in memory that the allocator has at hand. A piece that is shorter than the others ends a frame.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torchopt_dist.distributed.serialization.names import find, name_of
from torchopt_dist.distributed.serialization.wire import ALIGNMENT, SMALL, Place, WireMessage

__all__ = ["Frame", "from_frames", "in_pieces", "joined", "new_memory", "to_frames"]

Frame: TypeAlias = bytes | memoryview

PIECE = 1 << 20

_Buffer: TypeAlias = tuple[
    torch.dtype, tuple[int, ...], tuple[int, ...], tuple[str, str, int] | None, bytearray | None
]
"""A tensor's dtype, shape and strides, its class's name unless it is ``Tensor``, its bytes unless they are a frame."""


def to_frames(wire: WireMessage) -> list[Frame]:
    """The frames of a message; those of large buffers are the tensors' own memory."""
    buffers: list[_Buffer] = []
    large: list[Frame] = []
    for tensor in wire.buffers:
        kind = None if type(tensor) is Tensor else name_of(type(tensor), main_by_name=True)
        packed, strides = _packed(tensor.as_subclass(Tensor))
        memory = packed.reshape(-1).view(torch.uint8).numpy().data
        inside = memory.nbytes <= SMALL
        buffers.append(
            (tensor.dtype, tuple(tensor.shape), strides, kind, bytearray(memory) if inside else None)
        )
        if not inside:
            large.append(memory)
    head = wire.content, buffers, [tuple(place) for place in wire.places], wire.shared
    return [pickle.dumps(head, pickle.HIGHEST_PROTOCOL), *large]


def _packed(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The elements in the order in which they lie in memory, copied only if that has gaps; and the tensor's strides."""
    if tensor.is_contiguous():
        return tensor, tensor.stride()
    packed = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if packed.is_contiguous():
        return packed, tensor.stride()
    packed = tensor.contiguous()
    return packed, packed.stride()


def from_frames(head: Frame, frames: Sequence[Frame]) -> WireMessage:
    """Rebuild a message; its large buffers are tensors on the frames' memory."""
    content, buffers, places, shared = pickle.loads(head)
    rest = iter(frames)
    tensors = [_tensor(buffer, rest) for buffer in buffers]
    return WireMessage(content, tensors, [Place(*place) for place in places], shared)


def _tensor(buffer: _Buffer, frames: Any) -> Tensor:
    dtype, shape, strides, kind, inside = buffer
    memory = next(frames) if inside is None else inside
    if not len(memory):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    tensor = flat.view(dtype).as_strided(shape, strides)
    return tensor if kind is None else tensor.as_subclass(find(*kind))


def in_pieces(frames: Iterable[Frame]) -> Iterator[Frame]:
    """The pieces of frames, which stay where they are."""
    for frame in frames:
        memory = memoryview(frame)
        for start in range(0, len(memory) + 1, PIECE):  # the last one may be empty
            yield memory[start : start + PIECE]


def joined(pieces: Iterable[Frame]) -> list[Frame]:
    """The inverse of :func:`in_pieces`; a frame of several pieces is copied."""
    frames: list[Frame] = []
    begun: list[Frame] = []
    for piece in pieces:
        begun.append(piece)
        if len(piece) < PIECE:
            frames.append(_in_one(begun) if len(begun) > 1 else piece)
            begun.clear()
    return frames


def _in_one(pieces: Sequence[Frame]) -> Frame:
    memory = new_memory(sum(map(len, pieces)))
    for number, piece in enumerate(pieces):
        start = number * PIECE
        memory[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
    return memory.data


def new_memory(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that begin where a tensor's do, in huge pages if the system has any: the first touch costs most."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:size]
