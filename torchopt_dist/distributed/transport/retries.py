"""A call whose worker is lost or late → the same call at another worker, or at the caller itself while that waits.

A share is moved as a whole: its tasks stay together, wherever they run, so that sums over them keep their order and all
numbers stay the same. It goes to the worker that has the least to do for this caller. There it computes while other
work waits, since its tasks have exclusive turns (``core/random_turns.py``), and draws the numbers that it would have
drawn.
If no other worker is left, this process computes it, while its own threads wait for calls.

Only calls are sent again. The graphs of a lost worker are lost, and a backward through one is made again from the call
(``calls/again.py``).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from torchopt_dist.core.inputs import Seen
from torchopt_dist.distributed.membership.membership import Membership
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.requests import Key
from torchopt_dist.distributed.serialization.wire import SMALL
from torchopt_dist.distributed.transport.base import Sender, Transport
from torchopt_dist.errors import CallTimeoutError, PeerFailedError, RemoteError, WorkerLostError
from torchopt_dist.process.future import Future
from torchopt_dist.process.threads import ThreadPool, when_late

__all__ = ["AsSent", "Ask", "Attempt", "Deadline", "Retries", "Sent"]


class AsSent:
    """A tensor of one of these messages → what is sent of it, every time the same; the messages must live meanwhile.

    For a ``snapshot`` all are copied. Of those that may be sent ``again`` the small ones are copied, and those that a
    module may change; of the others, which are the caller's own, it sees whether they change.
    """

    def __init__(self, messages: Iterable[Message], *, snapshot: bool, again: bool) -> None:
        self._copies: dict[int, Tensor] = {}
        self._own: dict[int, Seen] = {}
        for message in messages if snapshot or again else ():
            for number, tensor in enumerate(message.tensors):
                if id(tensor) in self._copies or id(tensor) in self._own:
                    continue
                if snapshot or number in message.buffers or tensor.nbytes <= SMALL:
                    self._copies[id(tensor)] = tensor.detach().clone()
                else:
                    self._own[id(tensor)] = Seen([tensor.detach()])

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor as it is sent; raises :class:`RuntimeError` if it was changed in place since it was sent first."""
        for seen in self.own([tensor]):
            _check_unchanged(seen)
        return self._copies.get(id(tensor), tensor).detach()

    def own(self, tensors: Iterable[Tensor]) -> list[Seen]:
        """Those of these tensors that are the caller's own, as they were."""
        return [self._own[id(tensor)] for tensor in tensors if id(tensor) in self._own]


def _check_unchanged(sent: Seen) -> None:
    """Raise :class:`RuntimeError` if a tensor that was sent has been changed in place since."""
    if sent.changed():
        raise RuntimeError(
            "the share of a lost worker cannot run again: a tensor that it was sent, of shape "
            f"{tuple(sent.tensors[0].shape)}, has been changed in place since. Run backward before the optimizer's "
            "step, or make the call asynchronous, which copies what it sends"
        )


class Deadline:
    """A time limit of so many seconds from now on; 0: none."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """How many seconds are left; 0: no limit. Raises ``CallTimeoutError`` if none are."""
        if not self._seconds:
            return 0.0
        left = self._until - time.monotonic()
        if left <= 0:
            raise CallTimeoutError(f"no worker has answered within timeout={self._seconds:g} s")
        return left


@dataclass
class Sent:
    """A call that can be sent again.

    Attributes:
        message: as it was sent.
        key: the key in the request; if another one is to be used, or this is ``None``, it is sent beside the request.
        own: those of its tensors that are the caller's own, as they were.
    """

    message: Message
    key: Key | None
    own: Sequence[Seen]

    def again(self, key: Key) -> Message:
        """The request under this key; raises :class:`RuntimeError` if one of ``own`` was changed in place since."""
        for seen in self.own:
            _check_unchanged(seen)
        message = self.message
        tensors = [tensor.detach() for tensor in message.tensors]
        return message.with_tensors(tensors, key=None if key == self.key else key)


class Attempt(NamedTuple):
    """One sending of a call: to a worker, by a transport, under a key that no other sending has."""

    worker: int
    transport: Sender
    key: Key


@dataclass(eq=False)
class Ask:
    """A call that some worker is to answer.

    Attributes:
        home: how it is sent first.
        kept: whether the worker that answers keeps a graph.
        answered_by: called with the attempt that was answered, before the future has the reply.
        retries: how many losses of workers it outlives.
        hedge_after: after how many seconds without an answer another worker is asked as well; ``None``: never.
        beside: makes a transport to this process.
        may_go: whether a survivor of this rank can be asked.
        avoided: workers that are asked only if nobody else is left.
        attempts: all that have been made, of which so many are ``under_way``.
        over: whether no more are made.
    """

    sent: Sent
    home: Attempt
    kept: bool
    answered_by: Callable[[Attempt], object]
    retries: int
    hedge_after: float | None
    deadline: Deadline
    beside: Callable[[], Sender]
    may_go: Callable[[int], bool]
    avoided: Collection[int] = ()
    future: Future[Message] = field(default_factory=Future)
    attempts: list[Attempt] = field(default_factory=list)
    under_way: int = 0
    over: bool = False


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

    def is_loss(self, worker: int, error: BaseException) -> bool:
        """Whether a worker is lost and the group goes on; the same exception raised by a function is not a loss."""
        if not isinstance(error, WorkerLostError) or isinstance(error, RemoteError):
            return False
        try:
            self._membership.check(())
        except (PeerFailedError, WorkerLostError):
            return False
        return self._membership.goes_on_without(worker)

    def ask(self, ask: Ask) -> Future[Message]:
        """Send a call; the future fails as a transport's does, but not for a worker's loss while retries are left."""
        with self._lock:
            attempt = self._begun(ask)
        if attempt is not None:  # there is somebody to ask, in any case this process
            self._send(ask, attempt)
        if ask.hedge_after is not None:
            when_late(ask.future, ask.hedge_after, partial(self._hedge, weakref.ref(ask)))
        return ask.future

    def _hedge(self, late: weakref.ref[Ask]) -> None:
        ask = late()
        if ask is not None:
            with self._lock:
                attempt = None if ask.over else self._begun(ask)
            if attempt is not None:
                self._send(ask, attempt)

    def _begun(self, ask: Ask) -> Attempt | None:
        """The next attempt, noted as under way; ``None`` if all that could do it have been asked."""
        attempt = self._next(ask)
        if attempt is not None:
            self._under_way[attempt.worker] += 1
            ask.attempts.append(attempt)
            ask.under_way += 1
        return attempt

    def _next(self, ask: Ask) -> Attempt | None:
        home, size, failures = ask.home, self._membership.world_size, self._membership.failures
        tried = {attempt.worker for attempt in ask.attempts}
        if not (home.worker in tried | set(ask.avoided) or home.transport.has_lost(home.worker)):
            return home
        ranks = ((home.worker + distance) % size for distance in range(size))
        left = [rank for rank in ranks if rank not in tried and rank not in failures and ask.may_go(rank)]
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
            ask.under_way -= 1
            if ask.over:
                return
            if not isinstance(result, Message):
                if ask.under_way:
                    return  # another attempt may do better
                if ask.retries and attempt.worker != self._me and self.is_loss(attempt.worker, result):
                    ask.retries -= 1
                    following = self._begun(ask)
            ask.over = following is None
        if following is not None:
            self._threads.run(partial(self._send, ask, following))
            return
        answered = attempt if isinstance(result, Message) else ask.home
        for each in ask.attempts:
            if each is not answered:
                self._let_go(ask, each)
        if isinstance(result, Message):
            ask.answered_by(attempt)
            ask.future.set_result(result)
        else:
            ask.future.set_exception(result)

    def _let_go(self, ask: Ask, attempt: Attempt) -> None:
        """Let a worker forget the graph that it has made, or is about to make."""
        here = attempt.worker == self._me  # what is made here goes with its transport
        if ask.kept and not (here or attempt.transport.has_lost(attempt.worker)):
            self._release(attempt.transport, attempt.worker, attempt.key)
