"""A function and its arguments ⇄ bytes, for a worker; a value or an exception ⇄ bytes, for the launcher.

All of it by cloudpickle, so that functions and classes of a script or a notebook are sent by value.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, TypeVar

import cloudpickle

from torchopt_dist.errors import SerializationError
from torchopt_dist.pickling.code_pickler import dumps
from torchopt_dist.pickling.serialized_exception import SerializedException, safe_repr
from torchopt_dist.pickling.unsendable import find_unsendable
from torchopt_dist.pickling.wrapped_functions import NAMED_BY_PICKLE

__all__ = [
    "pack",
    "pack_failure",
    "pack_task",
    "pack_value",
    "unpack",
    "unpack_failure",
    "unpack_task",
    "unpack_value",
]

OF_SCRIPTS = ("__main__", "__mp_main__")
"""Names of the module that runs as a script: children of ``multiprocessing`` import it under the second one."""
NAMED = (FunctionType, type, TypeVar, *NAMED_BY_PICKLE)
"""The kinds of objects that pickle looks for by name."""

Task = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def pack(value: object) -> bytes:
    """Pickle a value."""
    with _exits_are_errors():
        return dumps(value)


def unpack(data: bytes) -> Any:
    """Unpickle what :func:`pack` has made. Classes that are here already are not overwritten."""
    with _exits_are_errors():
        return _Unpickler(io.BytesIO(data)).load()


@contextlib.contextmanager
def _exits_are_errors() -> Iterator[None]:
    """Raise :class:`RuntimeError` where the objects' own code, which pickling runs, raises what ends a program."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        if _is_of_a_signal(error):
            raise
        raise RuntimeError(f"{type(error).__name__} {safe_repr(error, str)}".rstrip()) from error


def _is_of_a_signal(error: BaseException) -> bool:
    """Whether a signal has raised it: SIGTERM raises the launcher's own class, and Ctrl-C needs no `raise`."""
    if isinstance(error, SystemExit):
        return type(error) is not SystemExit
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] != "RAISE_VARARGS"


class _Unpickler(pickle.Unpickler):
    """Does not overwrite classes that are here already.

    A class of ``__main__`` travels by value. When an instance comes back, cloudpickle finds the class that it was made
    from, and would overwrite its methods and attributes with the worker's.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._here = set(getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", ()))

    def find_class(self, module: str, name: str) -> Any:
        named = super().find_class(module, name)
        if (module, name) == ("cloudpickle.cloudpickle", "_class_setstate"):
            return lambda kind, state: kind if kind in self._here else named(kind, state)
        return named


# Tasks.


def pack_task(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a function and its arguments.

    Raises:
        SerializationError: the function or an argument cannot be pickled.
    """
    try:
        return pack((func, args, kwargs))
    except Exception as error:
        parts = [("func", func), *((f"args[{i}]", arg) for i, arg in enumerate(args)), *kwargs.items()]
        unsendable = find_unsendable(parts, pack)
        if unsendable is not None:
            place, part, why = unsendable
            raise SerializationError(
                f"{place if '`' in place else f'`{place}`'} must be something that can be pickled, since workers are "
                f"other processes, got {type(part).__name__} {safe_repr(part):.200}: {why}"
            ) from error
        raise SerializationError(f"the arguments cannot be sent to the workers: {error}") from error


def unpack_task(data: bytes) -> Task:
    """Unpickle a function and its arguments; what came with them from ``__main__`` is put into ``__main__``.

    Raises:
        SerializationError: they cannot be read here.
    """
    try:
        function, args, kwargs = unpack(data)
    except Exception as error:
        raise SerializationError(
            "the function or its arguments cannot be read on the worker: "
            f"{type(error).__name__}: {safe_repr(error, str)}"
        ) from error
    fill_main((function, *args, *kwargs.values()))
    return function, args, kwargs


def fill_main(loaded: tuple[Any, ...]) -> None:
    """Put classes and functions of the launcher's ``__main__`` into this one, where plain pickle looks for them."""
    main = vars(sys.modules["__main__"])
    classes: Any = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", ())
    for name, value in (*_globals_of(loaded), *((_name(kind), kind) for kind in classes)):
        if getattr(value, "__module__", "") in OF_SCRIPTS and _name(value) == name and not _is_nested(value):
            main.setdefault(name, value)


def _name(value: Any) -> str:
    """The name of a function, a class or a type variable, which has no other."""
    return str(getattr(value, "__qualname__", None) or value.__name__)


def _globals_of(loaded: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The globals of functions of ``__main__``; functions that were pickled together share them."""
    for part in loaded:
        if isinstance(part, functools.partial):
            yield from _globals_of((part.func, *part.args, *part.keywords.values()))
        elif isinstance(part, FunctionType) and part.__module__ in OF_SCRIPTS:
            yield part.__qualname__, part
            yield from ((n, p) for n, p in part.__globals__.items() if isinstance(p, NAMED))


def _is_nested(value: Any) -> bool:
    """Whether it is defined in a function or a class. Of a class, cloudpickle keeps the methods' full names only."""
    methods = [part for part in getattr(value, "__dict__", {}).values() if isinstance(part, FunctionType)]
    return "." in _name(value) or any(f".{value.__name__}." in part.__qualname__ for part in methods)


# Values and exceptions.


def pack_value(value: object, rank: int) -> bytes:
    """Pickle the value that the worker of that rank has returned.

    Raises:
        SerializationError: it cannot be pickled.
    """
    try:
        return pack(value)
    except Exception as error:
        raise SerializationError(
            f"rank {rank} returned {type(value).__name__} {safe_repr(value):.200}, "
            f"which cannot be sent to the launcher: {type(error).__name__}: {safe_repr(error, str)}"
        ) from None


def unpack_value(data: bytes, worker: str) -> Any:
    """Unpickle the value of a worker.

    Raises:
        SerializationError: it cannot be read here.
    """
    try:
        return unpack(data)
    except Exception as error:
        raise SerializationError(
            f"what {worker} returned cannot be read by the launcher: {type(error).__name__}: {safe_repr(error, str)}"
        ) from error


def pack_failure(error: BaseException) -> tuple[SerializedException, bytes]:
    """An exception on a worker as text alone, which can always be read, and as data, pickled."""
    failure = SerializedException.of(error)
    text = SerializedException.told(failure.text, failure.traceback, failure.worker)
    try:
        return text, pack(failure)
    except Exception:  # its parts can be sent one by one, and yet not together
        return text, b""


def unpack_failure(text: SerializedException, data: bytes, worker: str) -> Exception:
    """Unpickle an exception of a worker, to raise it in the launcher; ``text`` is the same as text alone."""
    try:
        failure: SerializedException = unpack(data)
    except Exception:  # its class is known on the worker only
        failure = text
    return failure.to_error(worker)
