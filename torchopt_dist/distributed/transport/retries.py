"""A call whose worker is lost or late → the same call at another worker, or at the caller itself while that waits.

A share is moved as a whole: its tasks stay together, wherever they run, so that sums over them keep their order and all
numbers stay the same. It goes to the worker that has the least to do for this caller. There it computes while other
work waits, since its tasks have exclusive turns (``_random_turns.py``), and draws the numbers that it would have drawn.
If no other worker is left, this process computes it, while its own threads wait for calls.

Only calls are sent again. The graphs of a lost worker are lost, and a backward through one is made again from the call
(``calls/again.py``).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial

from torchopt_dist._future import Future
from torchopt_dist._threads import ThreadPool
from torchopt_dist.distributed.membership.membership import Membership
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.requests import Key
from torchopt_dist.distributed.transport.ask import Ask, Attempt
from torchopt_dist.distributed.transport.base import Sender, Transport, settle
from torchopt_dist.errors import PeerFailedError, RemoteError, WorkerLostError

__all__ = ["Retries"]


class Retries:
    """The calls of this worker that can be sent to another worker, and who works on them.

    ``release`` tells a worker whose answer came too late to forget its graph.
    """

    def __init__(
        self,
        membership: Membership,
        threads: ThreadPool,
        release: Callable[[Sender, int, Key], None],
        transport: Transport,
        new_key: Callable[[], Key],
    ) -> None:
        self._membership = membership
        self._threads = threads
        self._release = release
        self._transport = transport
        self._new_key = new_key
        self._me = membership.me.rank
        self._lock = threading.Lock()
        self._under_way: Counter[int] = Counter()

    def is_lost(self, worker: int) -> bool:
        """Whether that worker has died."""
        return worker in self._membership.failures

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

    def ask(self, ask: Ask) -> Future[Message]:
        """Send a call; the future fails as a transport's does, but not for a worker's loss while retries are left."""
        with self._lock:
            attempt = self._begun(ask)
        if attempt is not None:  # there is somebody to ask, in any case this process
            self._send(ask, attempt)
        if ask.hedge_after is not None:
            timer = threading.Timer(ask.hedge_after, self._hedge, (weakref.ref(ask),))
            timer.daemon = True
            timer.start()
            ask.future.add_done_callback(lambda _: timer.cancel())
        return ask.future

    def _hedge(self, late: weakref.ref[Ask]) -> None:
        ask = late()
        if ask is not None:
            with self._lock:
                attempt = None if ask.answered else self._begun(ask)
            if attempt is not None:
                self._send(ask, attempt)

    def _begun(self, ask: Ask) -> Attempt | None:
        """The next attempt, noted as under way; ``None`` if all that could do it have been asked."""
        attempt = self._next(ask)
        if attempt is not None:
            self._under_way[attempt.worker] += 1
            ask.attempts.append(attempt)
            ask.under_way.append(attempt)
        return attempt

    def _next(self, ask: Ask) -> Attempt | None:
        home, size = ask.home, self._membership.world_size
        tried = {attempt.worker for attempt in ask.attempts}
        if not (home.worker in tried | set(ask.avoided) or home.transport.has_lost(home.worker)):
            return home
        ranks = ((home.worker + distance) % size for distance in range(size))
        left = [rank for rank in ranks if rank not in tried and not self.is_lost(rank) and ask.may_go(rank)]
        left = [rank for rank in left if rank not in ask.avoided] or left
        others = [rank for rank in left if rank != self._me]
        if others:
            worker = min(others, key=self._under_way.__getitem__)
            return Attempt(worker, self._transport.to(worker), self._new_key())
        return Attempt(self._me, ask.beside(), self._new_key()) if left else None

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
        following: Attempt | None = None
        with self._lock:
            self._under_way[attempt.worker] -= 1
            ask.under_way.remove(attempt)
            if ask.answered:
                return
            if not isinstance(result, Message):
                if ask.under_way:
                    return  # another attempt may do better
                if ask.retries and attempt.worker != self._me and self.is_loss(attempt.worker, result):
                    ask.retries -= 1
                    following = self._begun(ask)
            ask.answered = following is None
        if following is not None:
            self._threads.run(partial(self._send, ask, following))
            return
        answered = attempt if isinstance(result, Message) else ask.home
        for each in ask.attempts:
            if each is not answered:
                self._let_go(ask, each)
        if isinstance(result, Message):
            ask.graph.is_at(attempt)
            settle(ask.future, result)
        else:
            ask.future.set_exception(result)

    def _let_go(self, ask: Ask, attempt: Attempt) -> None:
        """Let a worker forget the graph that it has made, or is about to make."""
        here = attempt.worker == self._me  # what is made here goes with its transport
        if ask.graph.kept and not (here or attempt.transport.has_lost(attempt.worker)):
            self._release(attempt.transport, attempt.worker, attempt.key)
