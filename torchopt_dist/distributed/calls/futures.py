"""``{worker: Future[values]}`` → all the values, or the first error; the future of an asynchronous call.

Such a future is C++ code. Python's garbage collector does not see what it holds: an exception, the frames that this was
raised through, and in these the future again, would be kept for ever, with the tensors of the call. A thread that waits
for it lends its process to other work meanwhile.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch.futures

from torchopt_dist.core.random_turns import lent
from torchopt_dist.distributed.transport.pending import late
from torchopt_dist.errors import TodistError
from torchopt_dist.pickling.tracebacks import from_user_code
from torchopt_dist.process.future import Future, as_completed
from torchopt_dist.torch_private import set_failure

__all__ = ["GRACE_SECONDS", "Awaited", "gather"]


GRACE_SECONDS = 0.1
"""How long the other workers are waited for after a first error or the time-out, so that all errors are reported."""


def gather(
    futures: Mapping[int, Future[list[Any]]],
    names: Sequence[str],
    timeout: float = 0.0,
    started: float = 0.0,
    function: str = "",
) -> dict[int, list[Any]]:
    """Wait for each worker's values, for ``timeout`` seconds (0: no limit) since ``started`` by ``time.monotonic``.

    ``function`` is the name of what was called, for the error.
    Raises the exception of a worker, preferably of this one, with the others' errors in its notes; or
    ``CallTimeoutError`` if a worker has not answered, and none has raised.
    """
    missing: set[Future[list[Any]]] = set()
    with lent():
        if len(futures) > 1 or timeout:
            left = max(0.0, started + timeout - time.monotonic()) if timeout else None
            missing.update(futures.values())
            for future in as_completed(futures.values(), left):
                missing.remove(future)
                if future.exception() is not None:
                    break
            if missing:
                missing.difference_update(as_completed([*missing], GRACE_SECONDS))
        else:
            for future in futures.values():
                future.exception()
    errors: dict[int, BaseException] = {}
    values: dict[int, list[Any]] = {}
    for worker, future in futures.items():
        if missing and not future.done():
            continue
        error = future.exception()
        if error is None:
            values[worker] = future.result()
        elif not any(error is other for other in errors.values()):
            errors[worker] = error  # one that ends the calls of several workers is told once
    if errors:
        # An error of this worker's own share has its frames, which a debugger can enter.
        first = next(
            (each for each in errors if not isinstance(errors[each], TodistError)), next(iter(errors))
        )
        error = errors.pop(first)
        _add_notes(error, errors, names)
        # The frames through which the error was passed on tell a user nothing.
        frames = None if isinstance(error, TodistError) else from_user_code(error.__traceback__)
        raise error.with_traceback(frames)
    if missing:
        where = ", ".join(names[worker] for worker, future in futures.items() if future in missing)
        raise late(function, where, timeout)
    return values


def _add_notes(first: BaseException, others: dict[int, BaseException], names: Sequence[str]) -> None:
    if others:
        lines = "\n".join(
            f"  {getattr(error, 'worker', '') or names[worker]} {type(error).__name__}: "
            f"{getattr(error, 'summary', '') or error}"
            for worker, error in others.items()
        )
        first.add_note(f"{len(others)} more worker{'s' * (len(others) > 1)} failed:\n{lines}")


T = TypeVar("T")


class _Failure:
    """What the future's C++ code holds of an exception: all of it until it is raised, then a way to it.

    ``home`` is the future, which holds the exception from then on.
    """

    def __init__(self, error: Exception, home: Awaited[Any]) -> None:
        self.error: Exception | None = error
        self.home = weakref.ref(home)
        self.text = f"{type(error).__name__}: {error}"


class Awaited(torch.futures.Future[T]):
    """A ``torch.futures.Future``; :func:`torch.futures.wait_all` waits for it without this class, and lends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._failure: _Failure | None = None
        self.error: Exception | None = None

    def wait(self) -> T:
        """Wait for the result, and return it or raise the exception that the call ended with."""
        try:
            if not self.done():
                with lent():
                    super().wait()
            return super().wait()
        finally:
            self._take_over()

    def value(self) -> T:
        """The result that is there, or the exception, raised."""
        try:
            return super().value()
        finally:
            self._take_over()

    def set_exception(self, result: Any) -> None:
        """Set the exception that the call ended with; frames that it was raised through must not hold this future."""
        self._failure = _Failure(result, self)
        set_failure(self, self._failure, _raise, result)

    def _take_over(self) -> None:
        """Hold the exception here, where the garbage collector sees it: it has frames of who waits now."""
        failure = self._failure
        if failure is not None and failure.error is not None:
            self.error, failure.error = failure.error, None


def _raise(failure: _Failure) -> NoReturn:
    error, home = failure.error, failure.home()
    if error is None and home is not None:
        error = home.error
    del home
    try:
        raise error or RuntimeError(f"a call has failed, and this has been raised before: {failure.text}")
    finally:
        del error
