"""Tensors → which of them have been changed in place since they were seen, and a graph's error about its inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torchopt_dist.torch_private import tensor_version, without_modes

__all__ = ["Seen", "check_inputs"]


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
