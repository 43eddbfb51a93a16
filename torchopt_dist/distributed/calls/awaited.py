"""The future of an asynchronous call: a thread that waits for it lends its process to other work meanwhile.

Such a future is C++ code. Python's garbage collector does not see what it holds: an exception, the frames that this was
raised through, and in these the future again, would be kept for ever, with the tensors of the call.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, TypeVar

from torch.futures import Future

from torchopt_dist.core.random_turns import lent
from torchopt_dist.torch_private import set_failure

__all__ = ["Awaited"]

T = TypeVar("T")


class _Failure:
    """What the future's C++ code holds of an exception: all of it until it is raised, then a way to it.

    ``home`` is the future, which holds the exception from then on.
    """

    def __init__(self, error: Exception, home: Awaited[Any]) -> None:
        self.error: Exception | None = error
        self.home = weakref.ref(home)
        self.text = f"{type(error).__name__}: {error}"


class Awaited(Future[T]):
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
