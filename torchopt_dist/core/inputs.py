"""Tensors that a graph begins with → their gradient accumulators held, and whether they were changed in place.

The first operation on a leaf creates its gradient accumulator. Torch does so under the leaf's mutex, and may ask for
Python's global lock while it holds the mutex; a ``torch.autograd.Function`` is applied with the global lock held, and
asks for the mutex. So an operation in one thread and a ``Function`` in another one, both on a leaf that has no
accumulator yet, can wait for each other (seen in torch 2.11, 2.13 and 2.15). Where the accumulator exists, neither
thread asks for the other's lock.

An accumulator makes the first gradient that it gets the leaf's ``.grad``, and adds the next one to it in place. So two
leaves must not get gradients that lie in the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchopt_dist.torch_private import tensor_version, without_modes

__all__ = ["Seen", "apart_from", "check_inputs", "hold_grad_accumulators"]


def hold_grad_accumulators(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Views of the leaves among ``tensors``; while these views are kept, the leaves have their accumulators.

    Call it before a :class:`torch.autograd.Function` is applied to leaves, or a thread is started that works on them.
    """
    with torch.enable_grad():  # an operation is done without the global lock, so it can wait for the mutex
        return [tensor.view_as(tensor) for tensor in tensors if _may_lack_accumulator(tensor)]


def _may_lack_accumulator(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf and tensor.layout is torch.strided and not tensor.is_nested


def apart_from(others: Iterable[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients in memory that is not that of others, which may be on their way to another leaf."""
    taken = {other.untyped_storage().data_ptr() for other in others if other.numel()}
    return [
        grad if grad is None or grad.untyped_storage().data_ptr() not in taken else grad.clone()
        for grad in grads
    ]


class Seen:
    """Tensors as they are now; with ``memory``, other memory, as after ``x.data = y``, is a change, too.

    Torch does not count changes of those made under ``torch.inference_mode()``.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), *, memory: bool = False) -> None:
        self.tensors = [*tensors]
        self._memory = memory
        with without_modes():
            self._states = [self._state(tensor) for tensor in self.tensors]

    def changed(self) -> list[int]:
        """The indices of the tensors that have been changed since."""
        pairs = enumerate(zip(self.tensors, self._states, strict=True))
        with without_modes():
            return [index for index, (tensor, state) in pairs if self._state(tensor) != state]

    def _state(self, tensor: Tensor) -> tuple[int | None, int | None]:
        version = None if tensor.is_inference() else tensor_version(tensor)
        return version, tensor.data_ptr() if self._memory and tensor.layout is torch.strided else None


def check_inputs(inputs: Seen) -> None:
    """Raise :class:`RuntimeError`, as torch does, if an input of a graph has been changed in place since."""
    for index in inputs.changed():
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"of the tensors that a remote call differentiates, number {index}, of shape "
            f"{tuple(inputs.tensors[index].shape)}"
        )
