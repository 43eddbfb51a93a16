"""A function and its arguments → bytes → the same on a worker; what it returns or raises → bytes → it, in the launcher.

All by cloudpickle, so that functions and classes of a script or a notebook go and come by value.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import cloudpickle

from torchopt_dist._serialized_exception import SerializedException, safe_repr
from torchopt_dist.errors import RemoteError, SerializationError

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

Task = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def pack(value: object) -> bytes:
    """Pickle a value."""
    return cloudpickle.dumps(value)


def unpack(data: bytes) -> Any:
    """The value that :func:`pack` was given. Classes that are here already are left as they are."""
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    """Leaves classes that are here already as they are.

    A class of ``__main__`` travels by value. When an instance comes back, cloudpickle finds the class that it was made
    from, and would overwrite its methods and attributes with the worker's.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._here = set(getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", ()))

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if (module, name) == ("cloudpickle.cloudpickle", "_class_setstate"):
            return lambda kind, state: kind if kind in self._here else found(kind, state)
        return found


# Tasks.


def pack_task(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a function and its arguments.

    Raises:
        SerializationError: one of them cannot be pickled.
    """
    try:
        return pack((func, args, kwargs))
    except Exception as error:
        parts = {"func": func, **{f"args[{i}]": arg for i, arg in enumerate(args)}, **kwargs}
        for name, part in parts.items():
            try:
                pack(part)
            except Exception as cause:
                raise SerializationError(
                    f"`{name}` must be something that can be pickled, since workers are other processes, got "
                    f"{type(part).__name__} {safe_repr(part):.200}: {type(cause).__name__}: {safe_repr(cause, str)}"
                ) from error
        raise SerializationError(f"the arguments cannot be sent to the workers: {error}") from error


def unpack_task(data: bytes) -> Task:
    """The function and its arguments; what came with them from ``__main__`` is there too from now on.

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
    for name, found in (*_globals_of(loaded), *((kind.__qualname__, kind) for kind in classes)):
        if (
            getattr(found, "__module__", "") == "__main__"
            and found.__qualname__ == name
            and not _is_nested(found)
        ):
            main.setdefault(name, found)


def _globals_of(loaded: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Functions of ``__main__``, and all to which they refer: those that come together share their globals."""
    for part in loaded:
        if isinstance(part, functools.partial):
            yield from _globals_of((part.func, *part.args, *part.keywords.values()))
        elif isinstance(part, FunctionType) and part.__module__ == "__main__":
            yield part.__qualname__, part
            yield from ((n, p) for n, p in part.__globals__.items() if isinstance(p, (FunctionType, type)))


def _is_nested(found: Any) -> bool:
    """Whether it is defined in a function or a class. Of a class, cloudpickle keeps the methods' full names only."""
    methods = [part for part in vars(found).values() if isinstance(part, FunctionType)]
    return "." in found.__qualname__ or any(f".{found.__name__}." in part.__qualname__ for part in methods)


# Values and exceptions.


def pack_value(value: object, rank: int) -> bytes:
    """Pickle what the worker of that rank has returned.

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
    """The value that a worker has packed.

    Raises:
        SerializationError: it cannot be read here.
    """
    try:
        return unpack(data)
    except Exception as error:
        raise SerializationError(
            f"what {worker} returned cannot be read by the launcher: {type(error).__name__}: {safe_repr(error, str)}"
        ) from error


def pack_failure(error: BaseException) -> tuple[str, bytes]:
    """The traceback of what a worker has raised, and that pickled as data."""
    failure = SerializedException.of(error)
    try:
        return failure.traceback, pack(failure)
    except Exception:  # its parts can be sent one by one, and yet not together
        return failure.traceback, b""


def unpack_failure(text: str, data: bytes, worker: str) -> Exception:
    """The exception that a worker has packed, to raise it in the launcher; ``text`` is its traceback there."""
    try:
        failure: SerializedException = pickle.loads(data)
        return failure.to_error(worker)
    except Exception:  # its class is known on the worker only, or does not admit to be made here
        words = (text.strip().rpartition("\n")[2],)
        return SerializedException(RemoteError, words, words, {}, text).to_error(worker)
