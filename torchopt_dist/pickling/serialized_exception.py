"""Exception → data that can travel → an exception of the same class in the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from torchopt_dist.errors import RemoteError, attributes_of, builtin_base
from torchopt_dist.pickling.tracebacks import format_error

__all__ = ["PassedOnError", "SerializedException", "safe_repr"]


def safe_repr(value: Any, by: Callable[[Any], str] = repr) -> str:
    """``by(value)``, or a text that says that ``by(value)`` raises, since that runs the value's own code.

    Args:
        value: any object.
        by: ``repr`` or ``str``.
    """
    try:
        return by(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose {by.__name__} raises {type(error).__name__}>"


@dataclass(frozen=True)
class SerializedException:
    """An exception as data, which can be sent even where the exception itself cannot be pickled.

    Attributes:
        kind: the exception's class, or the nearest base class that can be sent.
        init_args: the arguments of its built-in base class; an ``OSError`` has more of them than its ``args``.
        args: its arguments; here and in ``init_args`` those that cannot be sent are replaced by their ``repr``.
        attributes: its other attributes that can be sent.
        traceback: the traceback on the worker, as text, with the frames of the user's functions.
        worker: the name of the worker that raised it, where another one sends it.
        text: its class and its whole message, for a caller that cannot make an exception of the class.
    """

    kind: type[Exception]
    init_args: tuple[Any, ...]
    args: tuple[Any, ...]
    attributes: dict[str, Any]
    traceback: str
    worker: str = ""
    text: str = ""

    @classmethod
    def of(cls, error: BaseException) -> SerializedException:
        """Describe ``error``."""
        if isinstance(error, PassedOnError):
            return error.exception
        trace = _traceback(error)
        text = f"{type(error).__name__}: {safe_repr(error, str)}"
        if isinstance(error, Exception):  # `sys.exit()` in a function must not end its caller
            try:
                return replace(cls._of(error, trace), text=text)
            except (Exception, SystemExit):  # this runs the exception's own code, which may raise anything
                pass
        return cls.told(text, trace)

    @classmethod
    def told(cls, text: str, trace: str, worker: str = "") -> SerializedException:
        """A plain :class:`RemoteError`, for an exception whose class the caller cannot make.

        Args:
            text: the exception's class and its whole message.
            trace: its traceback on the worker.
            worker: the name of the worker that raised it, where another one sends it.
        """
        return cls(RemoteError, (text,), (text,), {}, trace, worker, text)

    @classmethod
    def _of(cls, error: Exception, text: str) -> SerializedException:
        # An error that came from a third worker is of a class made for it, which knows the original one.
        kinds = vars(type(error)).get("_revived", type(error)).__mro__
        ours = RemoteError.__annotations__ if isinstance(error, RemoteError) else ()
        return cls(
            next(kind for kind in kinds if _can_be_sent(kind)),
            _sendable(builtin_base(type(error)).__reduce__(error)[1]),
            _sendable(error.args),
            {
                name: value
                for name, value in attributes_of(error).items()
                if name not in ours and _can_be_sent(value)
            },
            text,
        )

    def to_error(self, worker: str) -> Exception:
        """The exception to raise in the caller: a :class:`RemoteError` that is also of the worker's class.

        One that cannot be made here, such as that of some C libraries, is a :class:`RemoteError` with the whole text.
        """
        name = self.worker or worker
        try:
            return RemoteError.revive(
                self.kind, self.init_args, self.args, self.attributes, name, self.traceback
            )
        except (Exception, SystemExit):  # the class decides how its exceptions are made
            words = (self.text,)
            return RemoteError.revive(RemoteError, words, words, {}, name, self.traceback)

    def as_text(self) -> SerializedException:
        """The same exception with ``repr`` of each object, for the case that an object is not picklable."""
        if issubclass(self.kind, BaseExceptionGroup):
            words = (safe_repr(self.args),)
            return SerializedException(RemoteError, words, words, {}, self.traceback, self.worker, self.text)
        return replace(self, init_args=_as_text(self.init_args), args=_as_text(self.args), attributes={})


class PassedOnError(Exception):
    """An exception of another worker that this worker passes on to its own caller.

    Args:
        exception: the exception as it was received.
        worker: the name of the worker that sent it.
    """

    def __init__(self, exception: SerializedException, worker: str) -> None:
        super().__init__(f"{exception.kind.__qualname__} on {exception.worker or worker}")
        self.exception = replace(exception, worker=exception.worker or worker)


def _traceback(error: BaseException) -> str:
    try:
        return format_error(error)
    except Exception as other:  # likewise
        return f"{type(error).__name__}, whose traceback cannot be formatted: that raises {type(other).__name__}\n"


def _sendable(args: Any) -> tuple[Any, ...]:
    return tuple(arg if _can_be_sent(arg) else _replaced(arg) for arg in args)


def _replaced(arg: Any) -> Any:
    """The substitute for an ``arg`` that cannot be sent; the exceptions of a group must stay exceptions."""
    if isinstance(arg, (list, tuple)) and arg and all(isinstance(part, Exception) for part in arg):
        return [part if _can_be_sent(part) else RemoteError(safe_repr(part)) for part in arg]
    return safe_repr(arg)


def _as_text(args: tuple[Any, ...]) -> tuple[Any, ...]:
    plain = (str, bytes, int, float, bool, type(None))
    return tuple(arg if type(arg) in plain else safe_repr(arg) for arg in args)


def _can_be_sent(value: Any) -> bool:
    try:
        cloudpickle.loads(cloudpickle.dumps(value))
    except (Exception, SystemExit):  # pickling runs the value's own code, which may raise anything
        return False
    return True
