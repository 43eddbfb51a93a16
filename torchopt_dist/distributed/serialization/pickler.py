"""An object → its skeleton, a pickle without the tensors and the module structures that it mentions.

Tensors are taken out of the pickle wherever they are, and so are large arrays of numpy and long ``bytes``. Modules are
taken out, too, so that one that goes to several workers is pickled once.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.distributed import rpc

from torchopt_dist.distributed.messages.globals_of_code import Beginning, End, GlobalsOfCode, enclosed
from torchopt_dist.distributed.messages.handle import Handle, StayingModule
from torchopt_dist.distributed.messages.references import ConnectedRRef, carried_by
from torchopt_dist.distributed.serialization import unpickler
from torchopt_dist.distributed.serialization.long_bytes import Holes, Writer
from torchopt_dist.distributed.serialization.names import find, name_of
from torchopt_dist.distributed.serialization.parametrized import is_parametrized, reduced
from torchopt_dist.distributed.serialization.shared_objects import rebinds, some_can_change
from torchopt_dist.distributed.serialization.tensors import Tensors

__all__ = ["OverlapError", "PackedModules", "Pickler", "Structures", "dump"]

IN_THE_PICKLE = 1 << 16
"""Bytes up to which a numpy array is copied into the pickle; a larger one travels like a tensor."""

_REFERENCES: tuple[type, ...] = (rpc.PyRRef, ConnectedRRef) if rpc.is_available() else ()
"""RPC pickles its references itself, since it counts who has one."""

Structures: TypeAlias = dict[bytes, int]
"""The pickles of modules without their tensors, each with its number: modules that look alike have one."""


class _NeedsCodeError(Exception):
    """A function or class has no name by which the receiver finds it."""


class OverlapError(Exception):
    """A module shares a module, or an object that can change, with the rest of the message."""


def dump(
    value: Any,
    tensors: Tensors,
    structures: Structures | None,
    packed: PackedModules,
    *,
    whole: bool = False,
) -> tuple[bytes, Holes, Pickler]:
    """Pickle an object: the skeleton, where long bytes are left out of it, and the pickler, which knows its parts.

    ``tensors`` and ``structures`` get those of the object; without ``structures`` modules are not taken out, and in a
    ``whole`` pickle all long bytes stay.
    """
    before = tensors.mark()
    number = None if whole else tensors.number
    file = Writer(number)
    pickler: Pickler = _NamePickler(file, tensors, structures, packed)
    try:
        pickler.dump(value)
    except (_NeedsCodeError, pickle.PicklingError, AttributeError, TypeError):
        tensors.forget_since(before)
        file = Writer(number)
        pickler = _CodePickler(file, tensors, structures, packed)
        pickler.dump(value)
        of_globals = tensors.of_globals
        if of_globals is not None and of_globals.matter(tensors.all):
            # What was met in them first may be met elsewhere again, unseen, since the pickler knows it by then.
            others = tensors.like()
            again: Structures | None = None if structures is None else {}
            _CodePickler(Writer(None), others, again, packed, with_globals=False).dump(value)
            apart = others.of_globals.numbers if others.of_globals else ()
            elsewhere = {id(tensor) for number, tensor in enumerate(others.all) if number not in apart}
            of_globals.numbers -= {n for n in of_globals.numbers if id(tensors.all[n]) in elsewhere}
    return *file.pickle(), pickler


class Pickler(pickle.Pickler):
    """Takes tensors and, given a place for them, module structures out of the pickle."""

    # Where a `_CodePickler` keeps, by id, the namespaces of the functions whose code it sends.
    globals_ref: Mapping[int, Any] = {}

    def __init__(
        self, file: Writer, tensors: Tensors, structures: Structures | None, packed: PackedModules
    ) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._main_by_name = tensors.main_by_name
        self._tensors = tensors
        self._structures = structures
        self._packed = packed
        self._taken_out: set[int] = set()  # the ids of the modules, and of the modules inside them
        self._parts: list[Pickler] = []  # kept, so that no id in their memos is used again

    def reducer_override(self, obj: Any) -> Any:
        """Called once for each object but the plainest; ``persistent_id`` would be called for these, too."""
        if isinstance(obj, torch.Tensor):
            staying = self._tensors.staying.get(id(obj))
            if staying is not None:
                return unpickler.held, staying
            return unpickler.tensor, (self._tensors.number(obj),)
        if isinstance(obj, StayingModule):
            self._tensors.mark_staying(obj)
            return unpickler.itself, (obj.module,)
        if self._structures is not None and isinstance(obj, nn.Module):
            return unpickler.module, self._take_out(obj, self._structures)
        if (
            type(obj) is np.ndarray
            and obj.nbytes > IN_THE_PICKLE
            and obj.flags.c_contiguous
            and obj.flags.writeable
        ):
            return self._array(obj)
        if is_parametrized(obj):
            return reduced(obj)
        if isinstance(obj, _REFERENCES):
            carried = carried_by(obj) if self._tensors.connects else ()
            self._tensors.references.append(obj.rref if isinstance(obj, ConnectedRRef) else obj)
            return unpickler.reference, (len(self._tensors.references) - 1, *carried)
        if isinstance(obj, Handle):
            self._tensors.handles.append(obj)
        if type(obj) is OrderedDict and not obj and not vars(obj):
            return OrderedDict, ()  # a module has ten of them, and each takes a while to say so itself
        return NotImplemented

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        try:
            tensor = torch.from_numpy(array)
        except (TypeError, ValueError):  # such as texts, objects, dates, and numbers of the other byte order
            return NotImplemented
        self._tensors.buffers.add(self._tensors.number(tensor))
        return unpickler.array, (tensor,)

    def _take_out(self, module: nn.Module, structures: Structures) -> tuple[int, tuple[int, ...]]:
        """Pack a module by itself, unless it was; the numbers of its structure and of its tensors."""
        family = {id(part) for part in module.modules()}
        if family & self._taken_out:
            raise OverlapError
        self._taken_out |= family
        staying = frozenset(self._tensors.staying)
        key = id(module), self._main_by_name, staying
        packed = self._packed.get(key)
        if packed is None:
            # Numbered from 0, so that equal structures are equal bytes.
            own = Tensors(self._main_by_name, here=self._tensors.here)
            own.staying = dict(self._tensors.staying)
            structure, _, pickler = dump(module, own, None, {}, whole=True)
            if own.references:  # a structure is packed once, and a reference must be sent with each message
                raise OverlapError
            packed = _PackedModule(module, structure, own.all, own.handles, pickler, own.of_globals)
            self._packed[key] = packed
        self._parts.append(packed.pickler)
        number = structures.setdefault(packed.structure, len(structures))
        numbers = self._tensors.numbers_of(packed.tensors, packed.of_globals)
        self._tensors.mark_buffers(packed.tensors)
        self._tensors.handles += packed.handles
        return number, numbers

    def check_disjoint(self) -> None:
        """Raise :class:`OverlapError` if two of the pickles share an object that can change."""
        if not self._parts:
            return
        met: dict[int, tuple[int, Any]] = self.memo.copy()
        for taken_out in self._taken_out:
            met.pop(taken_out, None)
        namespaces = set(self.globals_ref)
        for part in self._parts:
            memo: dict[int, tuple[int, Any]] = part.memo.copy()
            if some_can_change([memo[key][1] for key in met.keys() & memo.keys()], self._main_by_name):
                raise OverlapError
            met.update(memo)
            if namespaces & part.globals_ref.keys() and any(rebinds(obj) for _, obj in met.values()):
                raise OverlapError
            namespaces |= part.globals_ref.keys()


class _PackedModule(NamedTuple):
    module: nn.Module  # kept, so that its id is not used again
    structure: bytes
    tensors: list[torch.Tensor]
    handles: list[Handle | StayingModule]
    pickler: Pickler
    of_globals: GlobalsOfCode | None


PackedModules: TypeAlias = dict[tuple[int, bool, frozenset[int]], _PackedModule]
"""By id, by whether ``__main__`` goes by name, by what stays: a module that goes to several workers is packed once."""


class _NamePickler(Pickler):
    """The fast pickler: sends functions and classes by name; objects without a name need the other pickler."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            if obj.__module__ == "__main__" and not self._main_by_name:
                raise _NeedsCodeError
        elif isinstance(obj, FunctionType):
            name = name_of(obj, self._main_by_name)
            if name is None:
                raise _NeedsCodeError
            if name[2]:
                return find, name
            return NotImplemented
        return super().reducer_override(obj)


class _CodePickler(Pickler, cloudpickle.Pickler):
    """Sends the code of functions and classes that have no name on the receiver."""

    def __init__(self, file: Writer, *args: Any, with_globals: bool = True) -> None:
        super().__init__(file, *args)
        self._file = file
        self._with_globals = with_globals

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (FunctionType, type)):
            name = name_of(obj, self._main_by_name)
            if name is not None and (name[2] or name[0] == "__main__"):
                return find, name
        elif type(obj) is Beginning:
            self._tensors.globals_of_code().begin(obj.variables, self._file.length)
            return enclosed, (obj.variables, End())
        elif type(obj) is End:
            self._tensors.globals_of_code().end(self._file.length)
            return unpickler.nothing, ()
        taken_out = Pickler.reducer_override(self, obj)
        if taken_out is not NotImplemented:
            return taken_out
        reduced = cloudpickle.Pickler.reducer_override(self, obj)
        if isinstance(obj, FunctionType) and reduced is not NotImplemented:
            slots = reduced[2][1]
            if not self._with_globals:
                slots["__globals__"] = {}
            elif slots["__globals__"]:
                slots["__globals__"] = Beginning(slots["__globals__"])
        return reduced
