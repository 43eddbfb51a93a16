"""The interface of a transport: ``worker, Message`` → ``Future[Message]``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

from torchopt_dist.distributed.membership.members import Member, OnLoss
from torchopt_dist.distributed.membership.membership import Membership
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.rendezvous.sealed_store import SealedStore
from torchopt_dist.distributed.transport.pending import Pending
from torchopt_dist.errors import WorkerLostError
from torchopt_dist.process.future import Future
from torchopt_dist.process.threads import ThreadPool

__all__ = ["Host", "Sender", "Transport"]


class Host(Protocol):
    """What a transport needs to know of the process that it connects.

    Attributes:
        names: of all workers, by rank.
        incarnation: how often its rank has been given to a new process.
        first_number: the first number that it may give to a request.
        call_timeout: the default time-out of calls in seconds; 0 means no limit.
        threads: run work that must not wait for a thread.
    """

    rank: int
    names: tuple[str, ...]
    incarnation: int
    first_number: int
    call_timeout: float
    membership: Membership
    threads: ThreadPool

    @property
    def members(self) -> tuple[Member, ...]:
        """The workers, by rank, each with the data of its present process."""

    @property
    def on_loss(self) -> OnLoss:
        """What the group does when a worker is lost."""

    @property
    def lost(self) -> Mapping[int, WorkerLostError]:
        """The ranks that were lost."""

    def answer(self, request: Message) -> Message:
        """The reply to a request that has arrived; an exception of the request is the reply's."""


class Sender(Protocol):
    """Carries a request, uninterpreted, to a worker, where :meth:`Host.answer` answers it, and the reply back."""

    def send(self, worker: int, request: Message, timeout: float) -> Future[Message]:
        """Send a request, whose tensors are detached; a reply after ``timeout`` seconds is dropped, 0 means no limit.

        The future fails with :class:`~torchopt_dist.errors.CallTimeoutError`, or with
        :class:`~torchopt_dist.errors.WorkerLostError` soon after the worker was lost.
        """
        ...

    def has_lost(self, worker: int) -> bool:
        """Whether the process to which a request would go is known to have ended."""
        ...


class Transport(Sender, ABC):
    """The connections of a group's workers; each implementation is a row of ``test_transports.py``."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._pending = Pending()

    @abstractmethod
    def start(self, store: SealedStore, timeout: float) -> None:
        """Connect to the other workers, within ``timeout`` seconds, and answer their requests from now on."""
        ...

    @abstractmethod
    def stop(self, *, in_order: bool, code: int | None = None) -> None:
        """End all connections and threads, within a bounded time; ``in_order`` if all stop now without open requests.

        Only then others are waited for, and it raises ``PeerFailedError``, ``WorkerLostError`` or, if one does not stop
        in time, ``TimeoutError``. For ``code`` see :func:`~torchopt_dist.distributed.transport.shutdown.exit_now`.
        """
        ...

    def worker_lost(self, worker: int, error: Exception) -> None:
        """Let all requests to a worker fail with this error, since it was lost."""
        self._pending.fail(worker, error)

    def has_lost(self, worker: int) -> bool:
        """See :class:`Sender`."""
        return worker in self._host.membership.failures

    @abstractmethod
    def to(self, worker: int) -> Sender:
        """A sender to the present process of a worker, which never sends to a process that replaces it."""
        ...

    @abstractmethod
    def worker_replaced(self, worker: int, incarnation: int) -> None:
        """Accept a new process of a worker that was lost; it can send requests from now on."""
        ...

    def about_to_wait(self) -> None:
        """Announce that this thread, which may be answering a request, is about to wait for other messages."""

    def unanswered(self) -> dict[int, int]:
        """How many requests of this worker wait for a reply, by the worker that owes it."""
        return self._pending.counts()

    def wait_for_replies(self, timeout: float) -> set[int]:
        """Wait at most so many seconds until no request waits for its reply; returns the workers that owe some."""
        return self._pending.wait(timeout)
