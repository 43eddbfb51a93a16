"""A request or a reply that stays in this process → a message that is rebuilt without a pickle, if its parts are plain.

The result is the same as with a pickle: containers and modules are copied, shared objects stay shared, and tensors are
kept outside. Tensors, numbers, texts, named functions, and tuples, lists, dicts, sets and modules of these are plain;
everything else is left to the pickle.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn

from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._names import name_of
from torchopt_dist.distributed._parametrized_modules import is_parametrized
from torchopt_dist.distributed._protocol import Backward, Call, Reply
from torchopt_dist.distributed._sendable_tensors import Tensors
from torchopt_dist.distributed._serialization import message_of
from torchopt_dist.distributed._staying import StayingModule
from torchopt_dist.typing import Args, KwArgs

__all__ = ["packed_directly"]

_Made: TypeAlias = dict[int, Any]
_Plan: TypeAlias = Callable[[Sequence[torch.Tensor], _Made], Any]
"""Makes a part of the object anew, of these tensors and of what has been made, by the ids of the originals."""

_KEPT = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


def packed_directly(content: Call | Backward | Reply, *, main_by_name: bool) -> Message | None:
    """The message of a request or a reply; ``None`` if a part of it is left to the pickle.

    Args:
        content: the request or the reply.
        main_by_name: as of :func:`pack`.

    Raises:
        SerializationError: a tensor cannot be sent.
    """
    tensors = Tensors(main_by_name)
    planner = _Planner(tensors, main_by_name)
    make: Callable[..., Any]
    held: tuple[Any, ...]
    if isinstance(content, Call):
        held = content.payload.function, content.payload.tasks
        make = functools.partial(_call, content)
    elif isinstance(content, Backward):
        held, make = (content.output_grads,), functools.partial(_backward, content)
    elif content.exception is None:
        held, make = (content.values,), functools.partial(_reply, content)
    else:
        return None
    try:
        plan = planner.of(held)
    except _NotPlainError:
        return None
    tensors.mark_buffers(planner.held)

    def rebuild(received: Sequence[torch.Tensor]) -> Any:
        return make(*(held if plan is None else plan(received, {})))

    message = message_of(b"", tensors)
    message.rebuild = rebuild
    return message


def _call(like: Call, function: Callable[..., Any], tasks: tuple[tuple[Args, KwArgs], ...]) -> Call:
    return replace(like, payload=replace(like.payload, function=function, tasks=tasks))


def _backward(like: Backward, output_grads: tuple[torch.Tensor | None, ...]) -> Backward:
    return replace(like, output_grads=output_grads)


def _reply(like: Reply, values: list[Any]) -> Reply:
    return replace(like, values=values)


class _NotPlainError(Exception):
    """A part is left to the pickle."""


class _Planner:
    """Objects → functions that make copies of them.

    Attributes:
        held: the tensors that modules hold.
    """

    def __init__(self, tensors: Tensors, main_by_name: bool) -> None:
        self.held: list[torch.Tensor] = []
        self._tensors = tensors
        self._main_by_name = main_by_name
        self._known: set[int] = set()
        self._states: list[dict[str, Any]] = []  # kept, so that no id in them is used again
        self._modules = 0

    def of(self, obj: Any) -> _Plan | None:
        """A function that makes a copy of an object; ``None`` if the object need not be copied.

        Raises:
            _NotPlainError: a part of it is left to the pickle.
        """
        kind = type(obj)
        if kind in _KEPT:
            return None
        if kind is torch.Tensor or kind is nn.Parameter:
            return self._tensor(obj)
        if kind is tuple:
            return _tuple(obj, [self.of(part) for part in obj])
        if isinstance(obj, StayingModule):
            self._tensors.mark_staying(obj)
            return self.of(obj.module)
        number = id(obj)
        if number in self._known:
            return lambda tensors, made: made[number]
        if kind is FunctionType or isinstance(obj, type):
            if name_of(obj, self._main_by_name) is None:
                raise _NotPlainError
            return None
        self._known.add(number)
        if kind is list:
            return _list(number, obj, [self.of(part) for part in obj])
        if kind is dict or kind is OrderedDict:
            if not obj and not getattr(obj, "__dict__", None):
                return _nothing(number, kind)
            if getattr(obj, "__dict__", None) or any(self.of(key) is not None for key in obj):
                raise _NotPlainError
            return _dict(number, kind, obj, [self.of(part) for part in obj.values()])
        if kind is set and all(self.of(part) is None for part in obj):
            copied = obj.copy()
            return lambda tensors, made: made.setdefault(number, copied.copy())
        if isinstance(obj, nn.Module):
            return self._module(number, obj)
        raise _NotPlainError

    def _tensor(self, tensor: torch.Tensor) -> _Plan:
        number = self._tensors.number(tensor)
        if self._modules:
            self.held.append(tensor)
        return lambda tensors, made: tensors[number]

    def _module(self, number: int, module: nn.Module) -> _Plan:
        kind = type(module)
        if not _is_pickled_by_its_state(kind) or is_parametrized(module):
            raise _NotPlainError
        state: Any = module.__getstate__()
        if type(state) is not dict:
            raise _NotPlainError
        self._states.append(state)
        self._modules += 1
        parts = [None if type(part) in _KEPT else self.of(part) for part in state.values()]
        self._modules -= 1
        fill = _dict(~number, dict, state, parts)

        def make(tensors: Sequence[torch.Tensor], made: _Made) -> nn.Module:
            new = made[number] = kind.__new__(kind)
            fill_in: Any = new.__setstate__
            fill_in(fill(tensors, made))
            return new

        return make


def _tuple(obj: tuple[Any, ...], plans: list[_Plan | None]) -> _Plan | None:
    if not any(plans):
        return None
    pairs = list(zip(obj, plans, strict=True))
    return lambda tensors, made: tuple(
        [part if plan is None else plan(tensors, made) for part, plan in pairs]
    )


def _list(number: int, obj: list[Any], plans: list[_Plan | None]) -> _Plan:
    pairs = list(zip(obj, plans, strict=True))

    def make(tensors: Sequence[torch.Tensor], made: _Made) -> list[Any]:
        new: list[Any] = []
        made[number] = new
        new.extend([part if plan is None else plan(tensors, made) for part, plan in pairs])
        return new

    return make


def _nothing(number: int, kind: type[dict[Any, Any]]) -> _Plan:
    return lambda tensors, made: made.setdefault(number, kind())


def _dict(number: int, kind: type[dict[Any, Any]], obj: dict[Any, Any], plans: list[_Plan | None]) -> _Plan:
    copied = list(obj.items())
    changed = [(key, plan) for key, plan in zip(obj, plans, strict=True) if plan is not None]

    def make(tensors: Sequence[torch.Tensor], made: _Made) -> dict[Any, Any]:
        new = made[number] = kind(copied)
        for key, plan in changed:
            new[key] = plan(tensors, made)
        return new

    return make


def _is_pickled_by_its_state(kind: type[nn.Module]) -> bool:
    """Whether a pickle makes a module of this class by ``__new__`` alone, and fills it by ``__setstate__``."""
    reduces = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
    return reduces and not hasattr(kind, "__getnewargs__") and not hasattr(kind, "__getnewargs_ex__")
