"""An object → the tensors that ``copy.deepcopy`` meets in it, in containers and attributes however deep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from torchopt_dist.core.vmap import has_history

__all__ = ["deepcopy_memo", "held_tensors"]

_WHOLE = (str, bytes, int, float, complex, type, ModuleType, FunctionType, BuiltinFunctionType)
"""What ``deepcopy`` takes as it is."""
_COPYING = {"__deepcopy__", "__reduce__", "__reduce_ex__"}


def held_tensors(target: Any) -> Iterator[Tensor]:
    """The tensors in an object, each once."""
    seen: dict[int, Any] = {}
    waiting = [target]
    while waiting:
        one = waiting.pop()
        if one is None or isinstance(one, _WHOLE) or id(one) in seen:
            continue
        seen[id(one)] = one  # kept, and with it its id
        if isinstance(one, Tensor):
            yield one
        else:
            waiting.extend(_parts(one))


def deepcopy_memo(target: Any, take: Callable[[Tensor], Tensor]) -> dict[int, Any]:
    """A memo for ``copy.deepcopy(target, memo)`` by which tensors with a history, which it refuses, are copied.

    Args:
        target: the object that is to be copied.
        take: copies a tensor.
    """
    return {id(tensor): take(tensor) for tensor in held_tensors(target) if has_history(tensor)}


def _parts(one: Any) -> Iterator[Any]:
    if isinstance(one, Mapping):
        yield from one.keys()
        yield from one.values()
    elif isinstance(one, (list, tuple, set, frozenset)):
        yield from one
    elif isinstance(one, partial):
        yield from (one.func, one.args, one.keywords)
    elif isinstance(one, MethodType):
        yield one.__self__
    elif not _says_how_to_copy(type(one)):
        for kind in type(one).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield getattr(one, name, None)
    if not _says_how_to_copy(type(one)):
        yield from getattr(one, "__dict__", {}).values()


def _says_how_to_copy(kind: type) -> bool:
    """Whether the class has its own way to be copied, so that ``deepcopy`` does not look at its attributes."""
    return any(not _COPYING.isdisjoint(vars(one)) for one in kind.__mro__[:-1])
