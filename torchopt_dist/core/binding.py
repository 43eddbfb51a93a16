"""A function that runs again later → the same function, whose names then mean what they meant at the call.

Python looks a name up when a function runs. So a loss that runs again in a backward pass would see what a loop around
it has bound to its names since: another task's data, and a wrong gradient. What is noted at the call is compared when
the function runs again. While it is the same, that is all, and the function itself runs. Where names of variables,
attributes or entries were bound anew, a copy of the function runs that has them as they were, and copies of whatever
leads to them: functions that it calls, objects, modules, lists. Nothing of the caller's is written, so threads do not
meet. A tensor that was changed in place cannot be given back: that is an error, as torch's own is.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from torchopt_dist._torch_private import attributes_for_forward, original_of
from torchopt_dist._versions import Seen

__all__ = ["Bindings", "Bound", "bind", "is_installed", "is_numpys", "reads"]

_NUMBERS = frozenset((bool, int, float, complex, str, bytes))
_ATOMS = _NUMBERS | {type(None), torch.dtype, torch.device, torch.Size, BuiltinFunctionType, CodeType}
_CONTAINERS = frozenset((list, dict, OrderedDict))
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
_PLAIN_MODULES = ("torch.nn.modules.", "torch.nn.utils.")
"""Where torch's modules are that consist of their attributes; others wrap compiled code or collectives."""


def bind(function: Callable[..., Any]) -> Bound:
    """A function → the same function, which can run again later; see :class:`Bound`."""
    # A compiler goes on after this: it would look into names that it cannot follow.
    make = torch.compiler.disable(_bind) if torch.compiler.is_compiling() else _bind
    bound: Bound = make(function)
    return bound


def _bind(function: Callable[..., Any]) -> Bound:
    return Bound(function, Bindings(function))


class Bindings:
    """What the names of functions mean now.

    Up to :meth:`settle` the functions run as they are. What has changed by then they have changed themselves, or it was
    changed for them, as a counter or the batch of a step is: such names go on as they are.

    Args:
        functions: functions, methods, callable objects, partials or containers of these. They are followed to what they
            reach by cells, global names, attributes and entries of containers, but not into installed packages.
    """

    __slots__ = ("_bound", "_copies", "_is_live", "_nodes", "_places", "_seen")

    def __init__(self, *functions: Any) -> None:
        walk = _Walk(functions)
        self._nodes, self._places = walk.nodes, walk.places
        self._seen = Seen(walk.tensors)
        self._bound: dict[int, Any] = {}
        self._copies: _Copies | None = None
        self._is_live = True

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the functions reach, parameters and buffers of modules among them, each once."""
        return self._seen.tensors

    def of(self, function: Any) -> Any:
        """One of the functions as one to be called, now and later.

        Of a tuple or another structure that is made of functions, as an optimizer is, those of the caller's are meant.
        """
        if function is None or id(function) not in self._nodes:
            return function
        if isinstance(function, tuple):
            return self._of_part(function)
        return self._once(function, lambda: Bound(function, self))

    def _of_part(self, part: Any) -> Any:
        called = part.func if isinstance(part, functools.partial) else part
        if isinstance(called, (FunctionType, MethodType)) and id(called) in self._nodes:
            return self.of(part)
        if id(part) not in self._nodes or not (_is_structure(part) or type(part) in _CONTAINERS):
            return part
        made = self._once(part, lambda: _map_parts(part, self._of_part))
        return part if all(map(_is, _parts_of(made), _parts_of(part))) else made

    def _once(self, thing: Any, make: Callable[[], Any]) -> Any:
        """What is made for a thing, one for all places where it is."""
        if id(thing) not in self._bound:
            self._bound[id(thing)] = make()
        return self._bound[id(thing)]

    def settle(self) -> None:
        """From now on, functions see what was noted, other than what has changed until now."""
        self._is_live = False
        self._forget(self._changed())

    def again(self, function: Any) -> Any:
        """The function that does now what this one did at the call: itself, or a copy.

        Raises:
            RuntimeError: a tensor that it uses has been changed in place since, or a name has been bound anew that
                cannot be given back.
        """
        return function if self._is_live else self._with(function, self._changed())

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function as it was at the call; what the call itself changes goes on from there."""
        if self._is_live:
            return function(*args, **kwargs)
        changed = self._changed()
        function = self._with(function, changed)
        try:
            return function(*args, **kwargs)
        finally:
            self._forget(self._changed() - changed)

    def anew(self, *things: Any) -> list[Any]:
        """Functions, and other things they were noted with, as they were: also what they have changed themselves.

        What they change in their turn is theirs: copies are made each time.

        Raises:
            RuntimeError: as :meth:`again`.
        """
        self._check(things[0])
        changed = self._changed()
        if not changed:
            return list(things)
        copies = _Copies(self._nodes, self._places, changed)
        return [copies.of(thing) for thing in things]

    def settle_tensors(self, used: Collection[int]) -> list[Tensor]:
        """The tensors that have been changed in place.

        From now on they are not looked at, and neither are those that were not used.

        Args:
            used: the ids of those that were.
        """
        moved = [self._seen.tensors[place] for place in self._seen.changed()]
        gone = {id(x) for x in moved}
        self._seen = Seen(x for x in self._seen.tensors if id(x) in used and id(x) not in gone)
        return moved

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the functions reach, each once."""
        return [node.thing for node in self._nodes.values() if isinstance(node.thing, nn.Module)]

    @property
    def code(self) -> frozenset[CodeType]:
        """The code of all functions that they reach, the methods and hooks of modules among them."""
        things = [node.thing for node in self._nodes.values()]
        things += [getattr(type(module), "forward", None) for module in self.modules]
        return frozenset(
            code for thing in things if isinstance(code := getattr(thing, "__code__", None), CodeType)
        )

    def name_of_numpy(self) -> str | None:
        """The name by which a function reads something of numpy's; ``None`` if there is none."""
        for node in self._nodes.values():
            named = [*node.names.items(), *zip(_free(node.thing), node.cells.values(), strict=False)]
            for name, number in named:
                value = self._places[number].value
                entries = value.values() if name is None and isinstance(value, dict) else value
                for one in entries if name is None else [value]:
                    if is_numpys(one):
                        return name or type(one).__name__
            if any(map(is_numpys, node.parts)):
                return _name(node.thing)
        return None

    def _check(self, function: Any) -> None:
        for place in self._seen.changed():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self._seen.tensors[place].shape)} that `{_name(function)}` uses, which runs "
                "again for its gradient. Change it after the backward pass, or give the function a clone"
            )

    def _with(self, function: Any, changed: frozenset[int]) -> Any:
        self._check(function)
        if not changed:
            return function
        copies = self._copies
        if copies is None or copies.changed != changed:
            copies = _Copies(self._nodes, self._places, changed)
        made = copies.of(function)
        self._copies = copies  # which are complete
        return made

    def _changed(self) -> frozenset[int]:
        """The numbers of the places where there is something else now."""
        found = []
        for number, (container, key, value) in self._places.items():
            if key is None:
                if not _has_entries(container, value):
                    found.append(number)
                continue
            try:
                now = container.cell_contents if type(container) is CellType else container[key]
            except (KeyError, ValueError):
                found.append(number)
                continue
            if now is not value and not (type(now) in _NUMBERS and type(now) is type(value) and now == value):
                found.append(number)
        return frozenset(found)

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._places.pop(number, None)
        moved = set(self._seen.changed())
        if moved:
            self._seen = Seen(one for place, one in enumerate(self._seen.tensors) if place not in moved)


class Bound:
    """A function that can be called like the original, now and later; its attributes are the original's."""

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], bindings: Bindings) -> None:
        functools.update_wrapper(self, function, updated=())
        self._bindings = bindings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; see :meth:`Bindings.run`."""
        return self._bindings.run(self.__wrapped__, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # of one that is being made
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _itself, (self._bindings.again(self.__wrapped__),)

    @property
    def is_the_same(self) -> bool:
        """Whether the function itself does what it did at the call."""
        return self._bindings.again(self.__wrapped__) is self.__wrapped__

    @property
    def tensors(self) -> list[Tensor]:
        """See :attr:`Bindings.tensors`."""
        return self._bindings.tensors

    def settle(self) -> None:
        """See :meth:`Bindings.settle`."""
        self._bindings.settle()


def _itself(function: Any) -> Any:
    """What another process makes of a bound function: the function, whose names are its own there."""
    return function


class _Place(NamedTuple):
    """Where a name leads to what."""

    container: Any
    """A cell, a dictionary of names, or a list, a dictionary or an array whose entries are meant."""
    key: str | None
    """The name; ``None`` for entries."""
    value: Any
    """What is there, or a copy of the entries."""


class _Node:
    """A thing on the way to others."""

    __slots__ = ("cells", "names", "parts", "thing")

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.parts: list[Any] = []
        """What it leads to and cannot be given another of."""
        self.cells: dict[int, int] = {}
        """For a function: the numbers of places, by the numbers of its cells."""
        self.names: dict[str | None, int] = {}
        """The numbers of places, by global names, or by names of attributes; of its entries by ``None``."""


class _Walk:
    """Functions → the places from which they take something."""

    def __init__(self, functions: Iterable[Any]) -> None:
        self.nodes: dict[int, _Node] = {}
        self.places: dict[int, _Place] = {}
        self.tensors: list[Tensor] = []
        self._numbers: dict[tuple[int, str | None], int] = {}
        self._names: set[str] = set(_IMPLICIT)
        self._objects: list[tuple[_Node, Any, set[str]]] = []
        self._entries_left = _ALL_ENTRIES
        self._waiting = list(functions)
        self._packages = {_package_of(function) for function in self._waiting} - _LIBRARIES
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
        elif kind in _CONTAINERS:
            if len(thing) <= min(_ENTRIES, self._entries_left):
                self._entries_left -= len(thing)
                self._entries(thing)
        elif kind is np.ndarray:
            if thing.size <= _ENTRIES:
                self._node(thing).names[None] = self._place(thing, None, thing.copy())
        elif _is_structure(thing):
            parts = _parts_of(thing)
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

    def _node(self, thing: Any, parts: list[Any] | None = None) -> _Node:
        node = self.nodes[id(thing)] = _Node(thing)
        if parts:
            node.parts = parts
            self._waiting += parts
        return node

    def _place(self, container: Any, key: str | None, value: Any) -> int:
        number = self._numbers.get((id(container), key))
        if number is None:
            number = self._numbers[id(container), key] = len(self._numbers)
            self.places[number] = _Place(container, key, value)
            if key is not None:
                self._waiting.append(value)
        return number

    def _name(self, node: _Node, own: Mapping[str, Any], name: str) -> None:
        node.names[name] = self._place(own, name, own[name])

    def _function(self, function: FunctionType) -> None:
        compiled = original_of(function)
        if compiled is not None:
            self._node(function, [compiled])
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

    def _object(self, thing: Any, own: Any) -> _Node:
        node = self._node(thing, [] if isinstance(thing, (type, ModuleType)) else [type(thing)])
        self._objects.append((node, own, set()))
        return node

    def _look(self, node: _Node, own: Mapping[str, Any], names: set[str]) -> None:
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
        return _top(module) in self._packages or not is_installed(_top(module))


class _Reads(NamedTuple):
    """What code mentions, with that of the functions in it."""

    variables: frozenset[str]
    """Global names."""
    attributes: frozenset[str]
    """Names of attributes, and strings that may be such names."""
    assigned: frozenset[str]
    """Global names that it binds."""


@functools.lru_cache(maxsize=4096)
def reads(code: CodeType) -> _Reads:
    """What code mentions."""
    variables: set[str] = set()
    attributes: set[str] = set()
    assigned: set[str] = set()
    for one in dis.get_instructions(code):
        if one.opname.startswith("LOAD"):
            if "GLOBAL" in one.opname or "NAME" in one.opname:
                variables.add(one.argval)
            elif "ATTR" in one.opname or "METHOD" in one.opname:
                attributes.add(one.argval)
        elif one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            assigned.add(one.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = reads(constant)
            variables |= inner.variables
            attributes |= inner.attributes
            assigned |= inner.assigned
        elif isinstance(constant, str) and constant.isidentifier():
            attributes.add(constant)
    return _Reads(frozenset(variables), frozenset(attributes), frozenset(assigned))


_LIBRARIES = sys.stdlib_module_names | {"torch", "torchopt_dist"}


@functools.lru_cache(maxsize=4096)
def is_installed(package: str) -> bool:
    """Whether a package is Python's, torch's, this one or one of those that are installed, by its place."""
    if package == "__main__":  # which may be a program that runs the user's, such as a debugger
        return False
    file = getattr(sys.modules.get(package), "__file__", None)
    return package in _LIBRARIES or not {"site-packages", "dist-packages"}.isdisjoint(
        PurePath(file or "").parts
    )


def _attributes_of(thing: Any) -> dict[str, Any]:
    """The dictionary of an object, without a question to its class; empty, if it has none."""
    try:
        own: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return own


def _top(module: str) -> str:
    return module.partition(".")[0]


def _package_of(function: Any) -> str:
    while isinstance(function, (functools.partial, Bound)):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    module = getattr(function, "__module__", None)
    return _top(module) if isinstance(module, str) else "torch"


class _Copies:
    """Functions → copies that have what the places had, for those places that have something else now."""

    def __init__(
        self, nodes: Mapping[int, _Node], places: Mapping[int, _Place], changed: frozenset[int]
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

    def _numbers(self, node: _Node) -> list[int]:
        every = [*node.cells.values(), *node.names.values()]
        return [number for number in every if number in self._places]

    def _entries(self, node: _Node) -> Any:
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

    def _copy(self, node: _Node) -> Any:
        thing, kind = node.thing, type(node.thing)
        if kind is FunctionType:
            return self._function(node)
        if kind is MethodType:
            return MethodType(self.of(thing.__func__), self.of(thing.__self__))
        if kind is Bound:
            return self.of(thing.__wrapped__)
        if kind is np.ndarray:
            return self._places[node.names[None]].value
        if kind in _CONTAINERS:
            made = self._made[id(thing)] = kind()
            entries = self._entries(node)
            if isinstance(entries, dict):
                made.update((name, self.of(value)) for name, value in entries.items())
            else:
                made.extend(map(self.of, entries))
            return made
        if id(kind) in self._leading:  # a method of its class reads such a name
            self._refuse(node)
        if _is_structure(thing):
            return _map_parts(thing, self.of)
        if kind is ModuleType:
            return self._filled(node, ModuleType(thing.__name__))
        if isinstance(thing, type) or not _consists_of_attributes(kind):
            self._refuse(node)
        try:
            made = object.__new__(kind)
        except TypeError:  # more than attributes: a class that is written in C
            self._refuse(node)
        return self._filled(node, made)

    def _function(self, node: _Node) -> Any:
        function = node.thing
        compiled = original_of(function)
        if compiled is not None:
            return self.of(compiled)
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

    def _filled(self, node: _Node, made: Any) -> Any:
        self._made[id(node.thing)] = made
        own = dict(vars(node.thing))
        for name, number in node.names.items():
            if name is not None and self._is_other(number):
                own[name] = self.of(self._places[number].value)
        vars(made).update(own)
        return made

    def _refuse(self, node: _Node) -> NoReturn:
        """Raise the error of a name that cannot be given back."""
        waiting, visited = [(node, _name(node.thing))], set()
        name = where = ""
        while waiting:
            one, label = waiting.pop()
            visited.add(id(one.thing))
            for key, number in [*one.names.items(), *zip(_free(one.thing), one.cells.values(), strict=False)]:
                if number in self.changed:
                    name, where = key or "an entry", label
            values = [self._places[number].value for number in self._numbers(one)]
            for thing in [*one.parts, *values]:
                if id(thing) in self._leading and id(thing) not in visited:
                    waiting.append((self._nodes[id(thing)], _name(thing)))
        raise RuntimeError(
            f"`{name}`, which `{where}` reads, has been bound anew between the call and the backward pass, which calls "
            f"`{where}` again. What a class, a method of one or a cached function reads cannot be kept: make "
            f"`{name}` an argument, a variable that the function itself closes over, or an attribute of an object"
        )


def is_numpys(thing: Any) -> bool:
    """Whether it is an array, a scalar, a type, a function or a module of numpy."""
    if isinstance(thing, (np.ndarray, np.generic)):
        return True
    home = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return isinstance(home, str) and _top(home) == "numpy"


def _is_structure(thing: Any) -> bool:
    """Whether a thing consists of parts that cannot be replaced by others."""
    if isinstance(thing, (tuple, functools.partial)):
        return True
    settings = getattr(type(thing), "__dataclass_params__", None)
    return settings is not None and settings.frozen


def _parts_of(thing: Any) -> list[Any]:
    if isinstance(thing, (tuple, list)):
        return list(thing)
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    return [getattr(thing, field.name) for field in fields(thing)]


def _map_parts(thing: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure, or container, with other parts."""
    if isinstance(thing, dict):
        return type(thing)((key, function(value)) for key, value in thing.items())
    if isinstance(thing, (tuple, list)):
        make: Any = getattr(thing, "_make", type(thing))
        return make(map(function, thing))
    if isinstance(thing, functools.partial):
        named = {name: function(value) for name, value in thing.keywords.items()}
        return functools.partial(function(thing.func), *map(function, thing.args), **named)
    return replace(thing, **{field.name: function(getattr(thing, field.name)) for field in fields(thing)})


def _free(thing: Any) -> tuple[str, ...]:
    return thing.__code__.co_freevars if type(thing) is FunctionType else ()


def _consists_of_attributes(cls: type) -> bool:
    """Whether the objects of a class are what is in their dictionaries."""
    slots = [one.__dict__.get("__slots__", ()) for one in cls.__mro__]
    has_slots = any(
        set([own] if isinstance(own, str) else own) - {"__dict__", "__weakref__"} for own in slots
    )
    module = cls.__module__ + "."
    is_torchs = module.startswith("torch.") and not module.startswith(_PLAIN_MODULES)
    return not (has_slots or is_torchs)


def _has_entries(container: Any, entries: Any) -> bool:
    if isinstance(entries, np.ndarray):
        return container.shape == entries.shape and container.tobytes() == entries.tobytes()
    if len(container) != len(entries):
        return False
    if isinstance(entries, dict):
        return all(container.get(key, container) is value for key, value in entries.items())
    return all(map(_is, container, entries))


def _is(one: Any, other: Any) -> bool:
    return one is other


def _name(function: Any) -> str:
    while isinstance(function, (functools.partial, Bound)):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    return str(getattr(function, "__qualname__", type(function).__qualname__))
