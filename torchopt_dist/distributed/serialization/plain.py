"""A request or a reply of tensors and constants → its skeleton, and back, by the plain pickle of a plain tuple.

A pickler that takes tensors out asks Python code for each object that it meets, and a function is looked up by its
name. Most small calls need nothing of that: a function with a name, and tensors, numbers and texts as arguments. What
the calls of a loop have in common, the function's name, the caller's state and the options, is one ``bytes`` object,
which both sides remember with what it stands for.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any

import torch

from torchopt_dist.core.types import Args, KwArgs
from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.payload import ExecutionOptions, Payload
from torchopt_dist.distributed.messages.requests import Backward, Call, Reply
from torchopt_dist.distributed.serialization.names import find, name_of
from torchopt_dist.distributed.serialization.tensors import Tensors

__all__ = ["MARK", "plain_skeleton", "rebuilt"]

MARK = b"\0"
"""Begins a skeleton that :func:`plain_skeleton` has made; other pickles begin with 0x80."""
LONGEST = 1 << 12
"""Of a text or ``bytes``; longer ones are left to the pickler, which does not copy those that are very long."""

_CONSTANTS = frozenset({type(None), bool, int, float, complex})
_TEXTS = frozenset({str, bytes})
_CALL, _BACKWARD, _REPLY = range(3)


class _NotPlainError(Exception):
    """A part is left to the pickler."""


def plain_skeleton(content: object, tensors: Tensors) -> bytes | None:
    """The skeleton of a request or a reply; ``None`` if a part is not plain, where ``tensors`` may have got some.

    Raises ``SerializationError`` if a tensor cannot be sent.
    """
    kind = type(content)
    if kind not in (Call, Backward, Reply):
        return None
    fields: tuple[Any, ...]
    try:
        if isinstance(content, Call):
            fields = _call_fields(content, tensors)
        elif isinstance(content, Backward):
            fields = _BACKWARD, _plain(content.output_grads, tensors), *content.plain()
        elif isinstance(content, Reply) and content.exception is None:
            values, *rest = vars(content).values()
            fields = _REPLY, _plain(values, tensors), *rest
        else:
            return None
    except _NotPlainError:
        return None
    return MARK + pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)


def rebuilt(skeleton: bytes, tensors: Sequence[torch.Tensor]) -> Call | Backward | Reply:
    """The inverse of :func:`plain_skeleton`, with these tensors."""
    kind, *fields = pickle.loads(memoryview(skeleton)[1:])
    if kind == _REPLY:
        values, *rest = fields
        return Reply(_whole(values, tensors), *rest)
    if kind == _BACKWARD:
        grads, *rest = fields
        return Backward.of_plain(tuple(_whole(grads, tensors)), *rest)
    common, plain, seeds, more, *rest = fields
    name, state, options = _common_fields(common)
    tasks: list[tuple[Args, KwArgs]] = []
    for args, names, values in plain:
        kwargs = dict(zip(names, _whole(values, tensors), strict=True)) if names else {}
        tasks.append((tuple(_whole(args, tensors)), kwargs))
    return Call(Payload(find(*name), tuple(tasks), seeds, state, options, *more), *rest)


def _call_fields(call: Call, tensors: Tensors) -> tuple[Any, ...]:
    payload, *rest = vars(call).values()
    function, tasks, seeds, state, options, *more = vars(payload).values()
    name = name_of(function, tensors.main_by_name) if type(function) is FunctionType else None
    if name is None:
        raise _NotPlainError
    plain: list[tuple[Any, ...]] = []
    for args, kwargs in tasks:
        given = _plain(kwargs.values(), tensors) if kwargs else None
        plain.append((_plain(args, tensors), (*kwargs,), given))
    return _CALL, _common(name, state, options), plain, seeds, more, *rest


def _plain(values: Iterable[Any], tensors: Tensors) -> list[Any]:
    """The values, with a list of its number in the place of a tensor: other lists are never plain."""
    plain: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _CONSTANTS or (kind in _TEXTS and len(value) <= LONGEST):
            plain.append(value)
        elif isinstance(value, torch.Tensor):
            plain.append([tensors.number(value)])
        elif kind is tuple:
            plain.append(tuple(_plain(value, tensors)))
        else:
            raise _NotPlainError
    return plain


def _whole(values: Iterable[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    whole: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is list:
            whole.append(tensors[value[0]])
        else:
            whole.append(tuple(_whole(value, tensors)) if kind is tuple else value)
    return whole


@functools.lru_cache(maxsize=256)
def _common(name: tuple[str, str, int], state: CallerState, options: ExecutionOptions) -> bytes:
    """What the calls of a loop have in common."""
    return pickle.dumps((name, state.plain(), tuple(vars(options).values())), pickle.HIGHEST_PROTOCOL)


@functools.lru_cache(maxsize=256)
def _common_fields(common: bytes) -> tuple[tuple[str, str, int], CallerState, ExecutionOptions]:
    name, state, options = pickle.loads(common)
    return name, CallerState.of_plain(*state), ExecutionOptions(*options)
