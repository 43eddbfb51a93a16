"""What functions reach, what is another thing now → copies of the functions that have what there was."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import numpy as np

from torchopt_dist.core.bound import Bound
from torchopt_dist.core.reached import CONTAINERS, Node, Place, free_names, is_structure, map_parts, name_of

__all__ = ["Copies"]

_PLAIN_MODULES = ("torch.nn.modules.", "torch.nn.utils.")
"""Where torch's modules are that consist of their attributes; others wrap compiled code or collectives."""


class Copies:
    """Functions → copies that have what the places had, for those places that have something else now."""

    def __init__(
        self, nodes: Mapping[int, Node], places: Mapping[int, Place], changed: frozenset[int]
    ) -> None:
        self.changed = changed
        self._nodes, self._places = nodes, dict(places)
        self._made: dict[int, Any] = {}
        self._variables: dict[int, dict[str, Any]] = {}
        above: dict[int, list[int]] = {}
        waiting = []
        for key, node in nodes.items():
            for number in self._numbers(node):
                above.setdefault(id(self._places[number].value), []).append(key)
                if number in changed:
                    waiting.append(key)
            entries = self._entries(node)
            for part in [*node.parts, *(entries.values() if isinstance(entries, dict) else entries)]:
                above.setdefault(id(part), []).append(key)
        self._leading: set[int] = set()
        """The ids of the things by which such a place is reached."""
        while waiting:
            key = waiting.pop()
            if key not in self._leading:
                self._leading.add(key)
                waiting += above.get(key, ())

    def _numbers(self, node: Node) -> list[int]:
        every = [*node.cells.values(), *node.names.values()]
        return [number for number in every if number in self._places]

    def _entries(self, node: Node) -> Any:
        number = node.names.get(None)
        is_array = type(node.thing) is np.ndarray
        return self._places[number].value if number in self._places and not is_array else ()

    def of(self, thing: Any) -> Any:
        """The copy; the thing itself, if it does not lead to such a place.

        Raises:
            RuntimeError: it cannot be copied.
        """
        key = id(thing)
        if key not in self._leading:
            return thing
        if key not in self._made:
            self._made[key] = self._copy(self._nodes[key])
        return self._made[key]

    def _copy(self, node: Node) -> Any:
        thing, kind = node.thing, type(node.thing)
        if kind is FunctionType:
            return self._function(node)
        if kind is MethodType:
            return MethodType(self.of(thing.__func__), self.of(thing.__self__))
        if kind is Bound:
            return self.of(thing.__wrapped__)
        if kind is np.ndarray:
            return self._places[node.names[None]].value
        if kind in CONTAINERS:
            made = self._made[id(thing)] = kind()
            entries = self._entries(node)
            if isinstance(entries, dict):
                made.update((name, self.of(value)) for name, value in entries.items())
            else:
                made.extend(map(self.of, entries))
            return made
        if id(kind) in self._leading:  # a method of its class reads such a name
            self._refuse(node)
        if is_structure(thing):
            return map_parts(thing, self.of)
        if kind is ModuleType:
            return self._filled(node, ModuleType(thing.__name__))
        if isinstance(thing, type) or not _consists_of_attributes(kind):
            self._refuse(node)
        try:
            made = object.__new__(kind)
        except TypeError:  # more than attributes: a class that is written in C
            self._refuse(node)
        return self._filled(node, made)

    def _function(self, node: Node) -> Any:
        function = node.thing
        if node.is_wrapper:
            return self.of(node.parts[0])
        cells = list(function.__closure__ or ())
        replaced = [(place, number) for place, number in node.cells.items() if self._is_other(number)]
        for place, _ in replaced:
            cells[place] = CellType()
        variables = function.__globals__
        if any(map(self._is_other, node.names.values())):
            variables = self._variables_as_then(variables)
        made = FunctionType(function.__code__, variables, function.__name__, None, tuple(cells))
        self._made[id(function)] = made  # a function may close over itself
        for place, number in replaced:
            cells[place].cell_contents = self.of(self._places[number].value)
        if function.__defaults__ is not None:
            made.__defaults__ = tuple(map(self.of, function.__defaults__))
        if function.__kwdefaults__ is not None:
            made.__kwdefaults__ = {name: self.of(one) for name, one in function.__kwdefaults__.items()}
        functools.update_wrapper(made, function)
        vars(made).pop("__wrapped__")
        vars(made).update(vars(function))
        return made

    def _is_other(self, number: int) -> bool:
        """Whether a copy has something else at a place than the original has now."""
        return number in self.changed or (
            number in self._places and id(self._places[number].value) in self._leading
        )

    def _variables_as_then(self, variables: dict[str, Any]) -> dict[str, Any]:
        """The global names of functions, with one dictionary for all functions of a module."""
        made = self._variables.get(id(variables))
        if made is None:
            made = self._variables[id(variables)] = dict(variables)
            for number, (container, key, value) in self._places.items():
                if container is variables and key is not None and self._is_other(number):
                    made[key] = self.of(value)
        return made

    def _filled(self, node: Node, made: Any) -> Any:
        self._made[id(node.thing)] = made
        own = dict(vars(node.thing))
        for name, number in node.names.items():
            if name is not None and self._is_other(number):
                own[name] = self.of(self._places[number].value)
        vars(made).update(own)
        return made

    def _refuse(self, node: Node) -> NoReturn:
        """Raise the error of a name that cannot be given back."""
        waiting, visited = [(node, name_of(node.thing))], set()
        name = where = ""
        while waiting:
            one, label = waiting.pop()
            visited.add(id(one.thing))
            for key, number in [
                *one.names.items(),
                *zip(free_names(one.thing), one.cells.values(), strict=False),
            ]:
                if number in self.changed:
                    name, where = key or "an entry", label
            values = [self._places[number].value for number in self._numbers(one)]
            for thing in [*one.parts, *values]:
                if id(thing) in self._leading and id(thing) not in visited:
                    waiting.append((self._nodes[id(thing)], name_of(thing)))
        raise RuntimeError(
            f"`{name}`, which `{where}` reads, has been bound anew between the call and the backward pass, which calls "
            f"`{where}` again. What a class, a method of one or a cached function reads cannot be kept: make "
            f"`{name}` an argument, a variable that the function itself closes over, or an attribute of an object"
        )


def _consists_of_attributes(cls: type) -> bool:
    """Whether the objects of a class are what is in their dictionaries."""
    slots = [one.__dict__.get("__slots__", ()) for one in cls.__mro__]
    has_slots = any(
        set([own] if isinstance(own, str) else own) - {"__dict__", "__weakref__"} for own in slots
    )
    module = cls.__module__ + "."
    is_torchs = module.startswith("torch.") and not module.startswith(_PLAIN_MODULES)
    return not (has_slots or is_torchs)
