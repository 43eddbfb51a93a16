"""Functions → what they reach by their names, and the places from which they take it."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchopt_dist.core.bound import Bound
from torchopt_dist.core.code_names import LIBRARIES, is_installed, reads, top_package
from torchopt_dist.torch_private import attributes_for_forward, original_of

__all__ = [
    "CONTAINERS",
    "NUMBERS",
    "Node",
    "Place",
    "Walk",
    "free_names",
    "is_structure",
    "map_parts",
    "name_of",
    "parts_of",
]

NUMBERS = frozenset((bool, int, float, complex, str, bytes))
_ATOMS = NUMBERS | {type(None), torch.dtype, torch.device, torch.Size, BuiltinFunctionType, CodeType}
CONTAINERS = frozenset((list, dict, OrderedDict))
_ENTRIES = 128
"""A list or a dictionary of more entries is data: nobody gives it others between two tasks, and looking takes long."""
_ALL_ENTRIES = 1024
"""So many entries of containers are looked at, at most."""
_IMPLICIT = frozenset(
    (
        *("forward", "__call__", "__getitem__", "__iter__", "__next__", "__len__", "__contains__"),
        *("__getattr__", "__enter__", "__exit__", "objective", "optimality"),
    )
)
"""Methods that Python, torch or this package calls, not the function that is bound."""


class Place(NamedTuple):
    """Where a name leads to what."""

    container: Any
    """A cell, a dictionary of names, or a list, a dictionary or an array whose entries are meant."""
    key: str | None
    """The name; ``None`` for entries."""
    value: Any
    """What is there, or a copy of the entries."""


class Node:
    """A thing on the way to others."""

    __slots__ = ("cells", "is_wrapper", "names", "parts", "thing")

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.parts: list[Any] = []
        """What it leads to and cannot be given another of."""
        self.cells: dict[int, int] = {}
        """For a function: the numbers of places, by the numbers of its cells."""
        self.names: dict[str | None, int] = {}
        """The numbers of places, by global names, or by names of attributes; of its entries by ``None``."""
        self.is_wrapper = False
        """Whether it is what the compiler has made of its only part."""


class Walk:
    """Functions → the places from which they take something."""

    def __init__(self, functions: Iterable[Any]) -> None:
        self.nodes: dict[int, Node] = {}
        self.places: dict[int, Place] = {}
        self.tensors: list[Tensor] = []
        self._numbers: dict[tuple[int, str | None], int] = {}
        self._names: set[str] = set(_IMPLICIT)
        self._objects: list[tuple[Node, Any, set[str]]] = []
        self._entries_left = _ALL_ENTRIES
        self._waiting = list(functions)
        self._packages = {_package_of(function) for function in self._waiting} - LIBRARIES
        while self._waiting:
            while self._waiting:
                self._visit(self._waiting.pop())
            for (
                node,
                own,
                seen,
            ) in self._objects:  # which may have what functions mention that were met after it
                if len(seen) < len(self._names):
                    new = self._names - seen
                    seen |= new
                    self._look(node, own, new)

    def _visit(self, thing: Any) -> None:
        kind = type(thing)
        if kind in _ATOMS or id(thing) in self.nodes:
            return
        if kind is FunctionType:
            self._function(thing)
        elif isinstance(thing, Tensor):
            self._node(thing)
            self.tensors.append(thing)
        elif kind is MethodType:
            self._node(thing, [thing.__func__, thing.__self__])
        elif kind is Bound:
            self._node(thing, [thing.__wrapped__])
        elif kind in CONTAINERS:
            if len(thing) <= min(_ENTRIES, self._entries_left):
                self._entries_left -= len(thing)
                self._entries(thing)
        elif kind is np.ndarray:
            if thing.size <= _ENTRIES:
                self._node(thing).names[None] = self._place(thing, None, thing.copy())
        elif is_structure(thing):
            parts = parts_of(thing)
            if len(parts) <= min(_ENTRIES, self._entries_left):
                self._entries_left -= len(parts)
                self._node(thing, [*parts, kind])
        elif isinstance(thing, nn.Module):
            node = self._object(thing, vars(thing))
            names, registers = attributes_for_forward(thing)
            for name in names:
                self._name(node, vars(thing), name)
            for register in registers:
                self._entries(register)
        elif isinstance(thing, (type, ModuleType)):
            if self._is_users(thing.__name__ if kind is ModuleType else thing.__module__):
                self._object(thing, vars(thing))
        else:
            own = _attributes_of(thing)
            if type(own.get("__wrapped__")) is FunctionType:  # as `functools.lru_cache` makes it
                self._node(thing, [own["__wrapped__"]])
            elif self._is_users(kind.__module__):
                self._object(thing, own)

    def _node(self, thing: Any, parts: list[Any] | None = None) -> Node:
        node = self.nodes[id(thing)] = Node(thing)
        if parts:
            node.parts = parts
            self._waiting += parts
        return node

    def _place(self, container: Any, key: str | None, value: Any) -> int:
        number = self._numbers.get((id(container), key))
        if number is None:
            number = self._numbers[id(container), key] = len(self._numbers)
            self.places[number] = Place(container, key, value)
            if key is not None:
                self._waiting.append(value)
        return number

    def _name(self, node: Node, own: Mapping[str, Any], name: str) -> None:
        node.names[name] = self._place(own, name, own[name])

    def _function(self, function: FunctionType) -> None:
        compiled = original_of(function)
        if compiled is not None:
            self._node(function, [compiled]).is_wrapper = True
            return
        variables = function.__globals__
        is_users = self._is_users(variables.get("__name__"))
        if not (is_users or function.__closure__):
            return
        node = self._node(
            function, [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        )
        for place, cell in enumerate(function.__closure__ or ()):
            try:
                node.cells[place] = self._place(cell, "", cell.cell_contents)
            except ValueError:  # an empty one
                continue
        if is_users:
            mentioned = reads(function.__code__)
            self._names |= mentioned.attributes
            for name in mentioned.variables:
                if name in variables:
                    self._name(node, variables, name)

    def _entries(self, thing: Any) -> None:
        if id(thing) not in self.nodes:
            copy: Any = dict(thing) if isinstance(thing, dict) else list(thing)
            self._node(thing).names[None] = self._place(thing, None, copy)
            self._waiting += copy.values() if isinstance(copy, dict) else copy

    def _object(self, thing: Any, own: Any) -> Node:
        node = self._node(thing, [] if isinstance(thing, (type, ModuleType)) else [type(thing)])
        self._objects.append((node, own, set()))
        return node

    def _look(self, node: Node, own: Mapping[str, Any], names: set[str]) -> None:
        """Note what an object, a class or a module has of some names."""
        if not isinstance(node.thing, type):
            for name in names & own.keys():
                self._name(node, own, name)
            return
        for cls in node.thing.__mro__:
            if self._is_users(cls.__module__):
                for name in names & vars(cls).keys():
                    value = vars(cls)[name]
                    if isinstance(value, (FunctionType, staticmethod, classmethod, property)):
                        value = getattr(value, "__func__", getattr(value, "fget", value))
                        node.parts.append(value)
                        self._waiting.append(value)
                    elif name not in node.names:
                        self._name(node, vars(cls), name)

    def _is_users(self, module: Any) -> bool:
        if not isinstance(module, str):
            return module is None
        return top_package(module) in self._packages or not is_installed(top_package(module))


def _attributes_of(thing: Any) -> dict[str, Any]:
    """The dictionary of an object, without a question to its class; empty, if it has none."""
    try:
        own: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return own


def _package_of(function: Any) -> str:
    while isinstance(function, (functools.partial, Bound)):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    module = getattr(function, "__module__", None)
    return top_package(module) if isinstance(module, str) else "torch"


def is_structure(thing: Any) -> bool:
    """Whether a thing consists of parts that cannot be replaced by others."""
    if isinstance(thing, (tuple, functools.partial)):
        return True
    settings = getattr(type(thing), "__dataclass_params__", None)
    return settings is not None and settings.frozen


def parts_of(thing: Any) -> list[Any]:
    """What a structure or a container consists of."""
    if isinstance(thing, (tuple, list)):
        return list(thing)
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    return [getattr(thing, field.name) for field in fields(thing)]


def map_parts(thing: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure, or container, with other parts."""
    if isinstance(thing, dict):
        return type(thing)((key, function(value)) for key, value in thing.items())
    if isinstance(thing, (tuple, list)):
        make: Any = getattr(thing, "_make", type(thing))
        return make(map(function, thing))
    if isinstance(thing, functools.partial):
        first, *rest = map(function, parts_of(thing))
        count = len(thing.args)
        return functools.partial(first, *rest[:count], **dict(zip(thing.keywords, rest[count:], strict=True)))
    return replace(thing, **{field.name: function(getattr(thing, field.name)) for field in fields(thing)})


def free_names(thing: Any) -> tuple[str, ...]:
    """The names of a function's cells; none of another thing."""
    return thing.__code__.co_freevars if type(thing) is FunctionType else ()


def name_of(function: Any) -> str:
    """A function's name, for messages."""
    while isinstance(function, (functools.partial, Bound)):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    return str(getattr(function, "__qualname__", type(function).__qualname__))
