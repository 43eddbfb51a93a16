"""What ``functools`` and ``typing`` make for a script, and pickle sends by name → its parts, and it again from these.

A cache is sent empty: each process fills its own, as each that runs a script does.
"""

from __future__ import annotations

import functools
import sys
import threading
import typing
from collections.abc import Callable
from types import FunctionType
from typing import Any

__all__ = ["NAMED_BY_PICKLE", "reduce_wrapped"]

_CACHE: type = type(functools.lru_cache(len))
_NAMED: tuple[type, ...] = (typing.ParamSpec, typing.TypeVarTuple, typing.NewType)
NAMED_BY_PICKLE = frozenset({_CACHE, *_NAMED})
"""The kinds of objects, besides functions and classes, that pickle sends by name and this file by their parts."""
_DISPATCHER = vars(functools)["singledispatch"](len).__code__


class _Later:
    """Calls a function that it is given later: the function may refer to what wraps it."""

    __name__ = "function"
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def reduce_wrapped(obj: Any, by_name: Callable[[Any], bool]) -> Any:
    """How to make an object anew, as pickle's ``__reduce__`` says it; ``NotImplemented``: it is none of these.

    Args:
        obj: any object.
        by_name: whether the receiver finds an object under its name.
    """
    kind = type(obj)
    if kind is _CACHE:
        if by_name(obj):
            return NotImplemented
        state = (obj.__wrapped__, dict(vars(obj)))
        return _make_cache, (obj.cache_parameters(),), state, None, None, _fill_cache
    if kind is FunctionType:
        if obj.__code__ is not _DISPATCHER or by_name(obj):
            return NotImplemented
        return _make_dispatcher, (), (dict(obj.registry), _told(obj)), None, None, _fill_dispatcher
    if isinstance(obj, functools.cached_property):
        return _make_property, (kind,), {name: part for name, part in vars(obj).items() if name != "lock"}
    if kind in _NAMED and not by_name(obj):
        if kind is typing.NewType:
            return _make_named, (kind, obj.__name__, obj.__module__, (obj.__supertype__,), {})
        told = {}
        if kind is typing.ParamSpec:
            told = {
                "bound": obj.__bound__,
                "covariant": obj.__covariant__,
                "contravariant": obj.__contravariant__,
            }
        return _make_named, (kind, obj.__name__, obj.__module__, (), told)
    return NotImplemented


def _told(function: Any) -> dict[str, Any]:
    """What ``functools.update_wrapper`` has told the function of the one that it wraps."""
    parts = {
        name: getattr(function, name) for name in functools.WRAPPER_ASSIGNMENTS if hasattr(function, name)
    }
    made = {"registry", "dispatch", "register", "_clear_cache"}
    return {**parts, **{name: part for name, part in vars(function).items() if name not in made}}


def _make_cache(parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(_Later())


def _fill_cache(made: Any, state: tuple[Any, dict[str, Any]]) -> None:
    made.__wrapped__.function, attributes = state
    functools.update_wrapper(made, made.__wrapped__.function)
    vars(made).update(attributes)


def _make_dispatcher() -> Any:
    return functools.singledispatch(_Later())


def _fill_dispatcher(made: Any, state: tuple[dict[type, Any], dict[str, Any]]) -> None:
    registry, told = state
    for kind, function in registry.items():
        made.register(kind, function)
    for name, part in told.items():
        setattr(made, name, part)


def _make_property(kind: Any) -> Any:
    made = kind.__new__(kind)
    if sys.version_info < (3, 12):
        made.lock = threading.RLock()
    return made


def _make_named(kind: Any, name: str, module: str, args: tuple[Any, ...], told: dict[str, Any]) -> Any:
    made = kind(name, *args, **told)
    made.__module__ = module
    return made
