"""A call → one line of the log, at DEBUG: its function, tasks and workers, the bytes each way, the seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from torchopt_dist.core.reached import name_of
from torchopt_dist.distributed.group.group import Group
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.payload import Payload
from torchopt_dist.process.future import Future
from torchopt_dist.process.table import bytes_text, seconds_text

__all__ = ["CallLog", "call_log"]

log = logging.getLogger("torchopt_dist.distributed.calls")


class CallLog:
    """Context manager around a call, made with the number of tasks of each worker; logs one line at its end."""

    def __init__(self, function: Callable[..., Any], tasks: Mapping[int, int], group: Group) -> None:
        self._function = name_of(function)
        self._workers = ", ".join(
            f"{count} on {group.names[worker]}{' (here)' if worker == group.rank else ''}"
            for worker, count in sorted(tasks.items())
        )
        self._sent: list[int] = []
        self._received: list[int] = []

    def watch(self, sent: Message, reply: Future[Message]) -> None:
        """Count the bytes of a request, and of the reply to come."""

        def arrived(done: Future[Message]) -> None:
            if done.exception() is None:
                self._received.append(done.result().nbytes())

        self._sent.append(sent.nbytes())
        reply.add_done_callback(arrived)

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        log.debug(
            "%s: tasks %s; %s out, %s in, %s%s",
            self._function,
            self._workers,
            bytes_text(sum(self._sent)),
            bytes_text(sum(self._received)),
            seconds_text(time.perf_counter() - self._started),
            f"; failed with {kind.__name__}" if kind else "",
        )


def call_log(
    function: Callable[..., Any], payloads: Mapping[int, tuple[Payload, list[int]]], group: Group
) -> CallLog | None:
    """The log of a call, if anybody wants to read of calls."""
    if not log.isEnabledFor(logging.DEBUG):
        return None
    return CallLog(function, {worker: len(indices) for worker, (_, indices) in payloads.items()}, group)
