"""An object → its skeleton, a pickle without the tensors and the module structures that it mentions.

Tensors are taken out of the pickle wherever they are, and so are large arrays of numpy. Modules are taken out, too, so
that one that goes to several workers is pickled once.
"""

from __future__ import annotations

import dis
import gc
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.distributed import rpc

from torchopt_dist.distributed.messages.references import ConnectedRRef, Handle, StayingModule, carried_by
from torchopt_dist.distributed.serialization import unpickler
from torchopt_dist.distributed.serialization.names import find, is_parametrized, name_of, reduced
from torchopt_dist.distributed.serialization.tensors import Tensors
from torchopt_dist.nn._module_copy import ModuleCopy
from torchopt_dist.pickling.code_pickler import CodePickler, name_of_op, op_of_torch
from torchopt_dist.pickling.wrapped_functions import NAMED_BY_PICKLE

__all__ = ["OverlapError", "PackedModules", "Pickler", "Structures", "dump"]

IN_THE_PICKLE = 1 << 16
"""Bytes up to which a numpy array is copied into the pickle; a larger one travels like a tensor."""
MUCH = 1 << 12
"""Parts of a global variable, or characters in it, from which on it is not looked through."""

_REFERENCES: tuple[type, ...] = (rpc.PyRRef, ConnectedRRef) if rpc.is_available() else ()
"""RPC pickles its references itself, since it counts who has one."""

_STAND_INS = frozenset(
    function
    for module in (unpickler, cloudpickle.cloudpickle)
    for function in vars(module).values()
    if isinstance(function, FunctionType) and function.__module__ == module.__name__
)
"""Functions that stand in a pickle for something else, which each receiver has by name."""

Structures: TypeAlias = dict[bytes, int]
"""The pickles of modules without their tensors, each with its number: modules that look alike have one."""


class _NeedsCodeError(Exception):
    """A function or class has no name by which the receiver finds it."""


class OverlapError(Exception):
    """A module shares a module, or an object that can change, with the rest of the message."""


def dump(
    value: Any,
    like: Tensors,
    structures: Structures | None,
    packed: PackedModules,
    *,
    needs_code: bool = False,
) -> Pickler:
    """Pickle an object; returns the pickler, which has the skeleton and the tensors, numbered anew.

    ``structures`` get those of the object; without them modules are not taken out. ``needs_code``: the object is known
    to hold a function without a name.
    """
    pickler: Pickler
    if not needs_code:
        pickler = _NamePickler(like, structures, packed)
        try:
            pickler.dump(value)
            return pickler
        except (_NeedsCodeError, pickle.PicklingError, AttributeError, TypeError):
            pass  # what it has written is freed before the other one begins
    pickler = _CodePickler(like, structures, packed)
    pickler.dump(value)
    return pickler


class Pickler(pickle.Pickler):
    """Takes tensors and, given a place for them, module structures out of the pickle.

    Attributes:
        file: what has been written.
        tensors: those of the object, and what else is beside the pickle.
    """

    # Where a `_CodePickler` keeps, by id, the namespaces of the functions whose code it sends.
    globals_ref: Mapping[int, Any] = {}

    def __init__(self, like: Tensors, structures: Structures | None, packed: PackedModules) -> None:
        self.tensors = like.empty()
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=pickle.HIGHEST_PROTOCOL)
        self._main_by_name = like.main_by_name
        self._structures = structures
        self._packed = packed
        self._taken_out: set[int] = set()  # the ids of the modules, and of the modules inside them
        self._parts: list[Pickler] = []  # kept, so that no id in their memos is used again
        self._copies: list[dict[int, Any]] = []  # by the ids of what was copied

    def reducer_override(self, obj: Any) -> Any:
        """Called once for each object but the plainest; ``persistent_id`` would be called for these, too."""
        if type(obj) is OrderedDict:  # a module has ten empty ones, and each takes a while to say so itself
            return NotImplemented if obj or vars(obj) else (OrderedDict, ())
        if isinstance(obj, torch.Tensor):
            staying = self.tensors.staying.get(id(obj))
            if staying is not None:
                return unpickler.held, staying
            return unpickler.tensor, (self.tensors.number(self.tensors.as_sent(obj)),)
        if isinstance(obj, StayingModule):
            self.tensors.mark_staying(obj)
            return unpickler.itself, (obj.module,)
        if self._structures is not None and isinstance(obj, nn.Module):
            return self._take_out(obj, self._structures)
        if (
            type(obj) is np.ndarray
            and obj.nbytes > IN_THE_PICKLE
            and obj.flags.c_contiguous
            and obj.flags.writeable
        ):
            return self._array(obj)
        if is_parametrized(obj):
            return reduced(obj)
        if (op := name_of_op(obj)) is not None:
            return op_of_torch, (op,)
        if isinstance(obj, _REFERENCES):
            carried = carried_by(obj) if self.tensors.connects else ()
            self.tensors.references.append(obj.rref if isinstance(obj, ConnectedRRef) else obj)
            return unpickler.reference, (len(self.tensors.references) - 1, *carried)
        if isinstance(obj, Handle):
            self.tensors.handles.append(obj)
        return NotImplemented

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        try:
            tensor = torch.from_numpy(array)
        except (TypeError, ValueError):  # such as texts, objects, dates, and numbers of the other byte order
            return NotImplemented
        self.tensors.buffers.add(self.tensors.number(tensor))
        return unpickler.array, (tensor,)

    def _take_out(self, module: nn.Module, structures: Structures) -> tuple[Any, tuple[Any, ...]]:
        """Pack a module by itself, unless it was; what stands for it: the numbers of its structure and its tensors."""
        family = {id(part) for part in module.modules()}
        if family & self._taken_out:
            raise OverlapError
        self._taken_out |= family
        staying = frozenset(self.tensors.staying)
        key = id(module), self._main_by_name, staying
        pickler = self._packed.get(key)
        if pickler is None and self.tensors.here and not staying:
            copy = ModuleCopy(module, _itself, _itself)
            if copy.is_simple:
                return unpickler.copied, self._copied(copy)
        if pickler is None:
            # Numbered from 0, so that equal structures are equal bytes.
            like = Tensors(self._main_by_name, here=self.tensors.here)
            like.staying = self.tensors.staying
            like.module = module
            pickler = dump(module, like, None, {})
            if (
                pickler.tensors.references
            ):  # these must be sent with each message, and a structure is packed once
                raise OverlapError
            self._packed[key] = pickler
        self._parts.append(pickler)
        structure = pickler.file.getvalue()
        number = structures.setdefault(structure, len(structures))
        return unpickler.module, (number, self.tensors.include(pickler.tensors))

    def _copied(self, copy: ModuleCopy) -> tuple[int, tuple[int, ...]]:
        """Take in a copied module, which stays in this process; its number, and those of its tensors."""
        self._copies.append(copy.memo)
        held, places = copy.places()
        numbers = tuple(map(self.tensors.number, held))
        self.tensors.mark_buffers(held)
        self.tensors.references.append(unpickler.CopiedModule(copy.module, places))
        return len(self.tensors.references) - 1, numbers

    def check_disjoint(self) -> None:
        """Raise :class:`OverlapError` if two of the pickles share an object that can change."""
        if not self._parts and not self._copies:
            return
        met: dict[int, Any] = {key: obj for key, (_, obj) in self.memo.copy().items()}
        for taken_out in self._taken_out:
            met.pop(taken_out, None)
        for copies in self._copies:
            self._meet(met, copies)
        namespaces = set(self.globals_ref)
        for part in self._parts:
            self._meet(met, {key: obj for key, (_, obj) in part.memo.copy().items()})
            if namespaces & part.globals_ref.keys() and any(map(_rebinds, met.values())):
                raise OverlapError
            namespaces |= part.globals_ref.keys()

    def _meet(self, met: dict[int, Any], more: dict[int, Any]) -> None:
        """Add objects by id to those that have been met, if none that can change is among both."""
        if _some_can_change([met[key] for key in met.keys() & more.keys()], self._main_by_name):
            raise OverlapError
        met.update(more)


# Objects that two pickles share: if one can change, all must be in one pickle.


def _some_can_change(shared: Iterable[Any], main_by_name: bool) -> bool:
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


def _rebinds(obj: Any) -> bool:
    """Whether ``obj`` is a function that assigns to a global variable."""
    return isinstance(obj, FunctionType) and dis.opmap["STORE_GLOBAL"] in obj.__code__.co_code[::2]


PackedModules: TypeAlias = dict[tuple[int, bool, frozenset[int]], Pickler]
"""By id, by whether ``__main__`` goes by name, by what stays: a module that goes to several workers is packed once.

A pickler refers to all that it has met, so the ids stay those of the modules.
"""


class _NamePickler(Pickler):
    """The fast pickler: sends functions and classes by name; objects without a name need the other pickler."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is OrderedDict:
            return Pickler.reducer_override(self, obj)
        if isinstance(obj, type):
            if obj.__module__ == "__main__" and not self._main_by_name:
                raise _NeedsCodeError
        elif type(obj) in NAMED_BY_PICKLE:
            if obj.__module__ == "__main__" and not _is_of_main(obj, self._main_by_name):
                raise _NeedsCodeError
        elif isinstance(obj, FunctionType):
            if obj in _STAND_INS:
                return NotImplemented
            name = name_of(obj, self._main_by_name)
            if name is None:
                raise _NeedsCodeError
            if name[2]:
                return find, name
            return NotImplemented
        return super().reducer_override(obj)


class _CodePickler(Pickler, CodePickler):
    """Sends the code of functions and classes that have no name on the receiver.

    The global variables of such a function that may hold tensors come after all else, so a tensor that is new there is
    met in global variables alone. The others come with it: objects may be rebuilt by the function.
    """

    def __init__(self, like: Tensors, structures: Structures | None, packed: PackedModules) -> None:
        super().__init__(like, structures, packed)
        self._later: list[tuple[FunctionType, dict[str, Any]]] = []

    def dump(self, obj: Any, /) -> None:
        """Write the object, and then the global variables."""
        super().dump(obj)
        if not self._later:
            return
        code, began = self.tensors.globals_of_code(), self.file.tell()
        code.inside = True
        while self._later:  # these variables may hold other functions
            later, self._later = self._later, []
            super().dump(later)
        code.inside = False
        code.pickled = self.file.tell() - began

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is FunctionType and obj in _STAND_INS:
            return NotImplemented
        if isinstance(obj, (FunctionType, type)):
            name = name_of(obj, self._main_by_name)
            if name is not None and (name[2] or name[0] == "__main__"):
                return find, name
        elif type(obj) is CodeType and self.tensors.here and self._structures is not None:
            # It stays in this process, where nobody can change it.
            self.tensors.references.append(obj)
            return unpickler.reference, (len(self.tensors.references) - 1,)
        taken_out = Pickler.reducer_override(self, obj)
        if taken_out is not NotImplemented:
            return taken_out
        reduced = CodePickler.reducer_override(self, obj)
        if isinstance(obj, FunctionType) and reduced is not NotImplemented:
            slots = reduced[2][1]
            variables = slots.get("__globals__", {})
            later = {name: each for name, each in variables.items() if self._may_hold_tensors(each)}
            if later:
                slots["__globals__"] = {name: variables[name] for name in variables if name not in later}
                self.tensors.globals_of_code().variables.update(later)
                self._later.append((obj, later))
        return reduced

    def _may_hold_tensors(self, value: Any) -> bool:
        """Whether a tensor is in it, or too much to look through."""
        seen: dict[int, Any] = {}
        waiting, left = [value], MUCH
        while waiting:
            part = waiting.pop()
            if id(part) in seen or isinstance(part, (ModuleType, CodeType)):
                continue
            seen[id(part)] = part
            if isinstance(part, (FunctionType, type)) and name_of(part, self._main_by_name) is not None:
                continue
            left -= len(part) if type(part) in (str, bytes) else 1
            if left < 0 or isinstance(part, (torch.Tensor, np.ndarray)):
                return True
            own = part.__globals__ if isinstance(part, FunctionType) else None
            waiting += [each for each in gc.get_referents(part) if each is not own]
        return False

    def is_found_by_name(self, obj: Any) -> bool:
        """See :class:`CodePickler`."""
        return _is_of_main(obj, self._main_by_name) or super().is_found_by_name(obj)


def _is_of_main(obj: Any, main_by_name: bool) -> bool:
    """Whether the receiver's ``__main__`` has an object under its name."""
    name = getattr(obj, "__qualname__", None) or obj.__name__
    here = getattr(sys.modules.get("__main__"), name, None)
    return main_by_name and obj.__module__ == "__main__" and here is obj


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
