"""A function and what it is given → the key by which one program serves all calls that mean the same.

Two calls are the same if all of this is, recursively, and then tensors and numbers are all that may differ:

- a function: its code, its defaults, also those of keyword-only arguments, its attributes, what it closes over, and
  the global names that its code reads, through attributes of the user's modules, too; of a function of an installed
  package not the global names;
- a method, a partial, a function with a cache, a compiled one: what it is made of;
- a tensor: its class, dtype, shape, strides, device and requires_grad; never its values; an array of numpy likewise;
- a module, or another object: its class, and all its attributes: training modes, hooks, parts, numbers;
- a class: itself, and what its methods and attributes are made of, if it is the user's;
- a list, a tuple, a set or a dictionary: its entries in order; another object of Python's or of a package: its class,
  and what it is pickled as;
- a text, a dtype, a boolean: itself; a number: its class. Where the compiler takes no numbers as inputs, as in a class,
  a set, or what is pickled, a number is itself; so is a zero, which often decides;
- which of these are one and the same object, and torch's surroundings: autocast, default dtype, hooks of all modules.

What has no such key is refused by name: :class:`RefusedError`. So is what else is numpy's: the compiler takes a scalar
for a tensor, whose dtype what is computed with it then has.

Torch's compiler looks global names up in the module of a function's name. A function that was sent by value has
another module's name, or none's, so it is replaced by one :class:`Family.at_home`, and the names there are given anew
at each call.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import sys
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator
from threading import RLock
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from torchopt_dist.core.code_names import is_installed, is_numpys, reads, top_package
from torchopt_dist.core.reached import CONTAINERS, is_structure, map_parts, parts_of
from torchopt_dist.core.surroundings import modes
from torchopt_dist.pickling.code_pickler import name_of_op
from torchopt_dist.torch_private import (
    compiler_overlooks,
    hooks_of_all_modules,
    original_of,
    source_of_arrays,
)

__all__ = ["Family", "Meaning", "Record", "RefusedError"]

_ATOMS = frozenset(
    (
        *(bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    )
)
_OF_C = (BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


_REGISTERS = ("_parameters", "_buffers", "_modules")
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


_count = itertools.count()


class RefusedError(Exception):
    """Something has no key."""


class Family:
    """What all functions of one code share: their homes, and the lock under which one of them runs there."""

    def __init__(self) -> None:
        self.lock = RLock()
        self._codes: dict[CodeType, CodeType] = {}
        self._homes: list[ModuleType] = []

    def first(self, code: CodeType) -> CodeType:
        """Of codes that are equal, the one that came first, by which the compiler knows a function."""
        return self._codes.setdefault(code, code)

    def home(self, number: int) -> ModuleType:
        """The module with this number for functions that have none, where the compiler looks."""
        if number == len(self._homes):
            # By a name that no other family ever has: the compiler keeps modules by their names.
            home = ModuleType(f"torchopt_dist_sent_{next(_count)}")
            sys.modules[home.__name__] = home
            weakref.finalize(self, sys.modules.pop, home.__name__, None)
            self._homes.append(home)
        return self._homes[number]


class Record(NamedTuple):
    """What is kept of a meaning."""

    key: tuple[Any, ...]
    places: tuple[str, ...]
    """Where each entry of the key is from."""
    numbers: tuple[tuple[str, float], ...]
    """Those that the key has by class only, and where they are."""
    alive: tuple[Any, ...]
    """What the key knows by identity."""
    alias: str
    """Where a part of a module, or a tensor of it, is in another attribute, too; empty if nowhere."""

    def changed(self, first: Record) -> Iterator[str]:
        """Where numbers are others than in a record with the same key."""
        for own, other in zip(self.numbers, first.numbers, strict=True):
            if own != other:
                yield own[0]

    def differs_at(self, *others: Record) -> str:
        """Where this key, or otherwise a number, first differs from the one that it has most in common with."""

        def common(other: Record) -> int:
            pairs = zip(self.key, other.key, strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        other = max(others, key=common)
        if self.key == other.key:
            return next(self.changed(other), "a number that it reads")
        return self.places[min(common(other), len(self.places) - 1)]


class Meaning:
    """The key of things, and the things at home.

    Args:
        family: that of the function; its lock is held while the meaning is found and used.
        things: functions, arguments, by what a message calls them.
        kind: what else is part of the key, such as how arguments are nested.
        base: a meaning that this one continues, with more things.

    Raises:
        RefusedError: something has no key.
    """

    def __init__(
        self, family: Family, things: Iterable[tuple[str, Any]], kind: Hashable, base: Meaning | None = None
    ) -> None:
        self._base = base
        self._places: list[str] = []
        self._alive: list[Any] = []
        self._numbers: list[tuple[str, float]] = []
        self._key: list[Any] = []
        self._family = family
        self._made: dict[int, tuple[int, Any]] = {} if base is None else dict(base._made)
        self._kept: list[Any] = []
        """What was met, so that no other thing has its identity meanwhile."""
        self._homes: dict[int, tuple[dict[str, Any], ModuleType]] = {}
        self._new: dict[int, dict[str, Any]] = {}
        self._replaced: list[tuple[Any, Any, Any, Any]] = []
        """A container, a key in it, what is there, and what is there at home."""
        self._is_fixed = self._is_attribute = False
        self._parts: set[int] = set()
        """The ids of what modules hold as parameters, buffers and sub-modules."""
        self._attributes: list[tuple[int, str]] = []
        """The ids of modules and tensors that are in other attributes of modules, and where."""
        self._note("how arguments are nested", kind)
        self.things = [self._visit(thing, place) for place, thing in things]
        if base is None:
            for hooks in hooks_of_all_modules():
                self._visit(hooks, "hooks of all modules")
            around = modes()
            self._note("autocast, or torch's default dtype or device", around)
        alias = next((place for one, place in self._attributes if one in self._parts), "")
        key, places, numbers, alive = map(tuple, (self._key, self._places, self._numbers, self._alive))
        self.record = Record(key, places, numbers, alive, alias)
        if base is not None:
            self.things = [*base.things, *self.things]
            self.record = Record(*map(operator.add, base.record, self.record))

    @property
    def moves(self) -> bool:
        """Whether something is to be in the place of another while it runs."""
        return bool(self._homes or self._replaced or (self._base is not None and self._base.moves))

    def move_in(self) -> None:
        """Give the homes the global names of this call, and what was sent has the functions at home in it."""
        if self._base is not None:
            self._base.move_in()
        self._replace(1)
        for sent, home in self._homes.values():
            names = vars(home)
            for name in names.keys() - sent.keys() - {"__name__", "__loader__", "__spec__", "__package__"}:
                del names[name]
            names.update((name, value) for name, value in sent.items() if name != "__name__")
            names.update(self._new[id(sent)])

    def move_out(self) -> None:
        """Give what was sent its own functions back, which need no lock."""
        self._replace(0)
        if self._base is not None:
            self._base.move_out()

    def _replace(self, by: int) -> None:
        for container, key, *both in self._replaced:
            is_cell = isinstance(container, CellType)
            try:
                there = container.cell_contents if is_cell else container[key]
            except (LookupError, ValueError):  # the task has taken it out
                continue
            if there is both[1 - by] and is_cell:
                container.cell_contents = both[by]
            elif there is both[1 - by]:
                container[key] = both[by]

    def _note(self, place: str, what: Any) -> None:
        self._places.append(place)
        self._key.append(what)

    def _note_itself(self, place: str, thing: Any) -> Any:
        self._note(place, (type(thing), id(thing)))
        self._alive.append(thing)
        return thing

    def _visit(self, thing: Any, place: str) -> Any:
        """Note what a thing means; what is to be in its place."""
        kind = type(thing)
        if kind in _ATOMS:
            self._note(place, (kind, thing))
            return thing
        if kind is int or kind is float or kind is complex:
            if self._is_fixed or kind is complex or (kind is float and not (thing and math.isfinite(thing))):
                self._note(place, (kind, repr(thing)))  # by which a zero has a sign, and NaN is itself
            else:
                self._note(place, kind)
                self._numbers.append((place, thing))
            return thing
        if self._is_attribute and isinstance(thing, (Tensor, nn.Module)):
            self._attributes.append((id(thing), place))
        if id(thing) in self._made:
            number, made = self._made[id(thing)]
            self._note(place, ("again", number))
            return made
        self._is(thing, thing)
        self._kept.append(thing)
        if isinstance(thing, Tensor):
            self._note(place, _kind_of_tensor(thing))
        elif kind is np.ndarray and source_of_arrays() is not None:
            self._note(place, (kind, thing.dtype, thing.shape, thing.strides, thing.flags.writeable))
        elif is_numpys(thing):
            _refuse(thing, place, "which the compiler takes for a tensor: give it a number or a tensor")
        elif kind is FunctionType:
            return self._function(thing, place)
        elif kind in CONTAINERS:
            self._note(place, (kind, len(thing)))
            self._entries(thing, place)
        elif isinstance(thing, nn.Module):
            if "forward" in vars(thing) and compiler_overlooks():
                _refuse(
                    thing,
                    place,
                    f"whose own `forward` is ignored by the compiler of torch {torch.__version__}",
                )
            self._visit(kind, place)
            self._note_itself(place, kind.forward)  # also of torch's classes, where somebody may replace it
            if not self._is_attribute:
                self._parts.add(id(thing))
            self._entries(vars(thing), place, is_object=True, is_module=True)
        elif isinstance(thing, (tuple, functools.partial)) or (
            is_structure(thing) and not hasattr(thing, "__dict__")
        ):
            return self._structure(thing, place)
        elif kind is MethodType:
            self._note(place, kind)
            function, own = self._visit(thing.__func__, place), self._visit(thing.__self__, place)
            return self._is(thing, MethodType(function, own) if function is not thing.__func__ else thing)
        elif isinstance(thing, type):
            self._class(thing, place)
        elif isinstance(thing, ModuleType) or _is_of_c(thing) or name_of_op(thing) is not None:
            self._note_itself(place, thing)
            if thing is os:
                self._fixed(os.environ, "os.environ")
        elif isinstance(thing, (set, frozenset)):
            self._note(place, (kind, len(thing)))
            self._fixed(sorted(thing, key=repr), place)
        elif kind is weakref.ReferenceType:  # as a recurrent module has of its weights
            self._note(place, kind)
            self._visit(thing(), place)
        elif type(getattr(thing, "__wrapped__", None)) is FunctionType:  # as `functools.lru_cache` makes it
            self._visit(kind, place)
            self._fixed(thing.__wrapped__, place)
        else:
            self._object(thing, place)
        return thing

    def _is(self, thing: Any, made: Any) -> Any:
        number, _ = self._made.get(id(thing), (len(self._made), None))
        self._made[id(thing)] = number, made
        return made

    def _entries(self, entries: Any, place: str, *, is_object: bool = False, is_module: bool = False) -> None:
        """Note those of a list, a dictionary or an object; a function that was sent is replaced there."""
        before = self._is_attribute
        for key, value in list(entries.items()) if isinstance(entries, dict) else enumerate(entries):
            if is_object and key in _OF_MODULES and (not value or "state_dict" in key):
                continue  # most modules have no hooks, and those of checkpoints do not run here
            where = f"{place}.{key}" if is_object else f"{place}[{key!r}]"
            if isinstance(entries, dict):
                self._fixed(key, place)
            if is_module:
                self._is_attribute = key not in _REGISTERS
                self._parts.update(() if self._is_attribute else map(id, value.values()))
            made = self._visit(value, where)
            if made is not value:
                self._replaced.append((entries, key, value, made))
        self._is_attribute = before

    def _structure(self, thing: Any, place: str) -> Any:
        parts = parts_of(thing)
        names = tuple(thing.keywords) if isinstance(thing, functools.partial) else ()
        self._note(place, (type(thing), len(parts), names))
        if not isinstance(thing, tuple):
            self._visit(type(thing), place)
        made = [self._visit(part, f"{place}[{number}]") for number, part in enumerate(parts)]
        if all(new is part for new, part in zip(made, parts, strict=True)):
            return thing
        left = iter(made)
        return self._is(thing, map_parts(thing, lambda _: next(left)))

    def _fixed(self, thing: Any, place: str) -> None:
        """Note a thing that nothing else can take the place of."""
        before, self._is_fixed = self._is_fixed, True
        self._visit(thing, place)
        self._is_fixed = before

    def _object(self, thing: Any, place: str) -> None:
        """Note the attributes of an object that consists of them; of another one, what it is pickled as."""
        cls = type(thing)
        self._visit(cls, place)
        own = getattr(thing, "__dict__", None)
        if own is not None and _consists_of_attributes(cls):
            self._entries(own, place, is_object=True)
            return
        try:
            made = thing.__reduce_ex__(4)
        except Exception:
            _refuse(thing, place, "which cannot be compared with another one")
        if isinstance(made, str):  # its name in a module
            self._note_itself(place, thing)
            return
        self._kept.append(made)
        first, arguments, *more = made
        state, *items = (*more, None, None, None)[:3]
        self._fixed((first, arguments, state, *(None if one is None else list(one) for one in items)), place)

    def _class(self, cls: type, place: str) -> None:
        self._note_itself(place, cls)
        for one in cls.__mro__:
            if not _is_library(one):
                for name, value in vars(one).items():
                    value = getattr(value, "__func__", getattr(value, "fget", value))
                    if isinstance(value, FunctionType) or not (name.startswith(("__", "_abc_"))):
                        self._fixed(value, f"{one.__name__}.{name}")

    def _function(self, function: FunctionType, place: str) -> Any:
        compiled = original_of(function)
        if compiled is not None:
            self._note(place, "compiled")
            return self._visit(compiled, place)
        code, names = self._family.first(function.__code__), function.__globals__
        self._note(place, (FunctionType, id(code)))
        if function is os.getenv:
            self._fixed(os.environ, "os.environ")
        module = names.get("__name__") or ""
        is_sent = vars(sys.modules.get(module, _NONE)) is not names
        mentioned = reads(code)
        made = function
        if is_sent:
            if mentioned.assigned:
                raise RefusedError(f"{place} assigns the global name `{min(mentioned.assigned)}`")
            if id(names) not in self._homes:
                self._homes[id(names)] = names, self._family.home(len(self._homes))
                self._new[id(names)] = {}
            home = self._homes[id(names)][1]
            made = FunctionType(code, vars(home), function.__name__, None, function.__closure__)
            made.__qualname__, made.__module__ = function.__qualname__, function.__module__
            vars(made).update(vars(function))
            if self._is_fixed:
                known = [
                    name for name in mentioned.variables if name in names and not _is_library(names[name])
                ]
                if known:
                    raise RefusedError(
                        f"{place}, which was sent by value, reads the global name `{min(known)}`"
                    )
        self._is(function, made)
        before, self._is_attribute = self._is_attribute, False  # a copy of a module has the same functions
        was_fixed = self._is_fixed
        for name in ("__kwdefaults__", "__defaults__"):
            self._is_fixed |= name == "__defaults__" and compiler_overlooks()
            new = self._visit(getattr(function, name), f"{place}.{name}")
            if is_sent:
                setattr(made, name, new)
        self._is_fixed = was_fixed
        is_users = is_sent or not is_installed(top_package(module))
        if is_users:
            self._entries(vars(made), place, is_object=True)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # it is empty, as that of a function which calls itself may be
                self._note(name, "empty")
                continue
            new = self._visit(value, f"`{name}`")
            if new is not value:
                self._replaced.append((cell, None, value, new))
        if is_users:
            for name in sorted(mentioned.variables & names.keys()):
                value = names[name]
                new = self._visit(value, f"the global `{name}`")
                if is_sent:
                    self._new[id(names)][name] = new
                if isinstance(value, ModuleType) and not _is_library(value):
                    for attribute in sorted(mentioned.attributes & vars(value).keys()):
                        self._fixed(vars(value)[attribute], f"`{name}.{attribute}`")
        self._is_attribute = before
        return made


_NONE = ModuleType("")


def _kind_of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    kind = (type(tensor), tensor.dtype, tuple(tensor.shape), strides, tensor.device, tensor.layout)
    return (*kind, tensor.requires_grad, tensor.is_conj(), tensor.is_neg())


def _is_of_c(thing: Any) -> bool:
    """Whether a thing is a function that is written in C, and not a method of an object."""
    own = getattr(thing, "__self__", None)
    return isinstance(thing, _OF_C) and (own is None or isinstance(own, (type, ModuleType)))


def _is_library(thing: Any) -> bool:
    if _is_of_c(thing):
        return True
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return isinstance(name, str) and is_installed(top_package(name))


def _consists_of_attributes(cls: type) -> bool:
    """Whether an object of a class is pickled as its dictionary, by no method of its own."""
    plain = all(getattr(cls, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
    return plain and cls.__basicsize__ <= _Plain.__basicsize__ and cls.__itemsize__ == 0


class _Plain:
    """A class whose objects are their attributes."""


def _refuse(thing: Any, place: str, why: str) -> NoReturn:
    if isinstance(thing, ModuleType):
        raise RefusedError(f"{place} is the module {thing.__name__}, {why}")
    cls = thing if isinstance(thing, type) else type(thing)
    raise RefusedError(f"{place} is a {cls.__module__}.{cls.__qualname__}, {why}")
