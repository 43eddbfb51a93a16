"""A forked process → a worker: what it is before its function, what it makes of that, and how it ends.

There are two kinds of workers, those of ``worker.py`` and those of ``elastic/worker.py``. Here is what both do.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NoReturn, TypeVar

import cloudpickle
import setproctitle

from torchopt_dist._serialized_exception import SerializedException, safe_repr
from torchopt_dist.errors import SerializationError
from torchopt_dist.launch.messages import unpack

__all__ = ["asked_to_exit", "describe", "leave", "read_task", "read_value", "settle", "write_value"]

T = TypeVar("T")
Task = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def settle(rank: int) -> None:
    """Do what a fresh process does when it starts, or imports its libraries, and a forked one must do itself.

    Args:
        rank: the worker's.
    """
    program = " ".join(str(part) for part in sys.argv).encode("utf-8", "backslashreplace").decode()
    setproctitle.setproctitle(f"todist: rank {rank} of {os.environ['WORLD_SIZE']}: {program}")
    importlib.import_module("torch").set_num_threads(_threads())
    importlib.import_module("numpy.random").seed()


def _threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) else len(os.sched_getaffinity(0))


def read_task(task: T, read: Callable[[T], Task]) -> Task:
    """The function and its arguments; what came with them from ``__main__`` is there too from now on.

    Args:
        task: these, packed.
        read: unpacks them.

    Raises:
        SerializationError: that cannot be done here.
    """
    try:
        function, args, kwargs = read(task)
    except Exception as error:
        raise SerializationError(
            "the function or its arguments cannot be read on the worker: "
            f"{type(error).__name__}: {safe_repr(error, str)}"
        ) from error
    _fill_main((function, *args, *kwargs.values()))
    return function, args, kwargs


def _fill_main(loaded: tuple[Any, ...]) -> None:
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


def write_value(value: object, rank: int, write: Callable[[object], T]) -> T:
    """What a worker has returned, packed.

    Args:
        value: that.
        rank: the worker's.
        write: packs it.

    Raises:
        SerializationError: that cannot be done.
    """
    try:
        return write(value)
    except Exception as error:
        raise SerializationError(
            f"rank {rank} returned {type(value).__name__} {safe_repr(value):.200}, "
            f"which cannot be sent to the launcher: {type(error).__name__}: {safe_repr(error, str)}"
        ) from None


def read_value(packed: int, who: str) -> Any:
    """The value again, on the launcher.

    Args:
        packed: its file, which is closed.
        who: returned it.

    Raises:
        SerializationError: it cannot be read here.
    """
    try:
        return unpack(packed)
    except Exception as error:
        raise SerializationError(
            f"what {who} returned cannot be read by the launcher: {type(error).__name__}: {safe_repr(error, str)}"
        ) from error


def describe(error: BaseException) -> tuple[str, bytes]:
    """The traceback of what a worker has raised, and that as pickled data."""
    failure = SerializedException.of(error)
    try:
        return failure.traceback, cloudpickle.dumps(failure)
    except Exception:  # its parts can be sent one by one, and yet not together
        return failure.traceback, b""


def asked_to_exit(error: BaseException) -> int | None:
    """The status that ``sys.exit`` asks for, as the system makes it; a text is written first, as Python does it.

    Args:
        error: what the function raised.

    Returns:
        A number from 0 to 255, or ``None`` if it was not ``sys.exit``.
    """
    if not isinstance(error, SystemExit):
        return None
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    with contextlib.suppress(Exception):
        print(error.code, file=sys.stderr, flush=True)
    return 1


def leave(code: int) -> NoReturn:
    """The end of an interpreter, without going back through the frames of the process that was forked."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
