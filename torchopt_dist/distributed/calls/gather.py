"""``{worker: Future[values]}`` → all the values, or an error as soon as there is one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torchopt_dist.core.random_turns import lent
from torchopt_dist.errors import CallTimeoutError, TodistError
from torchopt_dist.pickling.tracebacks import from_user_code
from torchopt_dist.process.future import Future, as_completed

__all__ = ["GRACE_SECONDS", "gather"]

GRACE_SECONDS = 0.1
"""How long the other workers are waited for after a first error or the time-out, so that all errors are reported."""


def gather(
    futures: Mapping[int, Future[list[Any]]], names: Sequence[str], timeout: float = 0.0, started: float = 0.0
) -> dict[int, list[Any]]:
    """Wait for each worker's values, for ``timeout`` seconds (0: no limit) since ``started`` by ``time.monotonic``.

    Raises the exception of a worker, preferably of this one, with the others' errors in its notes; or
    :class:`CallTimeoutError` if a worker has not answered, and none has raised.
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
        late = ", ".join(names[worker] for worker, future in futures.items() if future in missing)
        raise CallTimeoutError(f"{late} took longer than timeout={timeout:g} s")
    return values


def _add_notes(first: BaseException, others: dict[int, BaseException], names: Sequence[str]) -> None:
    if others:
        lines = "\n".join(
            f"  {getattr(error, 'worker', '') or names[worker]} {type(error).__name__}: "
            f"{getattr(error, 'summary', '') or error}"
            for worker, error in others.items()
        )
        first.add_note(f"{len(others)} more worker{'s' * (len(others) > 1)} failed:\n{lines}")
