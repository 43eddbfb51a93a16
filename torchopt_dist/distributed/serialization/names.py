"""A function or class ⇄ the name under which a receiver finds it; a module whose class has no name there ⇄ its parts.

``torch.nn.utils.parametrize`` gives a module with parametrizations, such as ``weight_norm``, a class of its own, which
a receiver cannot find by name, and which cannot be pickled. The receiver makes the same class by the same function, and
fills in the module's attributes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils import parametrize

__all__ = ["code_of", "find", "is_parametrized", "name_of", "reduced"]


def name_of(obj: Any, main_by_name: bool) -> tuple[str, str, int] | None:
    """How a receiver finds ``obj``: module, qualified name, and how often to unwrap; ``None`` if it cannot.

    The name of a decorated function is that of its wrapper; the function is found by ``__wrapped__``.
    """
    module, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", "")
    if not module or "<locals>" in qualname or (module == "__main__" and not main_by_name):
        return None
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    depth = 0
    while found is not None and found is not obj:
        found, depth = getattr(found, "__wrapped__", None), depth + 1
    return None if found is None else (module, qualname, depth)


def find(module: str, qualname: str, depth: int) -> Any:
    """The object of a name that :func:`name_of` has made."""
    __import__(module)  # without a call of Python code, if it has been imported; `importlib` makes four
    found: Any = sys.modules[module]
    for name in qualname.split("."):
        found = getattr(found, name)
    for _ in range(depth):
        found = found.__wrapped__
    return found


def code_of(function: Callable[..., Any]) -> object:
    """The code of a function, which is the same in all calls, even if each call rebuilds the function."""
    if type(function) is FunctionType:
        return function.__code__
    if isinstance(function, functools.partial):
        code = code_of(function.func)
        return code if type(function) is functools.partial else (type(function), code)
    if isinstance(function, nn.Module):
        return type(function)
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


_Reduced: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], Any, None, None, Callable[[Any, Any], None]]


def is_parametrized(obj: Any) -> bool:
    """Whether an object is a module whose class ``parametrize`` has made."""
    if not isinstance(obj, nn.Module):
        return False
    kind = type(obj)
    return kind.__name__ == f"Parametrized{kind.__bases__[0].__name__}" and parametrize.is_parametrized(obj)


def reduced(module: nn.Module) -> _Reduced:
    """The value that ``__reduce__`` would return."""
    parametrizations: Any = module.parametrizations
    return (
        _empty,
        (type(module).__bases__[0], tuple(parametrizations)),
        vars(module).copy(),
        None,
        None,
        _fill,
    )


def _empty(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A module of the class that ``parametrize`` makes for these tensors, without any attribute."""
    module = base.__new__(base)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.zeros(1, device="cpu")))
        parametrize.register_parametrization(module, name, nn.Identity())
    vars(module).clear()
    return module


def _fill(module: nn.Module, attributes: dict[str, Any]) -> None:
    vars(module).update(attributes)
