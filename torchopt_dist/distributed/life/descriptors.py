"""A number of files that a group needs → an error if the process cannot open as many, before libraries fail.

Where Gloo, TensorPipe and ZeroMQ cannot open a file, they raise errors of their own, abort the process, or wait.
"""

from __future__ import annotations

import contextlib
import errno
import os

from torchopt_dist.errors import InitializationError

__all__ = ["check_descriptors", "too_many_files"]


def check_descriptors(number: int) -> None:
    """Check that so many files can be opened; raises ``InitializationError`` if not."""
    with contextlib.ExitStack() as opened:
        for count in range(number):
            try:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                raise _error(f"needs at least {number} more, and can have {count}") from error


def too_many_files(error: BaseException) -> InitializationError | None:
    """The error to raise in place of a library's error that no file can be opened; ``None`` for other errors."""
    if isinstance(error, InitializationError) or "too many open files" not in str(error).lower():
        return None
    return _error("could not open all that it needs")


def _error(what: str) -> InitializationError:
    import resource  # which only Unix has, and only there a limit is met

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return InitializationError(
        f"too many open files: this worker {what}, where the limit of open files (`ulimit -n`) is {limit}: raise it"
    )
