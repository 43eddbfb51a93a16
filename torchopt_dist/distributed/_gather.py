"""``{worker: Future[values]}`` → all the values, or an error as soon as there is one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

__all__ = ["gather"]

GRACE_SECONDS = 0.1
"""How long the other workers are waited for after a first error, so that all errors of one cause are reported."""


def gather(futures: Mapping[int, Future[list[Any]]]) -> dict[int, list[Any]]:
    """Wait for each worker's values.

    Raises:
        Exception: what the first worker that failed raised, with the other workers' errors in its notes.
    """
    if len(futures) > 1:
        _, missing = wait(futures.values(), return_when=FIRST_EXCEPTION)
        if missing:
            wait(missing, timeout=GRACE_SECONDS)
    else:
        for future in futures.values():  # to wait for one future so costs less
            future.exception()
    errors = [error for future in futures.values() if future.done() and (error := future.exception())]
    if errors:
        # The frames through which the error was passed on tell a user nothing.
        raise _with_notes(errors[0], errors[1:]).with_traceback(None)
    return {worker: future.result() for worker, future in futures.items()}


def _with_notes(first: BaseException, others: list[BaseException]) -> BaseException:
    if others:
        lines = "\n".join(
            f"  {getattr(error, 'worker', '')} {type(error).__name__}: {error}" for error in others
        )
        first.add_note(f"{len(others)} more worker{'s' * (len(others) > 1)} failed:\n{lines}")
    return first
