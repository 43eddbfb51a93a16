"""A request or a reply of tensors and constants → its skeleton, and back, by the plain pickle of a plain tuple.

A pickler that takes tensors out asks Python code for each object that it meets, and a function is looked up by its
name. Most small calls need nothing of that: a function with a name, and tensors, numbers and texts as arguments. What
the calls of a loop have in common, the function's name, the caller's state and the options, is one ``bytes`` object,
which both sides remember with what it stands for.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch

from torchopt_dist.distributed._caller_state import CallerState
from torchopt_dist.distributed._names import find, name_of
from torchopt_dist.distributed._payload import ExecutionOptions, Payload
from torchopt_dist.distributed._protocol import Backward, Call, Reply
from torchopt_dist.distributed._sendable_tensors import Tensors

__all__ = ["is_plain_skeleton", "plain_skeleton", "rebuilt"]

MARK = b"\0"
"""Begins such a skeleton; other pickles begin with 0x80."""
LONGEST = 1 << 12
"""Of a text or ``bytes``; longer ones are left to the pickler, which does not copy those that are very long."""

_CONSTANTS = frozenset({type(None), bool, int, float, complex})
_TEXTS = frozenset({str, bytes})
_CALL, _BACKWARD, _REPLY = range(3)


class _NotPlainError(Exception):
    """A part is left to the pickler."""


def plain_skeleton(content: object, tensors: Tensors, main_by_name: bool) -> bytes | None:
    """The skeleton of a request or a reply; ``None`` if a part of it is not plain.

    Args:
        content: what is to be sent.
        tensors: get its tensors; some may be there also where the result is ``None``.
        main_by_name: as of :func:`~torchopt_dist.distributed._serialization.pack`.

    Raises:
        SerializationError: a tensor cannot be sent.
    """
    kind = type(content)
    if kind not in (Call, Backward, Reply):
        return None
    fields: tuple[Any, ...]
    try:
        if isinstance(content, Call):
            fields = _call_fields(content, tensors, main_by_name)
        elif isinstance(content, Backward):
            graph, grads, *rest = vars(content).values()
            fields = _BACKWARD, graph, [_plain(grad, tensors) for grad in grads], *rest
        elif isinstance(content, Reply) and content.exception is None:
            values, *rest = vars(content).values()
            fields = _REPLY, [_plain(value, tensors) for value in values], *rest
        else:
            return None
    except _NotPlainError:
        return None
    return MARK + pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)


def is_plain_skeleton(skeleton: bytes) -> bool:
    """Whether it is one that :func:`plain_skeleton` has made."""
    return skeleton[:1] == MARK


def rebuilt(skeleton: bytes, tensors: Sequence[torch.Tensor]) -> Call | Backward | Reply:
    """The inverse of :func:`plain_skeleton`, with these tensors."""
    kind, *fields = pickle.loads(memoryview(skeleton)[1:])
    if kind == _REPLY:
        values, *rest = fields
        return Reply([_whole(value, tensors) for value in values], *rest)
    if kind == _BACKWARD:
        graph, grads, *rest = fields
        return Backward(graph, tuple([_whole(grad, tensors) for grad in grads]), *rest)
    common, plain, seeds, more, *rest = fields
    name, state, options = _common_fields(common)
    tasks = tuple(
        [
            (
                tuple([_whole(value, tensors) for value in args]),
                {each: _whole(value, tensors) for each, value in kwargs.items()} if kwargs else {},
            )
            for args, kwargs in plain
        ]
    )
    return Call(Payload(find(*name), tasks, seeds, state, options, *more), *rest)


def _call_fields(call: Call, tensors: Tensors, main_by_name: bool) -> tuple[Any, ...]:
    payload, *rest = vars(call).values()
    function, tasks, seeds, state, options, *more = vars(payload).values()
    name = name_of(function, main_by_name) if type(function) is FunctionType else None
    if name is None or call.late is not None:
        raise _NotPlainError
    plain = [
        (
            [_plain(value, tensors) for value in args],
            {each: _plain(value, tensors) for each, value in kwargs.items()} if kwargs else None,
        )
        for args, kwargs in tasks
    ]
    return _CALL, _common(name, state, options), plain, seeds, more, *rest


def _plain(value: Any, tensors: Tensors) -> Any:
    """The value, with a list of its number in the place of a tensor: other lists are never plain."""
    kind = type(value)
    if kind in _CONSTANTS or (kind in _TEXTS and len(value) <= LONGEST):
        return value
    if isinstance(value, torch.Tensor):
        return [tensors.number(value)]
    if kind is tuple:
        return tuple([_plain(part, tensors) for part in value])
    raise _NotPlainError


def _whole(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind = type(value)
    if kind is list:
        return tensors[value[0]]
    if kind is tuple:
        return tuple([_whole(part, tensors) for part in value])
    return value


@functools.lru_cache(maxsize=256)
def _common(name: tuple[str, str, int], state: CallerState, options: ExecutionOptions) -> bytes:
    """What the calls of a loop have in common."""
    return pickle.dumps((name, state.plain(), tuple(vars(options).values())), pickle.HIGHEST_PROTOCOL)


@functools.lru_cache(maxsize=256)
def _common_fields(common: bytes) -> tuple[tuple[str, str, int], CallerState, ExecutionOptions]:
    name, state, options = pickle.loads(common)
    return name, CallerState.of_plain(*state), ExecutionOptions(*options)
