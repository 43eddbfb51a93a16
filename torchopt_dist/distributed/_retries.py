"""A call whose worker is lost or late → the same call at another worker, or at the caller itself.

A share is moved as a whole: its tasks stay together, wherever they run, so that sums over them keep their order and all
numbers stay the same. A lost share goes to a worker that has no work for this caller, or waits until there is one, and
that worker gets nothing else meanwhile. The caller counts as such a worker while it waits.

But all others may be waiting themselves, perhaps for that very share. So a share that has waited for some time goes to
a worker that has other work. There it is a guest: it computes while the other work waits, since two shares that compute
would draw from one random generator.

Only calls are sent again. The graphs of a lost worker are lost, and a backward through one is made again from the call
(``_again.py``).
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial

from torchopt_dist._random_turns import wait_for_guests
from torchopt_dist.distributed._ask import Ask, Attempt
from torchopt_dist.distributed._future import Future
from torchopt_dist.distributed._graph_releaser import GraphReleaser
from torchopt_dist.distributed._membership import Membership
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._protocol import Key
from torchopt_dist.distributed._thread_pool import ThreadPool
from torchopt_dist.distributed.transport.base import Transport, settle
from torchopt_dist.errors import PeerFailedError, RemoteError, WorkerLostError

__all__ = ["Retries"]

PATIENCE = 5.0
"""How many seconds a share waits for a worker that has no other work."""
SHORT_PATIENCE = 0.05
"""The same, if no other worker can run it."""


class Retries:
    """The calls of this worker that can be sent to another worker, and who works on them.

    Args:
        membership: knows which workers are lost.
        threads: run the shares that the caller takes over, and other long work.
        releaser: tells a worker whose answer came too late to forget its graph.
        transport: the transport to the other workers.
        new_key: makes a key.
    """

    def __init__(
        self,
        membership: Membership,
        threads: ThreadPool,
        releaser: GraphReleaser,
        transport: Transport,
        new_key: Callable[[], Key],
    ) -> None:
        self._new_key = new_key
        self._membership = membership
        self._threads = threads
        self._releaser = releaser
        self._transport = transport
        self._me = membership.me.rank
        self._lock = threading.Lock()
        self._pending: list[Ask] = []
        self._at_work: defaultdict[int, list[Ask | None]] = defaultdict(list)
        self._waiting = 0
        self._idle = 0
        self._alarm_is_set = False
        self._waits = {beside: _Waiting(self, beside) for beside in (False, True)}

    def is_lost(self, worker: int) -> bool:
        """Whether that worker has died."""
        return worker in self._membership.failures

    def ask(self, ask: Ask) -> Future[Message]:
        """Send a call.

        Returns:
            A future of the reply; it fails as a transport's does, but not for the loss of a worker, as long as
            retries are left.
        """
        with self._lock:
            self._wait_for_worker(ask)
        self._assign(ask)
        if ask.hedge_after is not None:
            timer = threading.Timer(ask.hedge_after, self._hedge, (weakref.ref(ask),))
            timer.daemon = True
            timer.start()
            ask.future.add_done_callback(lambda _: timer.cancel())
        return ask.future

    def is_loss(self, worker: int, error: BaseException) -> bool:
        """Whether a worker is lost and the group goes on; the same exception raised by a function is not a loss."""
        if not isinstance(error, WorkerLostError) or isinstance(error, RemoteError):
            return False
        try:
            self._membership.check(())
        except (PeerFailedError, WorkerLostError):
            return False
        return self.goes_on_without(worker)

    def goes_on_without(self, worker: int) -> bool:
        """Whether the group goes on if that worker is lost."""
        return self._membership.goes_on_without(worker)

    def waiting(self, *, beside: bool = False) -> AbstractContextManager[None]:
        """A context in which this thread only waits, so that this process can run shares of lost workers.

        Args:
            beside: whether this is a thread beside the caller's, which may go on, draw random numbers, and meet those
                of the share; then this process does only what no other worker can do.
        """
        return self._waits[beside]

    def _count_waiting(self, beside: bool, step: int) -> bool:
        """Note that a thread begins to wait, or ends; returns whether there are requests without a worker."""
        with self._lock:
            self._waiting += step
            self._idle += 0 if beside else step
            return bool(self._pending)

    def own_share(self) -> AbstractContextManager[None]:
        """A context in which this process has a share of its own to run."""
        return self.busy((self._me,))

    @contextlib.contextmanager
    def busy(self, workers: Collection[int]) -> Iterator[None]:
        """A context in which workers have shares of their own to run, so that they get none of lost workers."""
        with self._lock:
            for worker in workers:
                self._at_work[worker].append(None)
        try:
            yield
        finally:
            with self._lock:
                for worker in workers:
                    self._at_work[worker].remove(None)
            self._assign()

    def _hedge(self, late: weakref.ref[Ask]) -> None:
        ask = late()
        if ask is None:
            return
        with self._lock:
            ask.elsewhere = True
            if not (ask.answered or ask in self._pending):
                self._wait_for_worker(ask)
        self._assign()

    def _wait_for_worker(self, ask: Ask) -> None:
        ask.since = time.monotonic()
        self._pending.append(ask)

    def _assign(self, new: Ask | None = None) -> None:
        """Assign waiting requests to free workers; ``new`` is sent in this thread."""
        while True:
            with self._lock:
                self._pending = [ask for ask in self._pending if not ask.answered]
                pairs = ((ask, self._free_worker(ask)) for ask in self._pending)
                ask, worker = next((pair for pair in pairs if pair[1] is not None), (None, None))
                if ask is None or worker is None:
                    self._set_alarm()
                    return
                attempt = self._attempt(ask, worker)
                self._pending.remove(ask)
                self._at_work[worker].append(ask)
                ask.attempts.append(attempt)
                ask.under_way.append(attempt)
                ask.elsewhere = True
            if ask is new or worker == self._me:
                self._send(ask, attempt)
            else:
                self._threads.run(partial(self._send, ask, attempt))

    def _attempt(self, ask: Ask, worker: int) -> Attempt:
        home = ask.home
        if worker == home.worker and not (ask.elsewhere or home.transport.has_lost(worker)):
            return home
        transport = ask.beside() if worker == self._me else self._transport.to(worker)
        return Attempt(worker, transport, self._new_key())

    def _free_worker(self, ask: Ask) -> int | None:
        """Who is to do it now; what is not where it was first to be goes to a worker that has nothing else to do."""
        home = ask.home.worker
        if not (ask.elsewhere or ask.home.transport.has_lost(home)):
            moved = any(other is not None and other.is_strange(home) for other in self._at_work[home])
            if not moved:
                return home
        others = self._others(ask)
        for rank in others:
            if not self._at_work[rank]:
                return rank
        if (self._idle or (self._waiting and not others)) and not self._at_work[self._me]:
            return self._me
        if self._patience(ask) > 0.0 or ask.under_way:
            return None
        return min(others or [self._me], key=lambda rank: len(self._at_work[rank]))

    def _patience(self, ask: Ask) -> float:
        """For how many seconds more it waits for a worker that has nothing else to do."""
        return ask.since + (PATIENCE if self._others(ask) else SHORT_PATIENCE) - time.monotonic()

    def _others(self, ask: Ask) -> list[int]:
        """Who else could do it; several lost workers' requests go to different ones."""
        size = self._membership.world_size
        ranks = ((ask.home.worker + distance) % size for distance in range(size))
        return [rank for rank in ranks if self._may_have(ask, rank)]

    def _set_alarm(self) -> None:
        """See to it that no request waits for ever for a worker that has nothing else to do."""
        patience = [self._patience(ask) for ask in self._pending if not ask.under_way]
        if patience and not self._alarm_is_set:
            self._alarm_is_set = True
            timer = threading.Timer(min(max(SHORT_PATIENCE, min(patience)), 1.0), self._alarm)
            timer.daemon = True
            timer.start()

    def _alarm(self) -> None:
        with self._lock:
            self._alarm_is_set = False
        self._assign()

    def _may_have(self, ask: Ask, rank: int) -> bool:
        return not (rank == self._me or self.is_lost(rank) or ask.has_tried(rank)) and ask.may_go(rank)

    def _send(self, ask: Ask, attempt: Attempt) -> None:
        try:
            message = ask.sent.again(attempt.key)
            reply = attempt.transport.send(attempt.worker, message, ask.deadline.left())
        except Exception as error:
            self._ended(ask, attempt, error)
            return
        reply.add_done_callback(partial(self._arrived, ask, attempt))

    def _arrived(self, ask: Ask, attempt: Attempt, reply: Future[Message]) -> None:
        error = reply.exception()
        self._ended(ask, attempt, reply.result() if error is None else error)

    def _ended(self, ask: Ask, attempt: Attempt, result: Message | BaseException) -> None:
        """Record the result of an attempt."""
        settled = False
        with self._lock:
            self._at_work[attempt.worker].remove(ask)
            ask.under_way.remove(attempt)
            if ask.answered:
                pass
            elif isinstance(result, Message):
                settled = True
            elif ask.under_way or ask in self._pending:
                pass  # another attempt may do better
            elif attempt.worker != self._me and ask.retries and self.is_loss(attempt.worker, result):
                ask.retries -= 1
                self._wait_for_worker(ask)
            else:
                settled = True
            ask.answered |= settled
        if settled:
            answered = attempt if isinstance(result, Message) else ask.home
            for each in ask.attempts:
                if each is not answered:
                    self._let_go(ask, each)
            if isinstance(result, Message):
                ask.graph.is_at(attempt)
                settle(ask.future, result)
            else:
                ask.future.set_exception(result)
        self._assign()

    def _let_go(self, ask: Ask, attempt: Attempt) -> None:
        """Let a worker forget the graph that it has made, or is about to make."""
        here = attempt.worker == self._me  # what is made here goes with its transport
        if ask.graph.kept and not (here or attempt.transport.has_lost(attempt.worker)):
            self._releaser.release(attempt.transport, attempt.worker, attempt.key)


class _Waiting(AbstractContextManager[None]):
    """See :meth:`Retries.waiting`; a generator instead would run twice the Python code in each call."""

    def __init__(self, retries: Retries, beside: bool) -> None:
        self._retries = retries
        self._beside = beside

    def __enter__(self) -> None:
        if self._retries._count_waiting(self._beside, 1):
            try:
                self._retries._assign()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        self._retries._count_waiting(self._beside, -1)
        if not self._beside:
            wait_for_guests()
