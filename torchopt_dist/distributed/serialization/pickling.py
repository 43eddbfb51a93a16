"""An object → a message, and back: a skeleton of bytes beside the tensors and the module structures it mentions.

An object is pickled as a whole, so that what its parts share is pickled once. Tensors are taken out of it, wherever
they are (in a module, a closure, a dictionary), so that a graph can be drawn through them and their memory is not
copied into the pickle. Modules are taken out, too. But if a module shares an object that can change with the rest, such
as a list that its hook fills, everything stays in one pickle. In a message that stays in its process, a module of
plain attributes is a copy beside the pickle, and code is the object itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.requests import Call, Reply
from torchopt_dist.distributed.serialization.names import name_of
from torchopt_dist.distributed.serialization.pickler import OverlapError, PackedModules, Structures, dump
from torchopt_dist.distributed.serialization.plain import MARK, plain_skeleton, rebuilt
from torchopt_dist.distributed.serialization.tensors import Tensors
from torchopt_dist.distributed.serialization.unpickler import Held, Unpickler
from torchopt_dist.errors import SerializationError, TodistError
from torchopt_dist.pickling.serialized_exception import SerializedException
from torchopt_dist.pickling.unsendable import find_unsendable

__all__ = ["PackedModules", "error_reply", "message_of", "pack", "place_of", "reply_of", "unpack"]


def pack(
    value: Any, *, main_by_name: bool, modules: PackedModules | None = None, here: bool = False
) -> Message:
    """Pickle ``value``, with its tensors, and their graph, beside.

    ``main_by_name`` says that the receiver runs the same program, so functions of ``__main__`` go by name, not as code;
    ``modules`` are those packed before, which get more; ``here`` says that the message stays in this process. Raises
    ``SerializationError``, or ``ResidentError`` where a handle's value has been changed in place or freed.
    """
    connects, needs_code = type(value) is Call, False
    if connects and type(function := value.payload.function) is FunctionType:
        needs_code = name_of(function, main_by_name) is None
    tensors = Tensors(main_by_name, connects=connects, here=here)
    structures: Structures = {}
    packed: PackedModules = {} if modules is None else modules
    plain = None if needs_code else plain_skeleton(value, tensors)
    if plain is not None:
        return message_of(plain, tensors)
    try:
        try:
            pickler = dump(value, tensors, structures, packed, needs_code=needs_code)
            pickler.check_disjoint()
        except OverlapError:  # only one pickle keeps what is shared one
            structures = {}
            pickler = dump(value, tensors, None, packed)
            pickler.tensors.mark_buffers(pickler.tensors.all)
    except TodistError:
        raise
    except (Exception, SystemExit) as error:  # the objects' own code is run, which raises what it likes
        raise SerializationError(f"{type(error).__name__}: {error}") from error
    tensors = pickler.tensors
    cut = tensors.keep_apart() if connects else ()
    message = message_of(pickler.file.getvalue(), tensors, structures)
    message.code, message.cut = tensors.of_globals, cut
    if type(value) is Reply and value.exception is not None:
        told = value.exception
        message.told = told.text, told.traceback, told.worker
    return message


def message_of(skeleton: bytes, tensors: Tensors, structures: Iterable[bytes] = ()) -> Message:
    """The message with these parts."""
    structures = tuple(structures)
    if not (tensors.all or structures):
        references, handles = tensors.references, tensors.handles
        return Message(skeleton, [], [], [], references=references, handles=handles)
    return Message(
        skeleton,
        tensors.all,
        [tensor.requires_grad for tensor in tensors.all],
        [isinstance(tensor, nn.Parameter) for tensor in tensors.all],
        structures,
        buffers=frozenset(tensors.buffers),
        references=tensors.references,
        handles=tensors.handles,
    )


def unpack(message: Message, held: Held | None = None) -> Any:
    """Rebuild what :func:`pack` packed, with the message's tensors as they are; for ``held`` see ``HeldLeaves``.

    Raises ``SerializationError`` where a module, function or class does not exist here, and ``ResidentError`` where a
    mirror is not here, or not as it was where it was made.
    """
    try:
        if message.skeleton[:1] == MARK:
            return rebuilt(message.skeleton, message.tensors)
        tensors = message.tensors
        if message.cut:
            tensors = [*tensors]
            for number in message.cut:
                tensors[number] = _leaf(tensors[number])
            message.apart = [tensors[number] for number in message.cut]
        unpickler = Unpickler(message.skeleton, tensors, message.structures, message.references, held)
        value = unpickler.load()
        message.arrived = unpickler.arrived
        return value
    except TodistError:
        raise
    except (Exception, SystemExit) as error:  # the objects' own code is run, which raises what it likes
        raise SerializationError(f"{type(error).__name__}: {error}") from error


def place_of(named: Iterable[tuple[str, Any]], *, main_by_name: bool) -> str:
    """The place of the part that is why something cannot be packed, such as ``"args[0].weight: "``, if one is."""
    found = find_unsendable(named, partial(pack, main_by_name=main_by_name))
    return "" if found is None else f"{found[0]}: "


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
        if message.told is not None:  # its class is known there only
            raise error_of(SerializedException.told(*message.told), worker) from None
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


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    leaf = tensor.detach()
    return nn.Parameter(leaf) if isinstance(tensor, nn.Parameter) else leaf.requires_grad_()
