"""The interface of a transport: ``worker, Message`` → ``Future[Message]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torchopt_dist._future import Future
from torchopt_dist._threads import ThreadPool
from torchopt_dist.distributed.membership.members import Member, OnLoss
from torchopt_dist.distributed.membership.membership import Membership
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.rendezvous.sealed_store import SealedStore
from torchopt_dist.errors import WorkerLostError

__all__ = ["Host", "Sender", "Transport", "settle"]


class Host(Protocol):
    """What a transport needs to know of the process that it connects.

    Attributes:
        rank: its rank.
        names: the names of all workers, by rank.
        incarnation: how often its rank has been given to a new process.
        first_number: the first number that it may give to a request.
        call_timeout: the default time-out of calls in seconds; 0 means no limit.
        membership: who is there.
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
    """Carries a request to a worker, where :meth:`Host.answer` answers it, and the reply back.

    It does not interpret the messages.
    """

    def send(self, worker: int, request: Message, timeout: float) -> Future[Message]:
        """Send a request.

        Args:
            worker: the worker's rank.
            request: the message; its tensors are detached.
            timeout: seconds to wait for the reply; 0 means no limit. A reply that comes later is dropped.

        Returns:
            A future of the reply. The future fails with :class:`~torchopt_dist.errors.CallTimeoutError`, or with
            :class:`~torchopt_dist.errors.WorkerLostError` soon after the worker was lost.
        """
        ...

    def has_lost(self, worker: int) -> bool:
        """Whether the process to which a request would go is known to have ended."""
        ...


class Transport(Sender, Protocol):
    """The connections of a group's workers; each implementation is a row of ``test_transports.py``."""

    def start(self, store: SealedStore, timeout: float) -> None:
        """Connect to the other workers, and answer their requests from now on.

        Args:
            store: the store of this run, which all workers read and write.
            timeout: seconds to wait for the others.
        """
        ...

    def stop(self, *, in_order: bool, code: int | None = None) -> None:
        """End all connections and threads, within a bounded time.

        Args:
            in_order: whether all workers stop now and have no open requests; otherwise no worker is waited for.
            code: the exit code, in case something keeps the interpreter from ending; ``None``: 0, or 1 if an uncaught
                exception ends the program.

        Raises:
            PeerFailedError: another rank failed while all stopped in order.
            WorkerLostError: a worker died meanwhile.
            TimeoutError: a worker does not stop in time.
        """
        ...

    def worker_lost(self, worker: int, error: Exception) -> None:
        """Let all requests to a worker fail, since it was lost.

        Args:
            worker: the worker's rank.
            error: the error with which the requests fail.
        """
        ...

    def to(self, worker: int) -> Sender:
        """A sender to the present process of a worker, which never sends to a process that replaces it."""
        ...

    def worker_replaced(self, worker: int, incarnation: int) -> None:
        """Accept a new process of a worker that was lost; it can send requests from now on.

        Args:
            worker: the worker's rank.
            incarnation: how often the rank has been given to a new process.
        """
        ...

    def about_to_wait(self) -> None:
        """Announce that this thread, which may be answering a request, is about to wait for other messages."""
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
    """Set the future's result, unless it has one: a worker's loss may be known before its connection breaks."""
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
