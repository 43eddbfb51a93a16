"""Tensors that nobody needs any more → memory for others of their kind, which the system need not give again.

To give memory takes the system longer than to copy a tensor into memory that is there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist._torch_private import memory_is_shared
from torchopt_dist.diff.adjoints._loop import Carry, Evaluation, Loop
from torchopt_dist.ops._columns import put
from torchopt_dist.transform._pulled_step import Room
from torchopt_dist.transform.apply_updates import training_step_into
from torchopt_dist.typing import OptionalTensor

__all__ = ["Pool", "add_to", "apart_from", "own", "room_like"]

Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


class Pool:
    """Memory of one backward pass that waits to be used again.

    Args:
        loop: whose backward pass it is.
    """

    room: int = 1
    """For how many snapshots there is to be memory, at most."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        moved = [loop.first.params[place] for place in loop.model.moved_places]
        self._each = Counter((x.shape, x.dtype) for x in _leaves(loop.first._replace(params=moved)))
        self._free: dict[Kind, list[Tensor]] = {}

    def memory_for(self, tensor: Tensor) -> Tensor:
        """A tensor of the same kind, whatever is in it."""
        free = self._free.get(_kind(tensor))
        return free.pop() if free else torch.empty_like(tensor.detach())

    def copied(self, tensor: Tensor) -> Tensor:
        """The same numbers, without history, in memory of their own."""
        return self.memory_for(tensor).copy_(tensor.detach())

    def step(self, carry: Carry, found: Evaluation) -> Carry:
        """Make a step without a graph; what it starts from stays as it is.

        Args:
            carry: what the step starts from.
            found: its gradient.
        """
        loop = self._loop
        new = loop.own(carry, self.memory_for)
        with loop.substituted():
            if training_step_into(
                loop.optimizer, carry.params, found.grads, carry.state, new.params, new.state
            ):
                return Carry(new.params, new.state, found.buffers)
        with torch.no_grad():
            for old, copy in zip(_leaves(carry), _leaves(new), strict=True):
                if copy is not old:
                    copy.copy_(old)
        return loop.trained(new, found)

    def take_back(self, tensors: list[Tensor]) -> None:
        """Take the memory of those that nobody else holds: neither the object nor its memory.

        Args:
            tensors: are taken out of the list.
        """
        once = {id(tensor): tensor for tensor in tensors}
        tensors.clear()
        while once:
            _, tensor = once.popitem()
            if _is_plain(tensor) and sys.getrefcount(tensor) == _REFERENCES and not memory_is_shared(tensor):
                free = self._free.setdefault(_kind(tensor), [])
                if len(free) < self.room * self._each[tensor.shape, tensor.dtype]:
                    free.append(tensor)


def _leaves(carry: Carry) -> list[Tensor]:
    return [leaf for leaf in [*carry.params, *pytree.flatten(carry.state)[0]] if isinstance(leaf, Tensor)]


_REFERENCES = 2
"""To an object that one variable of a function holds: the question itself is one more."""


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.requires_grad


def _kind(tensor: Tensor) -> Kind:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def room_like(params: Sequence[Tensor], places: Sequence[int]) -> Room:
    """Memory for what the derivative of an update gives and needs, for the parameters at these places."""
    columns = [
        put([None] * len(params), places, [torch.empty_like(params[p]) for p in places]) for _ in range(2)
    ]
    return Room(*columns)


def own(tensor: OptionalTensor) -> OptionalTensor:
    """The same numbers in memory of their own."""
    return None if tensor is None else tensor.detach().clone(memory_format=torch.preserve_format)


def add_to(one: OptionalTensor, other: OptionalTensor) -> OptionalTensor:
    """The sum of tensors that may be missing, over the memory of the first, or in its own."""
    if one is None:
        return own(other)
    return one if other is None else one.add_(other)


def apart_from(room: Sequence[OptionalTensor], tensor: OptionalTensor) -> OptionalTensor:
    """The same numbers, in memory that is not that of others."""
    if tensor is None or tensor.layout != torch.strided:
        return tensor
    taken = {other.untyped_storage().data_ptr() for other in room if other is not None}
    return own(tensor) if tensor.untyped_storage().data_ptr() in taken else tensor
