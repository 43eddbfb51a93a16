"""The objects that two pickles share → whether one can change, so that all must be in one pickle."""

from __future__ import annotations

import dis
from collections.abc import Iterable
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch

from torchopt_dist.distributed.serialization.names import name_of

__all__ = ["rebinds", "some_can_change"]


def some_can_change(shared: Iterable[Any], main_by_name: bool) -> bool:
    """Whether one of the objects that two pickles share can change; what belongs to shared code counts as code."""
    code: set[int] = set()
    suspects = []
    for obj in shared:
        if isinstance(obj, type):
            code.update(map(id, vars(obj).values()))
        elif isinstance(obj, FunctionType):
            if vars(obj) and name_of(obj, main_by_name) is None:
                return True
            code |= {id(obj.__annotations__), id(obj.__kwdefaults__)}
        elif not _is_constant(obj):
            suspects.append(obj)
    return any(id(obj) not in code for obj in suspects)


_KEPT = (ModuleType, CellType, torch.dtype, torch.layout, torch.memory_format)


def _is_constant(obj: Any) -> bool:
    # Each function gets cells of its own, in one pickle too; the contents of the cells have entries of their own in the
    # memo. So have the parts and the `__dict__` of an object that is hashed by its value.
    hashed_by: Any = type(obj).__hash__
    return hashed_by not in (None, object.__hash__) or isinstance(obj, _KEPT)


def rebinds(obj: Any) -> bool:
    """Whether ``obj`` is a function that assigns to a global variable."""
    return isinstance(obj, FunctionType) and dis.opmap["STORE_GLOBAL"] in obj.__code__.co_code[::2]
