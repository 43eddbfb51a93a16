"""Tensors → their numbers in a message, or an error that says why one cannot be sent."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from torchopt_dist.distributed.messages.message import GlobalsOfCode
from torchopt_dist.distributed.messages.references import Handle, StayingModule
from torchopt_dist.distributed.serialization.names import name_of
from torchopt_dist.errors import SerializationError
from torchopt_dist.torch_private import (
    buffers_of,
    forward_mode_is_active,
    is_batched_gradient,
    is_functorch_tensor,
    parameters_of,
)

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
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        sort = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise SerializationError(
            f"a {sort} tensor of shape {tuple(tensor.shape)} cannot be sent: only dense tensors can"
        )
    if not _can_be_copied(tensor.dtype):
        raise SerializationError(
            f"a tensor of shape {tuple(tensor.shape)} and of {tensor.dtype} cannot be sent, since torch does not copy "
            f"that dtype: send its bytes, `x.view(torch.uint8)`, and let the receiver call `view({tensor.dtype})`"
        )
    if forward_mode_is_active() and forward_ad.unpack_dual(tensor).tangent is not None:
        raise SerializationError(
            f"a tensor of shape {tuple(tensor.shape)} has a forward-mode tangent, which a remote call would lose"
        )


def _tensors_in(attributes: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors in attributes, or in containers in them."""
    seen: dict[int, Any] = {}
    waiting: list[Any] = [attributes]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple, set, frozenset)) and id(value) not in seen:
            seen[id(value)] = value
            waiting.extend(value.values() if isinstance(value, dict) else value)


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

    ``main_by_name``: the receiver runs the same program, so functions of ``__main__`` go by name, not as code;
    ``connects``: the values of references of RPC, or what these are to be connected to, are sent, too; ``here``: the
    message stays in this process, so that a mirror is the module itself.
    """

    def __init__(self, main_by_name: bool, *, connects: bool = False, here: bool = False) -> None:
        self.main_by_name = main_by_name
        self.connects = connects
        self.here = here
        self.all: list[torch.Tensor] = []
        self.buffers: set[int] = set()
        self.references: list[Any] = []
        self.handles: list[Handle | StayingModule] = []
        self.staying: dict[int, tuple[Any, ...]] = {}  # by the id of a tensor, what finds it at the receiver
        self.of_globals: GlobalsOfCode | None = None
        self.module: nn.Module | None = None
        """The module whose tensors these are; what it holds beside its parameters and buffers is sent as a value."""
        self._kept: set[int] | None = None  # the ids of what its attributes hold
        self._cut: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._numbers: dict[int, int] = {}

    def empty(self) -> Tensors:
        """Another one for the same receiver, which has the same."""
        other = Tensors(self.main_by_name, connects=self.connects, here=self.here)
        other.staying = dict(self.staying)
        other.module = self.module
        return other

    def as_sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or its value alone, if an attribute of a module holds it and it has a graph.

        Such a tensor is left from the module's last call, as the weight of the old ``weight_norm`` and kept features
        are: its graph may be used up, and the module's next call does not go through it.
        """
        if self.module is None or tensor.grad_fn is None:
            return tensor
        if self._kept is None:
            parts = [*self.module.modules()]
            registered = {
                id(one) for of in (parameters_of, buffers_of) for part in parts for one in of(part).values()
            }
            self._kept = {id(one) for part in parts for one in _tensors_in(vars(part))} - registered
        if id(tensor) not in self._kept:
            return tensor
        return self._cut.setdefault(id(tensor), (tensor, tensor.detach()))[1]

    def number(self, tensor: torch.Tensor) -> int:
        number = self._numbers.setdefault(id(tensor), len(self.all))
        is_new = number == len(self.all)
        if is_new:
            check_sendable(tensor, self.main_by_name)
            self.all.append(tensor)
        if self.of_globals is not None:
            self.of_globals.met(number, is_new=is_new)
        return number

    def include(self, module: Tensors) -> tuple[int, ...]:
        """Take in a module's tensors, some of which its code may have brought, and its handles; returns the numbers."""
        if module.of_globals is None:
            numbers = tuple(self.number(tensor) for tensor in module.all)
        else:
            numbers = tuple(self._numbers_of(module.all, module.of_globals))
        self.mark_buffers(module.all)
        self.handles += module.handles
        return numbers

    def _numbers_of(self, tensors: list[torch.Tensor], of_globals: GlobalsOfCode) -> Iterator[int]:
        mine = self.globals_of_code()
        mine.variables.update(of_globals.variables)
        inside = mine.inside
        for place, tensor in enumerate(tensors):
            mine.inside = inside or place in of_globals.numbers
            yield self.number(tensor)
        mine.inside = inside

    def globals_of_code(self) -> GlobalsOfCode:
        """What is met in the global variables of functions that are sent as code."""
        if self.of_globals is None:
            self.of_globals = GlobalsOfCode()
        return self.of_globals

    def keep_apart(self) -> tuple[int, ...]:
        """Cut the tensors that only such variables hold off from their graph; returns the numbers of these."""
        if self.of_globals is None:
            return ()
        apart = [number for number in sorted(self.of_globals.numbers) if self.all[number].requires_grad]
        for number in apart:
            cut = self.all[number].detach()
            is_parameter = isinstance(self.all[number], nn.Parameter)
            self.all[number] = nn.Parameter(cut, requires_grad=False) if is_parameter else cut
        return tuple(apart)

    def mark_buffers(self, held: list[torch.Tensor]) -> None:
        """Record which of a module's tensors the module may change."""
        self.buffers.update(
            self._numbers[id(t)] for t in held if not (t.requires_grad or isinstance(t, nn.Parameter))
        )

    def mark_staying(self, module: StayingModule) -> None:
        """Record the tensors that the receiver has."""
        self.handles.append(module)
        hook, key, version, tensors = module.staying()
        if self.here:
            return
        if self.of_globals is not None:  # a mirror is the same on all workers, however it is sent
            self.of_globals.numbers.discard(self.number(hook))
        for place, x in enumerate(tensors):
            kind = isinstance(x, nn.Parameter), x.requires_grad
            self.staying[id(x)] = hook, key, version, place, *kind
