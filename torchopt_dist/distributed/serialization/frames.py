"""``WireMessage`` ⇄ frames of bytes: a pickle with the small buffers in it, then each large buffer.

A large buffer is not copied here: its frame is the tensor's memory at the sender, and a tensor on the frame's memory at
the receiver, which ``from_wire`` copies if that memory does not begin where a tensor's does.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchopt_dist.distributed.serialization.names import find, name_of
from torchopt_dist.distributed.serialization.wire import SMALL, Place, WireMessage

__all__ = ["Frame", "from_frames", "to_frames"]

Frame: TypeAlias = bytes | memoryview

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
