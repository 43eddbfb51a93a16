"""A module → a copy with other tensors, as ``copy.deepcopy`` makes it, in a quarter of its time."""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist.core.types import TensorContainer
from torchopt_dist.formulas.embedding import let_padding_rest
from torchopt_dist.nn._tensor_copier import held_tensors
from torchopt_dist.nn._tensor_dicts import parts_of
from torchopt_dist.torch_private import (
    buffers_of,
    children_of,
    drop_compiled_call,
    parameters_of,
    transforms_are_active,
)

__all__ = ["ModuleCopy", "copied"]

_CODE = frozenset({FunctionType, BuiltinFunctionType, type})
_ATOMS = _CODE | {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
"""The types of what a copy shares with the original."""
_DICTS = frozenset({dict, OrderedDict})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set, frozenset})
_WAYS = (
    *("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__new__"),
    *("__getnewargs__", "__getnewargs_ex__", "__basicsize__"),
)
"""By these a class says how its objects are copied; by the last, that some attributes are not in a dictionary."""
_TORCHS = [getattr(nn.Module, way, None) for way in _WAYS]


def copied(
    module: nn.Module, take: Callable[[Tensor], Tensor], take_buffer: Callable[[Tensor], Tensor]
) -> nn.Module:
    """Copy a module.

    Args:
        module: the module.
        take: copies a parameter, or a tensor that an attribute holds.
        take_buffer: copies a buffer.
    """
    return ModuleCopy(module, take, take_buffer).module


class ModuleCopy:
    """A copy of a module; the arguments are those of :func:`copied`."""

    module: nn.Module
    """The copy."""
    is_plain: bool
    """Whether its parts are known to be held by nothing but its dictionaries of sub-modules."""
    is_simple: bool
    """Whether it is plain, and beside tensors has no attributes but plain values and containers of these."""
    memo: dict[int, Any]
    """By the ids of the objects that were copied, their copies."""

    def __init__(
        self, module: nn.Module, take: Callable[[Tensor], Tensor], take_buffer: Callable[[Tensor], Tensor]
    ) -> None:
        parts = parts_of(module)
        self._take = take
        self.memo = {}  # `deepcopy` takes the copies of these objects from here
        for containers, take_one in ((buffers_of, take_buffer), (parameters_of, take)):
            for part in parts:
                for tensor in containers(part).values():
                    if tensor is not None:
                        self.memo[id(tensor)] = take_one(tensor)
        self._kinds = {kind: _is_copied_by_attributes(kind) for kind in {*map(type, parts)}}
        self.is_plain = self.is_simple = all(self._kinds.values())
        if not self.is_plain:
            for part in parts:
                for attribute in vars(part).values():
                    self._take_tensors_of(attribute)
        self.module = self._copied(module)
        if transforms_are_active():
            let_padding_rest(self.module)

    def places(self) -> tuple[list[Tensor], list[tuple[TensorContainer, str, int]]]:
        """The copy's parameters and buffers, each once; the dictionaries, a name in each, and which tensor is there."""
        seen: dict[int, int] = {}
        tensors: list[Tensor] = []
        places: list[tuple[TensorContainer, str, int]] = []
        for part in parts_of(self.module):
            for container in (parameters_of(part), buffers_of(part)):
                for name, tensor in container.items():
                    if tensor is not None:
                        place = seen.setdefault(id(tensor), len(tensors))
                        tensors += [tensor] if place == len(tensors) else []
                        places.append((container, name, place))
        return tensors, places

    def _copied(self, module: nn.Module) -> nn.Module:
        memo = self.memo
        known: nn.Module | None = memo.get(id(module))
        if known is not None:
            return known
        cls = type(module)
        if not self._kinds[cls]:
            return copy.deepcopy(module, memo)
        made = memo[id(module)] = cls.__new__(cls)
        children, parameters, buffers = children_of(module), parameters_of(module), buffers_of(module)
        own = dict(vars(module))
        for name, value in vars(module).items():
            kind = type(value)
            if kind in _ATOMS:
                self.is_simple &= kind not in _CODE
                continue
            if kind in _CONTAINERS and not value:
                own[name] = memo.setdefault(id(value), kind())
            elif value is parameters or value is buffers:
                own[name] = memo[id(value)] = {
                    key: tensor if tensor is None else memo[id(tensor)] for key, tensor in value.items()
                }
            elif value is children:
                own[name] = memo[id(value)] = kind()
                for child, part in children.items():
                    own[name][child] = None if part is None else self._copied(part)
            elif _is_of_atoms(value):
                self.is_simple &= _CODE.isdisjoint(map(type, value.values() if kind in _DICTS else value))
                own[name] = memo.setdefault(id(value), kind(value))
            else:
                self.is_simple = False
                self.is_plain &= isinstance(value, Tensor)
                self._take_tensors_of(value)
                own[name] = copy.deepcopy(value, memo)
        drop_compiled_call(own)
        if cls.__setstate__ is nn.Module.__setstate__:
            vars(made).update(own)  # it adds nothing to what a complete module has
        else:
            made.__setstate__(own)
            now = vars(made)
            self.is_plain &= len(now) == len(own) and all(now.get(name) is own[name] for name in own)
            self.is_simple = False
        return made

    def _take_tensors_of(self, attribute: Any) -> None:
        """Have the tensors in an attribute copied by ``take``: ``deepcopy`` refuses those with a history."""
        if not _is_of_atoms(attribute):
            for tensor in held_tensors(attribute):
                if id(tensor) not in self.memo:
                    self.memo[id(tensor)] = self._take(tensor)


def _is_copied_by_attributes(cls: type) -> bool:
    """Whether ``deepcopy`` copies the objects of a class of modules by their attributes, all in a dictionary."""
    return [getattr(cls, way, None) for way in _WAYS] == _TORCHS and cls not in copyreg.dispatch_table


def _is_of_atoms(value: Any) -> bool:
    """Whether it is a container of nothing but plain values, such as the strides of a convolution."""
    kind = type(value)
    if kind not in _CONTAINERS or not _ATOMS.issuperset(map(type, value)):
        return False
    return kind not in _DICTS or _ATOMS.issuperset(map(type, value.values()))
