"""Exceptions: what went wrong, where, and the rule that was broken.

The tree::

    TodistError
    ├── NotInitializedError      (RuntimeError)     a call before ``auto_init_rpc``
    ├── InitializationError      (RuntimeError)     the RPC group could not be formed
    ├── SerializationError       (TypeError)        an object cannot cross a process border
    ├── ResidentError            (RuntimeError)     a value ``put`` on workers was changed or freed
    ├── RemoteError                                 a function raised on a worker; also of the raised class
    ├── WorkerLostError          (ConnectionError)  a worker died or cannot be reached
    ├── PeerFailedError          (RuntimeError)     another rank failed, so this one is ended too
    ├── WorkerFailedError        (RuntimeError)     a launched worker ended without an answer: killed, crashed, exited
    ├── AgentFailedError         (RuntimeError)     the process that looks after the launched workers of a host died
    ├── CollectiveError          (ConnectionError)  a message among ranks that run one inner loop failed
    ├── CheckpointError          (RuntimeError)     there are checkpoints or a history, but none that can be loaded
    └── CallTimeoutError         (TimeoutError)     a call outlasted the ``timeout`` that was asked for

A wrong argument is a plain :class:`ValueError` or :class:`TypeError` that names the argument, the rule and
what was got.
"""

from __future__ import annotations

import contextlib
import inspect
from types import MemberDescriptorType
from typing import Any

__all__ = [
    "AgentFailedError",
    "CallTimeoutError",
    "CheckpointError",
    "CollectiveError",
    "InitializationError",
    "NotInitializedError",
    "PeerFailedError",
    "RemoteError",
    "ResidentError",
    "SerializationError",
    "TodistError",
    "WorkerFailedError",
    "WorkerLostError",
]


class TodistError(Exception):
    """Base of every exception that is torchopt_dist's own."""


class NotInitializedError(TodistError, RuntimeError):
    """A distributed call was made outside a function decorated with ``auto_init_rpc``."""


class InitializationError(TodistError, RuntimeError):
    """The RPC group could not be formed: contradictory settings, a missing peer, a taken port."""


class SerializationError(TodistError, TypeError):
    """A function, an argument or a result cannot be sent to another process."""


class ResidentError(TodistError, RuntimeError):
    """A value that ``put`` keeps on workers was changed in place, or used after its handle was closed."""


class RemoteError(TodistError):
    """A function raised on a worker.

    What is raised in the caller is an instance of this class *and* of the class that the worker raised, so
    both ``except todist.RemoteError`` and ``except ValueError`` catch it. Its message and attributes are the
    original's; its cause shows the traceback on the worker.

    Attributes:
        worker: name of the worker that raised, unless the original has an attribute of that name.
        remote_traceback: the traceback on that worker, as text, unless the original has an attribute of that name.
    """

    worker: str = ""
    remote_traceback: str = ""

    @staticmethod
    def revive(
        kind: type[Exception],
        init_args: tuple[Any, ...],
        args: tuple[Any, ...],
        attributes: dict[str, Any],
        worker: str,
        trace: str,
    ) -> Exception:
        """Make an exception that is a ``RemoteError`` and a ``kind``; the class's own ``__init__`` is not called."""
        both = _with_remote_error(kind)
        builtin: Any = builtin_base(both)
        error: Exception = builtin.__new__(both, *init_args)
        with contextlib.suppress(TypeError):
            # It sets the fields that are kept in C, such as the bounds of a UnicodeDecodeError.
            builtin.__init__(error, *init_args)
        BaseException.__setattr__(error, "args", args)
        own = {"worker": worker, "remote_traceback": trace, **attributes}
        for name, value in own.items():
            slot = inspect.getattr_static(both, name, None)
            if isinstance(slot, MemberDescriptorType):
                slot.__set__(error, value)
            else:
                _dict_of(error)[name] = value
        cause = _RemoteTraceback(f"on {worker}:\n\n{trace.rstrip()}")
        BaseException.__setattr__(error, "__cause__", cause)
        return error


def builtin_base(kind: type[BaseException]) -> type[BaseException]:
    """The built-in base class of a ``kind``, which decides its layout in memory."""
    base: Any = kind
    while "_revived" in vars(base) or base.__module__ != "builtins":
        base = base.__base__
    return base


class _RemoteTraceback(Exception):  # noqa: N818 - its name is what a user reads
    """Shows the worker's traceback above the caller's."""


def attributes_of(error: BaseException) -> dict[str, Any]:
    """The attributes of an exception besides its arguments, those in slots included."""
    found = dict(_dict_of(error))
    for base in type(error).__mro__:
        if "__slots__" in vars(base):
            for name, slot in vars(base).items():
                if isinstance(slot, MemberDescriptorType):
                    with contextlib.suppress(AttributeError):  # the slot is empty
                        found[name] = slot.__get__(error)
    return found


def _dict_of(error: BaseException) -> dict[str, Any]:
    """Its ``__dict__``, past a ``__getattribute__`` of its own."""
    found: dict[str, Any] = vars(BaseException)["__dict__"].__get__(error)
    return found


_classes: dict[type[Exception], type[Exception]] = {}


def _with_remote_error(kind: type[Exception]) -> type[Exception]:
    """A class that is a ``RemoteError`` and a ``kind``, or the nearest base of ``kind`` that admits that."""
    if issubclass(kind, RemoteError):
        return kind
    if kind not in _classes:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_revived": kind}
        try:
            both = type(kind.__name__, (RemoteError, kind), names)
        except Exception:  # the class has rules of its own for subclasses
            base: Any = kind.__base__
            both = _with_remote_error(base)
        _classes.setdefault(kind, both)
    return _classes[kind]


class WorkerLostError(TodistError, ConnectionError):
    """A worker died, or the connection to it broke.

    Attributes:
        rank: the worker's rank; -1 if it is unknown.
        worker: its name.
        host: the name of its machine.
        cause: what went wrong first: ``"died"``, its process ended without a report; ``"unreachable"``, its machine
            gives no answer; ``"stopped"``, its process was stopped and did not go on; ``"disconnected"``, a connection
            between two workers broke, and nothing more is known.
    """

    def __init__(
        self, *args: object, rank: int = -1, worker: str = "", host: str = "", cause: str = "disconnected"
    ) -> None:
        super().__init__(*args)
        self.rank, self.worker, self.host, self.cause = rank, worker, host, cause


class PeerFailedError(TodistError, RuntimeError):
    """Another rank failed; the message carries that rank's traceback.

    Attributes:
        rank: the rank that failed first; -1 if it is not known.
        summary: the same in one line: the rank, the error's class and message, and where it was raised.
    """

    rank: int = -1
    summary: str = ""


class WorkerFailedError(TodistError, RuntimeError):
    """A launched worker ended before its function returned: it was killed, it crashed, or it exited.

    Attributes:
        rank: the worker's rank.
        host: its machine, as the launcher names it.
        exit_code: its exit code; ``None`` if a signal ended it.
        signal: the name of the signal that ended it, such as ``"SIGKILL"``, or ``None``.
        log: the last lines that it wrote, standard output and standard error together.
    """

    def __init__(
        self,
        *args: object,
        rank: int = -1,
        host: str = "",
        exit_code: int | None = None,
        signal: str | None = None,
        log: tuple[str, ...] = (),
    ) -> None:
        super().__init__(*args)
        self.rank, self.host, self.exit_code, self.signal, self.log = rank, host, exit_code, signal, log


class AgentFailedError(TodistError, RuntimeError):
    """The process that looks after the launched workers of one host died; its workers are ended."""


class CollectiveError(TodistError, ConnectionError):
    """A message among the ranks that run one loop failed: one of them has died, or has raised an error."""


class CallTimeoutError(TodistError, TimeoutError):
    """A call outlasted its ``timeout``; the message names the function and the worker, whose late answer is dropped."""


class CheckpointError(TodistError, RuntimeError):
    """There are checkpoints or a history, but none that can be loaded; the message names each and says why."""
