"""The interface of a transport: ``worker, Message`` → ``Future[Message]``."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, InvalidStateError
from typing import Protocol

from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._sealed_store import SealedStore

__all__ = ["Sender", "Transport", "settle"]


class Sender(Protocol):
    """Carries a request to a worker, where ``handle_request`` answers it, and the reply back.

    It knows nothing of what it carries.
    """

    def send(self, worker: int, request: Message, timeout: float) -> Future[Message]:
        """Send a request.

        Args:
            worker: the worker's rank.
            request: the message; its tensors are detached.
            timeout: seconds to wait for the reply; 0 means for ever. A reply that comes later is dropped.

        Returns:
            A future of the reply. The future fails with :class:`~torchopt_dist.errors.CallTimeoutError`, or with
            :class:`~torchopt_dist.errors.WorkerLostError` when the worker is gone; then it fails soon.
        """
        ...

    def has_lost(self, worker: int) -> bool:
        """Whether the process is known to be gone to which a request would go."""
        ...


class Transport(Sender, Protocol):
    """The connections of a group's workers. Every implementation passes ``tests/distributed/test_transports.py``."""

    def start(self, store: SealedStore, timeout: float) -> None:
        """Connect with the other workers, whose requests are answered from now on.

        Args:
            store: of this run alone; all workers read and write it.
            timeout: seconds to wait for the others.
        """
        ...

    def stop(self, *, in_order: bool, code: int | None = None) -> None:
        """End all connections and threads, within a bounded time.

        Args:
            in_order: whether all workers stop now, and no request of any of them waits for its reply; otherwise nobody
                is waited for.
            code: of this process's exit, if something keeps the interpreter from ending; ``None``: 0, or 1 if an
                exception that nobody has caught ends the program.

        Raises:
            PeerFailedError: another rank failed while all stopped in order.
            WorkerLostError: a worker died meanwhile.
            TimeoutError: a worker does not take part.
        """
        ...

    def worker_lost(self, worker: int, error: Exception) -> None:
        """Let all requests that wait for a worker fail, since it is gone.

        Args:
            worker: the worker's rank.
            error: how that was found out.
        """
        ...

    def to(self, worker: int) -> Sender:
        """Who sends to the present process of a worker, and never to one that replaces it."""
        ...

    def worker_replaced(self, worker: int, incarnation: int) -> None:
        """Take up a new process of a worker that was lost; it can send requests from now on.

        Args:
            worker: the worker's rank.
            incarnation: how often the rank has been given to a new process.
        """
        ...

    def about_to_wait(self) -> None:
        """Take note that this thread, which may be one that answers a request, waits for other messages from now on."""
        ...

    def unanswered(self) -> int:
        """How many requests of this worker wait for their reply."""
        ...

    def wait_for_replies(self, timeout: float) -> set[int]:
        """Wait until no request waits for its reply.

        Args:
            timeout: seconds to wait at most.

        Returns:
            The workers that have not replied to all.
        """
        ...


def settle(future: Future[Message], result: Message | Exception) -> None:
    """Give the future its result, unless it has one: a worker's loss may be known before its connection breaks."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
