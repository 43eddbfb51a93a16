"""Tensors → their numbers in a message, or an error that says why one cannot be sent."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from torchopt_dist._torch_private import forward_mode_is_active, is_batched_gradient, is_functorch_tensor
from torchopt_dist.distributed._names import name_of
from torchopt_dist.distributed._staying import Handle, Staying, StayingModule
from torchopt_dist.errors import SerializationError

__all__ = ["Tensors", "check_sendable"]


def check_sendable(tensor: torch.Tensor, main_by_name: bool) -> None:
    """Raise :class:`SerializationError` unless the tensor and its part of the graph can be sent."""
    if tensor.is_nested:
        raise SerializationError("a nested tensor cannot be sent: send the list that its `unbind()` returns")
    kind = type(tensor)
    if kind not in (torch.Tensor, nn.Parameter):
        if nn.parameter.is_lazy(tensor):
            raise SerializationError(
                f"an {kind.__qualname__}, as a lazy module has before its first call, cannot be sent: call the module "
                "once before"
            )
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise SerializationError(
                f"a tensor of class {kind.__qualname__} cannot be sent, since its elements are elsewhere, where its "
                "`__torch_dispatch__` looks for them: send the tensors that it is made of"
            )
        kind = type(tensor.detach())  # detached, as it is sent
        if name_of(kind, main_by_name) is None:
            raise SerializationError(
                f"a tensor of class {kind.__qualname__} cannot be sent: the receiver does not find that class by name"
            )
    if is_functorch_tensor(tensor):
        raise SerializationError("a tensor inside a torch.func transform cannot be sent to another process")
    if is_batched_gradient(tensor):
        raise SerializationError(
            "many gradients at a time, which is_grads_batched=True and vectorize=True of torch.autograd make, cannot "
            "be sent to another process: ask for one after another"
        )
    shape = tuple(tensor.shape)
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        sort = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise SerializationError(f"a {sort} tensor of shape {shape} cannot be sent: only dense tensors can")
    if not _can_be_copied(tensor.dtype):
        raise SerializationError(
            f"a tensor of shape {shape} and of {tensor.dtype} cannot be sent, since torch does not copy that dtype: "
            f"send its bytes, `x.view(torch.uint8)`, and let the receiver call `view({tensor.dtype})`"
        )
    if forward_mode_is_active() and forward_ad.unpack_dual(tensor).tangent is not None:
        raise SerializationError(
            f"a tensor of shape {shape} has a forward-mode tangent, which a remote call would lose"
        )


@functools.cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return True
    try:
        torch.empty(1, dtype=dtype, device="cpu").clone()
    except NotImplementedError:
        return False
    return True


class Tensors:
    """Tensors by number, each once; references of RPC; and handles, which live as long as the message.

    Args:
        main_by_name: as of ``pack``.
        connects: whether the values of references of RPC, or what these are to be connected to, are sent, too.
    """

    def __init__(self, main_by_name: bool, *, connects: bool = False) -> None:
        self._main_by_name = main_by_name
        self.connects = connects
        self.all: list[torch.Tensor] = []
        self.buffers: set[int] = set()
        self.references: list[Any] = []
        self.handles: list[Handle] = []
        self.staying: list[Staying] = []
        self._numbers: dict[int, int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        number = self._numbers.setdefault(id(tensor), len(self.all))
        if number == len(self.all):
            check_sendable(tensor, self._main_by_name)
            self.all.append(tensor)
        return number

    def mark_buffers(self, held: list[torch.Tensor]) -> None:
        """Record which of a module's tensors the module may change."""
        self.buffers.update(
            self._numbers[id(t)] for t in held if not (t.requires_grad or isinstance(t, nn.Parameter))
        )

    def mark_staying(self, module: StayingModule) -> None:
        """Record the tensors that the receiver has."""
        key, version, tensors = module.staying()
        places = {self.number(tensor): place for place, tensor in enumerate(tensors)}
        self.staying.append(Staying(key, version, places))

    def mark(self) -> tuple[int, int, int]:
        return len(self.all), len(self.references), len(self.staying)

    def forget_since(self, marks: tuple[int, int, int]) -> None:
        mark, references, staying = marks
        for tensor in self.all[mark:]:
            del self._numbers[id(tensor)]
        del self.all[mark:], self.references[references:], self.staying[staying:]
        self.buffers = {number for number in self.buffers if number < mark}
