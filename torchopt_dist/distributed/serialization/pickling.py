"""An object → a message, and back: a skeleton of bytes beside the tensors and the module structures it mentions.

An object is pickled as a whole, so that what its parts share is pickled once. Tensors are taken out of it, wherever
they are (in a module, a closure, a dictionary), so that a graph can be drawn through them and their memory is not
copied into the pickle; so are large arrays of numpy and long ``bytes``. Modules are taken out, too, so that one that
goes to several workers is pickled once. But if a module shares an object that can change with the rest, such as a list
that its hook fills, everything stays in one pickle.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.distributed import rpc

from torchopt_dist._serialized_exception import SerializedException
from torchopt_dist.distributed.messages.globals_of_code import Beginning, End, GlobalsOfCode, enclosed
from torchopt_dist.distributed.messages.handle import Handle, StayingModule
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.references import ConnectedRRef, carried_by
from torchopt_dist.distributed.messages.requests import Call, Reply
from torchopt_dist.distributed.serialization.long_bytes import Holes, Writer, reader
from torchopt_dist.distributed.serialization.names import find, name_of
from torchopt_dist.distributed.serialization.parametrized import is_parametrized, reduced
from torchopt_dist.distributed.serialization.plain import MARK, plain_skeleton, rebuilt
from torchopt_dist.distributed.serialization.shared_objects import rebinds, some_can_change
from torchopt_dist.distributed.serialization.tensors import Tensors
from torchopt_dist.errors import SerializationError, TodistError

__all__ = ["PackedModules", "error_reply", "message_of", "pack", "raised", "reply_of", "unpack"]

IN_THE_PICKLE = 1 << 16
"""Bytes up to which a numpy array is copied into the pickle; a larger one travels like a tensor."""

_REFERENCES: tuple[type, ...] = (rpc.PyRRef, ConnectedRRef) if rpc.is_available() else ()
"""RPC pickles its references itself, since it counts who has one."""

_APART = b"\1"
"""Begins a skeleton before which the numbers of the tensors are pickled that the receiver keeps apart."""
_RAISED = b"\2"
"""Begins the skeleton of a reply that is an exception, so that who hands it on need not rebuild it to know."""

_ModuleId: TypeAlias = tuple[int, int, tuple[int, ...]]
"""Which module of the message, the number of its structure, the numbers of its tensors."""

_Structures: TypeAlias = dict[bytes, int]
"""The pickles of modules without their tensors, each with its number: modules that look alike have one."""


def pack(
    value: Any, *, main_by_name: bool, modules: PackedModules | None = None, here: bool = False
) -> Message:
    """Pickle ``value``, with its tensors, and their graph, beside.

    ``main_by_name`` says that the receiver runs the same program, so functions of ``__main__`` go by name, not as code;
    ``modules`` are those packed before, which get more; ``here`` says that the message stays in this process. Raises
    ``SerializationError``, or ``ResidentError`` where a handle's value has been changed in place or freed.
    """
    connects = type(value) is Call
    tensors: Tensors = Tensors(main_by_name)
    structures: _Structures = {}
    packed: PackedModules = {} if modules is None else modules
    plain = plain_skeleton(value, tensors, main_by_name)
    if plain is not None:
        return message_of(plain, tensors)
    tensors = Tensors(main_by_name, connects=connects, here=here)
    try:
        try:
            skeleton, holes, pickler = _dump(value, main_by_name, tensors, structures, packed)
            pickler.check_disjoint()
        except _OverlapError:  # only one pickle keeps what is shared one
            tensors, structures = Tensors(main_by_name, connects=connects, here=here), {}
            skeleton, holes, _ = _dump(value, main_by_name, tensors, None, packed)
            tensors.mark_buffers(tensors.all)
    except TodistError:
        raise
    except (Exception, SystemExit) as error:  # the objects' own code is run, which raises what it likes
        raise SerializationError(f"{type(error).__name__}: {error}") from error
    apart = tensors.keep_apart() if connects else ()
    if apart:
        skeleton = _APART + pickle.dumps(apart) + skeleton
    if type(value) is Reply and value.exception is not None:
        skeleton = _RAISED + skeleton
    message = message_of(skeleton, tensors, structures, holes)
    message.code = tensors.of_globals
    return message


def message_of(
    skeleton: bytes, tensors: Tensors, structures: Iterable[bytes] = (), holes: Holes = ()
) -> Message:
    """The message with these parts."""
    structures = tuple(structures)
    if not (tensors.all or structures):
        references, handles = tensors.references, tensors.handles
        return Message(skeleton, [], [], [], holes=holes, references=references, handles=handles)
    return Message(
        skeleton,
        tensors.all,
        [tensor.requires_grad for tensor in tensors.all],
        [isinstance(tensor, nn.Parameter) for tensor in tensors.all],
        structures,
        buffers=frozenset(tensors.buffers),
        holes=holes,
        references=tensors.references,
        handles=tensors.handles,
    )


def unpack(message: Message, held: Callable[..., torch.Tensor] | None = None) -> Any:
    """Rebuild what :func:`pack` packed, with the message's tensors as they are; for ``held`` see ``HeldLeaves``.

    Raises ``SerializationError`` where a module, function or class does not exist here, and ``ResidentError`` where a
    replica is not here, or not as it was where it was made.
    """
    try:
        if message.skeleton[:1] == MARK:
            return rebuilt(message.skeleton, message.tensors)
        skeleton, tensors = message.skeleton, message.tensors
        if skeleton[:1] == _APART:
            skeleton, tensors, message.apart = _kept_apart(skeleton, tensors)
        elif skeleton[:1] == _RAISED:
            skeleton = skeleton[1:]
        file = reader(skeleton, message.holes, tensors)
        unpickler = _Unpickler(file, tensors, message.structures, message.references, held)
        value = unpickler.load()
        message.arrived = unpickler.arrived
        return value
    except TodistError:
        raise
    except (Exception, SystemExit) as error:  # the objects' own code is run, which raises what it likes
        raise SerializationError(f"{type(error).__name__}: {error}") from error


def raised(reply: Message) -> bool:
    """Whether a reply is an exception."""
    return reply.skeleton[:1] == _RAISED


def reply_of(
    message: Message,
    worker: str,
    error_of: Callable[[SerializedException, str], Exception] = SerializedException.to_error,
) -> Reply:
    """The reply of a worker, by its name; raises what ended the request there, as ``error_of`` makes it.

    Raises ``SerializationError`` if the reply cannot be rebuilt here.
    """
    try:
        reply: Reply = unpack(message)
    except SerializationError as error:
        raise SerializationError(f"the result of {worker} cannot be rebuilt here: {error}") from error
    if reply.exception is not None:
        raise error_of(reply.exception, worker)
    return reply


def error_reply(error: BaseException) -> Message:
    """The reply, ready to be sent, that lets the caller raise an error of the function, or of the way to it or back."""
    exception = SerializedException.of(error)
    try:
        return pack(Reply(exception=exception), main_by_name=True).detached()
    except SerializationError:  # the exception holds an object that cannot be sent
        return pack(Reply(exception=exception.as_text()), main_by_name=True).detached()


def _kept_apart(
    skeleton: bytes, tensors: list[torch.Tensor]
) -> tuple[bytes, list[torch.Tensor], list[torch.Tensor]]:
    """The skeleton alone, the tensors with leaves in the places of those to be kept apart, and these leaves."""
    file = io.BytesIO(skeleton[1:])
    numbers: tuple[int, ...] = pickle.load(file)
    tensors = list(tensors)
    for number in numbers:
        leaf = tensors[number].detach()
        is_parameter = isinstance(tensors[number], nn.Parameter)
        tensors[number] = nn.Parameter(leaf) if is_parameter else leaf.requires_grad_()
    return file.read(), tensors, [tensors[number] for number in numbers]


class _NeedsCodeError(Exception):
    """A function or class has no name by which the receiver finds it."""


class _OverlapError(Exception):
    """A module shares a module, or an object that can change, with the rest of the message."""


def _dump(
    value: Any,
    main_by_name: bool,
    tensors: Tensors,
    structures: _Structures | None,
    packed: PackedModules,
    *,
    whole: bool = False,
) -> tuple[bytes, Holes, _OutOfBandPickler]:
    before = tensors.mark()
    number = None if whole else tensors.number
    file = Writer(number)
    pickler: _OutOfBandPickler = _NamePickler(file, main_by_name, tensors, structures, packed)
    try:
        pickler.dump(value)
    except (_NeedsCodeError, pickle.PicklingError, AttributeError, TypeError):
        tensors.forget_since(before)
        file = Writer(number)
        pickler = _CodePickler(file, main_by_name, tensors, structures, packed)
        pickler.dump(value)
        of_globals = tensors.of_globals
        if of_globals is not None and of_globals.matter(tensors.all):
            # What was met in them first may be met elsewhere again, unseen, since the pickler knows it by then.
            others = Tensors(main_by_name, connects=tensors.connects, here=tensors.here)
            again: _Structures | None = None if structures is None else {}
            _CodePickler(Writer(None), main_by_name, others, again, packed, with_globals=False).dump(value)
            apart = others.of_globals.numbers if others.of_globals else ()
            elsewhere = {id(tensor) for number, tensor in enumerate(others.all) if number not in apart}
            of_globals.numbers -= {n for n in of_globals.numbers if id(tensors.all[n]) in elsewhere}
    return *file.pickle(), pickler


class _OutOfBandPickler(pickle.Pickler):
    """Takes tensors and, given a place for them, module structures out of the pickle."""

    # Where a `_CodePickler` keeps, by id, the namespaces of the functions whose code it sends.
    globals_ref: Mapping[int, Any] = {}

    def __init__(
        self,
        file: Writer,
        main_by_name: bool,
        tensors: Tensors,
        structures: _Structures | None,
        packed: PackedModules,
    ) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._main_by_name = main_by_name
        self._tensors = tensors
        self._structures = structures
        self._packed = packed
        self._modules: dict[int, _ModuleId] = {}
        self._families: set[int] = set()
        self._parts: list[_OutOfBandPickler] = []  # kept, so that no id in their memos is used again

    def reducer_override(self, obj: Any) -> Any:
        """Called for all objects but the plainest; ``persistent_id`` would be called for these, too."""
        if isinstance(obj, torch.Tensor):
            staying = self._tensors.staying.get(id(obj))
            return (_tensor, (self._tensors.number(obj),)) if staying is None else (_held, staying)
        if isinstance(obj, StayingModule):
            self._tensors.mark_staying(obj)
            return _itself, (obj.module,)
        if self._structures is not None and isinstance(obj, nn.Module):
            return _module, (self._modules.get(id(obj)) or self._take_out(obj, self._structures))
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
            return _reference, (len(self._tensors.references) - 1, *carried)
        if isinstance(obj, Handle):
            self._tensors.handles.append(obj)
        if type(obj) is OrderedDict and not obj and not vars(obj):
            return OrderedDict, ()  # a module has ten of them, and each takes a while to say so itself
        return NotImplemented

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        try:
            tensor = torch.from_numpy(array)
        except (
            TypeError,
            ValueError,
        ):  # such as strings, objects, dates, and numbers of the other byte order
            return NotImplemented
        self._tensors.buffers.add(self._tensors.number(tensor))
        return _numpy, (tensor,)

    def _take_out(self, module: nn.Module, structures: _Structures) -> _ModuleId:
        family = {id(part) for part in module.modules()}
        if family & self._families:
            raise _OverlapError
        self._families |= family
        staying = frozenset(self._tensors.staying)
        packed = self._packed.get((id(module), self._main_by_name, staying))
        if packed is None:
            # Numbered from 0, so that equal structures are equal bytes.
            own = Tensors(self._main_by_name, here=self._tensors.here)
            own.staying = dict(self._tensors.staying)
            structure, _, pickler = _dump(module, self._main_by_name, own, None, {}, whole=True)
            if own.references:  # a structure is packed once, and a reference must be sent with each message
                raise _OverlapError
            packed = _PackedModule(module, structure, own.all, own.handles, pickler, own.of_globals)
            self._packed[id(module), self._main_by_name, staying] = packed
        self._parts.append(packed.pickler)
        number = structures.setdefault(packed.structure, len(structures))
        numbers = self._tensors.numbers_of(packed.tensors, packed.of_globals)
        self._tensors.mark_buffers(packed.tensors)
        self._tensors.handles += packed.handles
        self._modules[id(module)] = (len(self._modules), number, numbers)
        return self._modules[id(module)]

    def check_disjoint(self) -> None:
        """Raise :class:`_OverlapError` if two of the pickles share an object that can change."""
        if not self._parts:
            return
        met: dict[int, tuple[int, Any]] = self.memo.copy()
        for taken_out in self._modules:
            met.pop(taken_out, None)
        namespaces = set(self.globals_ref)
        for part in self._parts:
            memo: dict[int, tuple[int, Any]] = part.memo.copy()
            if some_can_change([memo[key][1] for key in met.keys() & memo.keys()], self._main_by_name):
                raise _OverlapError
            met.update(memo)
            if namespaces & part.globals_ref.keys() and any(rebinds(obj) for _, obj in met.values()):
                raise _OverlapError
            namespaces |= part.globals_ref.keys()


class _PackedModule(NamedTuple):
    module: nn.Module  # kept, so that its id is not used again
    structure: bytes
    tensors: list[torch.Tensor]
    handles: list[Handle | StayingModule]
    pickler: _OutOfBandPickler
    of_globals: GlobalsOfCode | None


PackedModules: TypeAlias = dict[tuple[int, bool, frozenset[int]], _PackedModule]
"""By id, by whether ``__main__`` goes by name, by what stays: a module that goes to several workers is packed once."""


class _NamePickler(_OutOfBandPickler):
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


class _CodePickler(_OutOfBandPickler, cloudpickle.Pickler):
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
            return _nothing, ()
        taken_out = _OutOfBandPickler.reducer_override(self, obj)
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


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BufferedIOBase,
        tensors: list[torch.Tensor],
        structures: Sequence[bytes],
        references: Sequence[Any] = (),
        held: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        super().__init__(file)
        self.arrived: list[ConnectedRRef] = []
        # What is found is kept in the memo. Nothing there may refer to the unpickler: all that it has rebuilt would be
        # part of a cycle, and its tensors would stay until the garbage collector comes.
        self._found = {
            "_tensor": tensors.__getitem__,
            "_module": _Modules(tensors, structures, held).load,
            "_held": held or _held,
            "_reference": functools.partial(_referred, references, self.arrived),
        }

    def find_class(self, module: str, name: str, /) -> Any:
        if module == __name__ and name in self._found:
            return self._found[name]
        return super().find_class(module, name)


class _Modules:
    """The modules of a message, each rebuilt once."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        structures: Sequence[bytes],
        held: Callable[..., torch.Tensor] | None,
    ) -> None:
        self._held = held
        self._tensors = tensors
        self._structures = structures
        self._modules: dict[int, nn.Module] = {}

    def load(self, which: int, structure: int, numbers: tuple[int, ...]) -> nn.Module:
        if which not in self._modules:
            tensors = [self._tensors[number] for number in numbers]
            file = io.BytesIO(self._structures[structure])
            self._modules[which] = _Unpickler(file, tensors, (), (), self._held).load()
        return self._modules[which]


def _nothing() -> None:
    """In a pickle: nothing."""


def _itself(module: nn.Module) -> nn.Module:
    """In a pickle: the module that another one represents."""
    return module


def _tensor(number: int) -> torch.Tensor:
    """In a pickle: the tensor with this number, which an :class:`_Unpickler` finds."""
    raise NotImplementedError(number)


def _held(*staying: Any) -> torch.Tensor:
    """In a pickle: a leaf on a worker's own tensor, which an :class:`_Unpickler` finds."""
    raise NotImplementedError(staying)


def _reference(number: int, *carried: Any) -> Any:
    """In a pickle: the reference with this number, and what travels with it, which an :class:`_Unpickler` finds."""
    raise NotImplementedError(number, carried)


def _referred(references: Sequence[Any], arrived: list[ConnectedRRef], number: int, *carried: Any) -> Any:
    if not carried:
        return references[number]
    arrived.append(ConnectedRRef(references[number], *carried))
    return arrived[-1]


def _numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """In a pickle: the array on a tensor's memory."""
    return tensor.cpu().numpy()


def _module(which: int, structure: int, numbers: tuple[int, ...]) -> nn.Module:
    """In a pickle: a module, by its structure and the numbers of its tensors, which an :class:`_Unpickler` finds."""
    raise NotImplementedError(which, structure, numbers)
