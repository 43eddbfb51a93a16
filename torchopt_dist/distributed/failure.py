"""Exception → data that can travel → an exception of the same class in the caller."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from torchopt_dist.errors import RemoteError

__all__ = ["RemoteFailure"]


@dataclass(frozen=True)
class RemoteFailure:
    """An exception as data: it can be sent even where its instance cannot.

    Attributes:
        kind: the exception's class, or the nearest base class that can be sent.
        args: its arguments; those that cannot be sent are replaced by their ``repr``.
        attributes: its other attributes that can be sent.
        traceback: the traceback on the worker, as text, from the first frame of the user's function on.
    """

    kind: type[Exception]
    args: tuple[Any, ...]
    attributes: dict[str, Any]
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteFailure:
        """Describe ``error``."""
        text = "".join(traceback.format_exception(type(error), error, _users_frames(error)))
        if not isinstance(error, Exception):  # `sys.exit()` in a function must not end its caller
            return cls(RemoteError, (f"{type(error).__name__}: {error}",), {}, text)
        kind = next(
            kind for kind in type(error).__mro__ if "_revived" not in vars(kind) and _can_be_sent(kind)
        )
        return cls(
            kind,
            tuple(arg if _can_be_sent(arg) else repr(arg) for arg in error.args),
            {name: value for name, value in vars(error).items() if _can_be_sent(value)},
            text,
        )

    def to_error(self, worker: str) -> Exception:
        """The exception to raise in the caller: a :class:`RemoteError` that is also of the worker's class."""
        return RemoteError.revive(self.kind, self.args, self.attributes, worker, self.traceback)


def _users_frames(error: BaseException) -> Any:
    frames = error.__traceback__
    while (
        frames is not None
        and frames.tb_next is not None
        and frames.tb_frame.f_globals.get("__name__", "").startswith(__package__)
    ):
        frames = frames.tb_next
    return frames


def _can_be_sent(value: Any) -> bool:
    try:
        cloudpickle.loads(cloudpickle.dumps(value))
    except Exception:  # pickling runs the value's own code, which raises what it likes
        return False
    return True
