"""``{worker: Future[values]}`` → all the values, or an error as soon as there is one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from torchopt_dist._tracebacks import from_user_code
from torchopt_dist.errors import TodistError

__all__ = ["gather"]

GRACE_SECONDS = 0.1
"""How long the other workers are waited for after a first error, so that all errors of one cause are reported."""


def gather(futures: Mapping[int, Future[list[Any]]]) -> dict[int, list[Any]]:
    """Wait for each worker's values.

    Raises:
        Exception: what a worker raised, this one rather than another, with the others' errors in its notes.
    """
    if len(futures) > 1:
        _, missing = wait(futures.values(), return_when=FIRST_EXCEPTION)
        if missing:
            wait(missing, timeout=GRACE_SECONDS)
    else:
        for future in futures.values():  # to wait for one future so costs less
            future.exception()
    errors = {
        worker: error for worker, future in futures.items() if future.done() and (error := future.exception())
    }
    if errors:
        # An error of this worker's own share has its frames, which a debugger can enter.
        first = next(
            (each for each in errors if not isinstance(errors[each], TodistError)), next(iter(errors))
        )
        error = errors.pop(first)
        _add_notes(error, errors)
        # The frames through which the error was passed on tell a user nothing.
        frames = None if isinstance(error, TodistError) else from_user_code(error.__traceback__)
        raise error.with_traceback(frames)
    return {worker: future.result() for worker, future in futures.items()}


def _add_notes(first: BaseException, others: dict[int, BaseException]) -> None:
    if others:
        lines = "\n".join(
            f"  {getattr(error, 'worker', '') or f'rank {worker}'} {type(error).__name__}: {error}"
            for worker, error in others.items()
        )
        first.add_note(f"{len(others)} more worker{'s' * (len(others) > 1)} failed:\n{lines}")
