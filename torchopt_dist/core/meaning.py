"""A function and what it is given → the key by which one program serves all calls that mean the same.

Two calls are the same if all of this is, recursively, and then tensors and numbers are all that may differ:

- a function: its code, its defaults, also those of keyword-only arguments, its attributes, what it closes over, and
  the global names that its code reads, through attributes of the user's modules, too; of a function of an installed
  package not the global names;
- a method, a partial, a function with a cache, a compiled one: what it is made of;
- a tensor: its class, dtype, shape, strides, device and requires_grad; never its values; an array of numpy likewise;
  another thing of numpy's: its value;
- a module, or another object: its class, and all its attributes: training modes, hooks, parts, numbers;
- a class: itself, and what its methods and attributes are made of, if it is the user's;
- a list, a tuple, a set or a dictionary: its entries in order; another object of Python's or of a package: its class,
  and what it is pickled as;
- a text, a dtype, a boolean: itself; a number: its class. Where the compiler takes no numbers as inputs, as in a class,
  a set, or what is pickled, a number is itself; so is a zero, which often decides;
- which of these are one and the same object, and torch's surroundings: autocast, default dtype, hooks of all modules.

What has no such key is refused by name: :class:`RefusedError`.

A program is made by running the function once, with other things in the places of numbers and arrays: for that time
:meth:`Meaning.standing_in` puts them where the function finds those. What the run itself has changed is put back, and
is refused by name, since a program would do it no more.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from torchopt_dist.core.code_names import is_installed, reads, top_package
from torchopt_dist.core.reached import CONTAINERS, is_structure, map_parts, parts_of
from torchopt_dist.core.surroundings import modes
from torchopt_dist.pickling.code_pickler import name_of_op
from torchopt_dist.torch_private import hooks_of_all_modules, original_of

__all__ = ["ChangedError", "Family", "Meaning", "Record", "RefusedError", "kind_of"]

_ATOMS = frozenset(
    (
        *(bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    )
)
_OF_C = (BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


class RefusedError(Exception):
    """Something has no key."""


class ChangedError(RefusedError):
    """Something is not what it was in the call."""


class Family:
    """What all functions of one code share: codes that are equal, and the lock under which programs are made."""

    def __init__(self) -> None:
        self.lock = RLock()
        self._codes: dict[CodeType, CodeType] = {}

    def first(self, code: CodeType) -> CodeType:
        """Of codes that are equal, the one that came first, by which a function is known."""
        return self._codes.setdefault(code, code)


class Record(NamedTuple):
    """What is kept of a meaning."""

    key: tuple[Any, ...]
    places: tuple[str, ...]
    """Where each entry of the key is from."""
    numbers: tuple[tuple[str, float], ...]
    """Those that the key has by class only, and where they are."""
    alive: tuple[Any, ...]
    """What the key knows by identity."""

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
    """The key of things.

    Args:
        family: that of the function; its lock is held meanwhile.
        things: functions, arguments, by what a message calls them.
        base: a meaning that this one continues, with more things.
        in_place_of: a number, of which the key has the class, or an array, and its index among these → what is to be
            in its place while a program is made.

    Raises:
        RefusedError: something has no key.
    """

    def __init__(
        self,
        family: Family,
        things: Iterable[tuple[str, Any]],
        base: Meaning | None = None,
        in_place_of: Callable[[Any, int], Any] | None = None,
    ) -> None:
        self._family, self._base, self._in_place_of = family, base, in_place_of
        self._own = list(things)
        self.number_of: dict[Any, Hashable] = {}
        """Of its key, for those who number keys."""
        self._places: list[str] = []
        self._alive: list[Any] = []
        self._numbers: list[tuple[str, float]] = []
        self._key: list[Any] = []
        self._made: dict[int, tuple[int, Any]] = {} if base is None else dict(base._made)
        self._kept: list[Any] = []
        """What was met, so that no other thing has its identity meanwhile."""
        self.tensors: list[Tensor] = [] if base is None else list(base.tensors)
        """Those that are reached, each once."""
        self.arrays: list[np.ndarray[Any, Any]] = [] if base is None else list(base.arrays)
        self._noted: list[tuple[Any, Any, Any]] = []
        """Containers, a key in each, or none for all of it, and what was there."""
        self._replaced: list[tuple[Any, Any, Any, Any]] = []
        """A container, a key in it, what was there, and what is to be there."""
        self._is_fixed = False
        self.things = [self._visit(thing, place) for place, thing in self._own]
        if base is None:
            for hooks in hooks_of_all_modules():
                self._visit(hooks, "hooks of all modules")
            around = modes()
            self._note("autocast, or torch's default dtype or device", around)
        self.record = Record(*map(tuple, (self._key, self._places, self._numbers, self._alive)))
        if base is not None:
            self.things = [*base.things, *self.things]
            self.record = Record(*map(operator.add, base.record, self.record))
        self.values = tuple(value for _, value in self.record.numbers)

    def anew(self) -> Meaning:
        """The meaning of the same things now."""
        return self._again()

    def _again(self, in_place_of: Callable[[Any, int], Any] | None = None) -> Meaning:
        base = None if self._base is None else self._base._again(in_place_of)
        return Meaning(self._family, self._own, base, in_place_of)

    @contextmanager
    def standing_in(self, in_place_of: Callable[[Any, int], Any]) -> Iterator[Meaning]:
        """A context to run the things in, once, with others in the places of numbers and arrays; these things.

        Raises:
            ChangedError: something is not what it was when this was made.
            RefusedError: at the end, something is not what it was before.
        """
        there = self._again(in_place_of)
        if (now := there.record).key != self.record.key or any(now.changed(self.record)):
            raise ChangedError(f"{now.differs_at(self.record)} has changed since the call")
        parts = [there] if there._base is None else [there._base, there]
        try:
            for part in parts:
                for container, key, _, new in part._replaced:
                    _put(container, key, new)
            yield there
            for part in parts:
                for container, key, old, new in part._replaced:
                    if _there(container, key) is new:
                        _put(container, key, old)
            after = self.anew().record
            noted = [one for part in parts for one in part._noted if isinstance(one[2], Tensor)]
            is_other = any(_there(container, key) is not was for container, key, was in noted)
        finally:
            for part in parts:
                for container, key, was in part._noted:
                    _put(container, key, was)
        if after.key != now.key or any(after.changed(now)):
            raise RefusedError(f"{after.differs_at(now)} changes when it runs, which a program does not do")
        if is_other:
            raise RefusedError(
                "it puts other tensors in the places of some, as in a module: do so in a clone"
            )

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
                if self._in_place_of is not None:
                    number = len(self._numbers) - 1
                    if self._base is not None:
                        number += len(self._base.record.numbers)
                    return self._in_place_of(thing, number)
            return thing
        if id(thing) in self._made:
            number, made = self._made[id(thing)]
            self._note(place, ("again", number))
            return made
        self._is(thing, thing)
        self._kept.append(thing)
        if isinstance(thing, Tensor):
            self._note(place, (*kind_of(thing), thing.requires_grad))
            self.tensors.append(thing)
        elif kind is np.ndarray:
            return self._array(thing, place)
        elif isinstance(thing, np.generic):
            self._note(place, (kind, thing.tobytes()))
        elif kind is FunctionType:
            return self._function(thing, place)
        elif kind in CONTAINERS:
            self._note(place, (kind, len(thing)))
            self._entries(thing, place)
        elif isinstance(thing, nn.Module):
            self._visit(kind, place)
            self._note_itself(place, kind.forward)  # also of torch's classes, where somebody may replace it
            self._entries(vars(thing), place, is_object=True)
        elif isinstance(thing, (tuple, functools.partial)) or (
            is_structure(thing) and not hasattr(thing, "__dict__")
        ):
            return self._structure(thing, place)
        elif kind is MethodType:
            self._note(place, kind)
            function, own = self._visit(thing.__func__, place), self._visit(thing.__self__, place)
            return self._is(thing, thing if own is thing.__self__ else MethodType(function, own))
        elif isinstance(thing, type):
            self._class(thing, place)
        elif isinstance(thing, (ModuleType, np.ufunc)) or _is_of_c(thing) or name_of_op(thing) is not None:
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

    def _array(self, array: np.ndarray[Any, Any], place: str) -> Any:
        kind = (np.ndarray, array.dtype, array.shape, array.strides, array.flags.writeable)
        if self._is_fixed or array.dtype.hasobject:
            self._note(place, (kind, array.tobytes()))
            return array
        self._note(place, kind)
        self.arrays.append(array)
        if self._in_place_of is None:
            return array
        return self._is(array, self._in_place_of(array, len(self.arrays) - 1))

    def _entries(self, entries: Any, place: str, *, is_object: bool = False) -> None:
        """Note those of a list, a dictionary or an object."""
        if self._in_place_of is not None:
            self._noted.append((entries, None, entries.copy()))
        for key, value in list(entries.items()) if isinstance(entries, dict) else enumerate(entries):
            if is_object and key in _OF_MODULES and (not value or "state_dict" in key):
                continue  # most modules have no hooks, and those of checkpoints do not run here
            if isinstance(entries, dict):
                self._fixed(key, place)
            self._replace(entries, key, value, f"{place}.{key}" if is_object else f"{place}[{key!r}]")

    def _replace(self, container: Any, key: Any, value: Any, place: str) -> None:
        """Visit what is in a container, where something else may be in its place."""
        if self._in_place_of is not None and key is not None:
            self._noted.append((container, key, value))
        made = self._visit(value, place)
        if made is not value:
            self._replaced.append((container, key, value, made))

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
        mentioned = reads(code)
        is_users = not is_installed(top_package(names.get("__name__") or ""))
        if is_users and mentioned.assigned:
            raise RefusedError(f"{place} assigns the global name `{min(mentioned.assigned)}`")
        self._replace(function, "__defaults__", function.__defaults__, f"{place}.__defaults__")
        self._visit(function.__kwdefaults__, f"{place}.__kwdefaults__")
        if is_users:
            self._entries(vars(function), place, is_object=True)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # it is empty, as that of a function which calls itself may be
                self._note(name, "empty")
                continue
            self._replace(cell, "cell_contents", value, f"`{name}`")
        if is_users:
            for name in sorted(mentioned.variables & names.keys()):
                value = names[name]
                self._replace(names, name, value, f"the global `{name}`")
                if isinstance(value, ModuleType) and not _is_library(value):
                    for attribute in sorted(mentioned.attributes & vars(value).keys()):
                        self._fixed(vars(value)[attribute], f"`{name}.{attribute}`")
        return function


def _there(container: Any, key: Any) -> Any:
    """What is in a container; nothing, where it has been taken out."""
    try:
        return getattr(container, key) if isinstance(container, (CellType, FunctionType)) else container[key]
    except (LookupError, ValueError):
        return _there


def _put(container: Any, key: Any, value: Any) -> None:
    """Put something into a container, or, without a key, all that was in it."""
    if isinstance(container, (CellType, FunctionType)):
        setattr(container, key, value)
    elif key is not None:
        container[key] = value
    elif isinstance(container, list):
        container[:] = value
    elif container.keys() != value.keys() or any(container[name] is not value[name] for name in value):
        container.clear()
        container.update(value)


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """What a program depends on of a tensor, if it is not differentiated.

    Raises:
        RefusedError: it cannot be asked, as an uninitialized parameter cannot.
    """
    try:
        strides = tensor.stride() if tensor.layout is torch.strided else None
        kind = (type(tensor), tensor.dtype, tensor.shape, strides, tensor.device, tensor.layout)
        return (*kind, tensor.is_conj(), tensor.is_neg())
    except (RuntimeError, ValueError) as error:
        raise RefusedError(str(error)) from error


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
