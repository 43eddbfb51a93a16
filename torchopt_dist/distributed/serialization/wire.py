"""``Message`` ⇄ what a transport sends: few buffers instead of many tensors.

Each tensor costs a transport some microseconds however small it is, so small ones share a buffer. A tensor that is part
of a larger storage is copied out of it, or the whole storage would travel. A tensor on a GPU travels by way of the CPU,
unless the transport can send it directly, and arrives on the receiver's own GPU, if it has one.

A received tensor lies at a multiple of 64 bytes, as those do that torch makes. Other places are slower, and with some
processors the last bits of a product depend on them.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

from torchopt_dist.distributed.messages.message import Message

__all__ = [
    "Place",
    "WireMessage",
    "from_wire",
    "is_skeleton",
    "to_wire",
]

SMALL = 1 << 16
"""Bytes up to which a tensor shares a buffer."""

LONG = 1 << 18
"""Bytes from which on a skeleton is a buffer, which no transport copies."""
ALIGNMENT = 64
"""Torch's allocator gives memory at multiples of so many bytes."""


class Place(NamedTuple):
    """The place of a tensor: the number of its buffer, its shape, and whether it was on a GPU."""

    buffer: int
    shape: tuple[int, ...]
    on_gpu: bool


_CONTENT = (
    *("skeleton", "requires_grad", "is_parameter", "structures", "connected"),
    *("device", "references", "key", "late", "told", "cut"),
)
"""What the receiver gets of a message as it is, besides the tensors."""
_content_of = operator.attrgetter(*_CONTENT)


class WireMessage(NamedTuple):
    """A message as a transport sends it.

    Attributes:
        content: what it has besides its tensors, as listed above.
        buffers: tensors of their own, flat tensors in which small ones lie one after another, and a long skeleton.
        places: for each tensor that is sent its buffer, its shape, and whether it was on a GPU.
        shared: which buffers are flat ones.
    """

    content: tuple[Any, ...]
    buffers: list[torch.Tensor]
    places: list[Place]
    shared: list[bool]


def is_skeleton(message: Message) -> bool:
    """Whether the message consists of a skeleton, which a transport can send as it is."""
    beside = message.tensors or message.structures or message.device or message.references
    return not (beside or message.key or message.told) and len(message.skeleton) < LONG


def to_wire(message: Message, *, direct: bool = False, whole_storages: bool = True) -> WireMessage:
    """Make a message ready for a transport.

    ``direct``: it can send tensors on a GPU; ``whole_storages``: of a part of a storage it would send the whole.
    """
    buffers: list[torch.Tensor] = []
    places: list[Place] = []
    shared: list[bool] = []
    open_buffers: dict[tuple[type, torch.dtype], tuple[int, list[torch.Tensor]]] = {}
    for tensor in message.tensors:
        flat = tensor.detach().resolve_conj().resolve_neg()
        if not direct and not flat.is_cpu:
            flat = _on_cpu(flat)
        size = flat.numel() * flat.element_size()
        if size > SMALL or flat.is_cuda:
            places.append(Place(len(buffers), tuple(flat.shape), tensor.is_cuda))
            partial = whole_storages and flat.untyped_storage().nbytes() > size
            buffers.append(_in_a_storage_of_its_own(flat) if partial else flat)
            shared.append(False)
            continue
        kind = type(flat), flat.dtype  # tensors of one buffer come back as one class
        if kind not in open_buffers:
            open_buffers[kind] = (len(buffers), [])
            buffers.append(flat)  # a placeholder until all tensors of this buffer are known
            shared.append(True)
        number, parts = open_buffers[kind]
        parts.append(flat.reshape(-1))
        places.append(Place(number, tuple(flat.shape), tensor.is_cuda))
    for number, parts in open_buffers.values():
        buffers[number] = torch.cat(parts)
    content = _content_of(message)
    if len(message.skeleton) >= LONG:
        content = b"", *content[1:]
        buffers.append(torch.frombuffer(bytearray(message.skeleton), dtype=torch.uint8))
        shared.append(False)
    return WireMessage(content, buffers, places, shared)


def _in_a_storage_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """A part of a storage as a whole one: on the same memory, or copied where it does not lie there in one piece."""
    if type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous():
        try:
            return torch.from_dlpack(tensor)
        except (BufferError, RuntimeError):  # of a dtype that has no name there
            pass
    return tensor.clone()


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its copy in pinned memory, to which a GPU copies twice as fast."""
    if not tensor.is_cuda:
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its copy where torch's allocator would have put it; one on a GPU lies right."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def from_wire(wire: WireMessage) -> Message:
    """Rebuild a message."""
    sizes: dict[int, list[int]] = {}
    for place in wire.places:
        sizes.setdefault(place.buffer, []).append(torch.Size(place.shape).numel())
    parts = {
        number: iter(buffer.split(sizes[number]))
        for number, (buffer, shared) in enumerate(zip(wire.buffers, wire.shared, strict=True))
        if shared
    }
    received: list[torch.Tensor] = []
    for place in wire.places:
        if place.buffer in parts:
            # A copy, so that whoever keeps one tensor of a buffer, or saves it, does not keep the others with it.
            tensor = next(parts[place.buffer]).view(place.shape).clone()
        else:
            tensor = _aligned(wire.buffers[place.buffer])
        staged = place.on_gpu and not tensor.is_cuda and torch.cuda.is_available()
        received.append(tensor.cuda() if staged else tensor)
    skeleton, *content = wire.content
    skeleton = skeleton or wire.buffers[-1].numpy().tobytes()
    return Message(tensors=received, **dict(zip(_CONTENT, (skeleton, *content), strict=True)))
