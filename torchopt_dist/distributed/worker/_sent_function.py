"""A function that was sent by value → the same function with code and a module that stay, so that a program fits it.

The compiler looks a function's global names up in the module of its name, and knows a function by its code. One that
was sent by value has neither: its code is new each time, and its module is that of the sender's process.
"""

from __future__ import annotations

import pickle
import sys
import types
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

__all__ = ["at_home"]


def at_home(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, if it is its module's; else one that does the same, with the code of the first like it."""
    if not isinstance(function, types.FunctionType) or _is_of_its_module(function):
        return function
    sent = function.__globals__
    return _moved(function, sent, _home(_Globals(sent)))


class _Globals:
    """Global names that came with a function: equal if they mean the same."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self._key = tuple((name, _key_of(value)) for name, value in values.items() if name != "__builtins__")

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Globals) and self._key == other._key


@lru_cache(maxsize=64)
def _home(sent: _Globals) -> types.ModuleType:
    """A module that has these global names."""
    home = types.ModuleType(f"torchopt_dist_sent_{id(sent)}")
    sys.modules[home.__name__] = home  # where the compiler looks
    weakref.finalize(sent, sys.modules.pop, home.__name__, None)  # when the cache has dropped it
    names = vars(home)
    names.update({name: value for name, value in sent.values.items() if name != "__name__"})
    for name, value in sent.values.items():
        if isinstance(value, types.FunctionType) and value.__globals__ is sent.values:
            names[name] = _moved(value, sent.values, home)
    return home


def _moved(function: types.FunctionType, sent: dict[str, Any], home: types.ModuleType) -> types.FunctionType:
    """The function with the home's global names, as are those that it closes over."""
    cells = None
    if function.__closure__ is not None:
        cells = tuple(_moved_cell(cell, sent, home) for cell in function.__closure__)
    code = _first(function.__code__, home.__name__)
    made = types.FunctionType(code, vars(home), function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _moved_cell(cell: types.CellType, sent: dict[str, Any], home: types.ModuleType) -> types.CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # it is empty, as that of a function which calls itself may be
        return cell
    if isinstance(value, types.FunctionType) and value.__globals__ is sent and value.__closure__ is None:
        return types.CellType(_moved(value, sent, home))
    return cell


@lru_cache(maxsize=256)
def _first(code: types.CodeType, home: str) -> types.CodeType:
    """Of codes that are equal, the one that came first; one of its own for each home."""
    return code.replace()


def _is_of_its_module(function: types.FunctionType) -> bool:
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    return module is not None and vars(module) is function.__globals__


def _key_of(value: Any) -> Any:
    """What tells a value from others; one that cannot be pickled is equal only to itself."""
    if isinstance(value, types.FunctionType):
        return value.__code__
    if isinstance(value, (type, types.ModuleType)):
        return id(value)
    if isinstance(value, torch.Tensor):
        memory = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        return value.dtype, value.shape, value.device, value.requires_grad, memory.tobytes()
    try:
        return type(value), pickle.dumps(
            value
        )  # the value that was sent again has been made of the same bytes
    except Exception:  # whatever a class raises
        return id(value)
