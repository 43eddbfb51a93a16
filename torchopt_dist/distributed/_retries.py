"""A request whose worker is lost, or late → the same request at another worker, and in the end at the caller itself.

A share is what travels: its tasks stay together, wherever they run, so that sums over them keep their order, and every
number is what it would have been. Two shares that run in one process at a time would draw from one random generator,
and each of their threads would number the nodes of its graphs in its own way, which decides the order of sums. So a
worker has one request of these at a time, and what is lost goes to one that has none, or waits until there is one. The
caller is one, too, while it waits itself.

What a worker keeps is gone with it. So a request to a graph is kept with those that have made the graph: where the
graph is not, all of them are made again, one after another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from torchopt_dist._torch_private import tensor_version
from torchopt_dist.distributed._graph_releaser import GraphReleaser
from torchopt_dist.distributed._membership import Membership
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._payload import ExecutionOptions
from torchopt_dist.distributed._protocol import Key, Reply
from torchopt_dist.distributed._serialization import unpack
from torchopt_dist.distributed._thread_pool import ThreadPool
from torchopt_dist.distributed._wire_format import SMALL
from torchopt_dist.distributed.transport.base import Sender, settle
from torchopt_dist.errors import CallTimeoutError, PeerFailedError, RemoteError, WorkerLostError

__all__ = ["Ask", "Retries", "Sent"]


@dataclass
class Sent:
    """A request that can be sent again.

    Attributes:
        message: the request; small tensors, and those that a module may change, are copies.
        versions: of the other tensors, which are the caller's own: how often each had been changed in place.
        connected: the tensors of its reply that belong to the graph which the worker keeps; ``None`` until it is there.
    """

    message: Message
    versions: dict[int, int | None]
    connected: tuple[int, ...] | None = None

    @classmethod
    def of(cls, message: Message) -> Sent:
        """Keep a request."""
        kept, versions = message.detached(), {}
        for number, tensor in enumerate(kept.tensors):
            if number in message.buffers or tensor.numel() * tensor.element_size() <= SMALL:
                kept.tensors[number] = tensor.clone()
            elif not tensor.is_inference():
                versions[number] = tensor_version(tensor)
        return cls(kept, versions)

    def again(self) -> Message:
        """The request, to be sent.

        Raises:
            RuntimeError: a tensor of the caller has been changed in place since.
        """
        tensors: list[Tensor] = []
        for number, tensor in enumerate(self.message.tensors):
            version = self.versions.get(number)
            if number in self.versions and version != tensor_version(tensor):
                raise RuntimeError(
                    "the share of a lost worker cannot run again: of the tensors that it was sent, number "
                    f"{number}, of shape {tuple(tensor.shape)}, has been changed in place since. Run backward before "
                    "the optimizer's step, or make the call asynchronous, which copies what it sends"
                )
            tensors.append(tensor.detach() if number in self.versions else tensor.clone())
        return replace(self.message, tensors=tensors)


class Graph(Protocol):
    """What is known here of a graph that a worker keeps."""

    key: Key
    worker: int

    def moved(self, worker: int, transport: Sender) -> None:
        """Note that another worker keeps it."""


@dataclass(eq=False)
class Ask:
    """A request that is to be answered, by whom ever.

    Attributes:
        requests: those that make the graph it goes to, and at last the request itself.
        graphs: the graphs that are where the answer comes from; the first is at the worker that is asked first.
        transport: to that worker.
        tried: the workers that must not be asked again; one set for all graphs that a call has led to, so that no
            worker has two of one key.
        seconds: how long all of it may take; 0: for ever.
        options: say how often it may be lost and be asked again, and when another worker is asked as well.
        resident: whether the first worker has the graph, and so is waited for.
        movable: whether another worker can be asked.
        beside: makes a transport to this process.
        may_go: whether a survivor of this rank can be asked.
        future: of the reply.
        under_way: the workers that are at it.
        elsewhere: whether another worker than the first is to be asked.
        answered: whether the future has its result.
    """

    requests: list[Sent]
    graphs: Sequence[Graph]
    transport: Sender
    tried: set[int]
    seconds: float
    options: ExecutionOptions
    resident: bool
    movable: bool
    beside: Callable[[], Sender]
    may_go: Callable[[int], bool]
    future: Future[Message] = field(default_factory=Future)
    under_way: set[int] = field(default_factory=set)
    elsewhere: bool = False
    answered: bool = False

    def __post_init__(self) -> None:
        self.retries = self.options.retries
        self.started = time.monotonic()
        self.first = self.graphs[0].worker

    def seconds_left(self) -> float:
        """How long a worker may take; 0 means for ever."""
        if not self.seconds:
            return 0.0
        left = self.started + self.seconds - time.monotonic()
        if left <= 0:
            raise CallTimeoutError(f"no worker has answered within timeout={self.seconds:g} s")
        return left


class Retries:
    """Who does what of this worker's calls that outlive the loss of a worker.

    Args:
        membership: says who is lost.
        threads: run what the caller does for another worker, and what may take a while.
        releaser: tells a worker whose answer came too late to forget its graph.
        transport: to the other workers.
    """

    def __init__(
        self, membership: Membership, threads: ThreadPool, releaser: GraphReleaser, transport: Sender
    ) -> None:
        self._membership = membership
        self._threads = threads
        self._releaser = releaser
        self._transport = transport
        self._me = membership.me.rank
        self._lock = threading.Lock()
        self._pending: list[Ask] = []
        self._at_work: defaultdict[int, list[Ask | None]] = defaultdict(list)
        self._waiting = 0

    def is_lost(self, worker: int) -> bool:
        """Whether that worker has died."""
        return worker in self._membership.failures

    def ask(self, ask: Ask) -> Future[Message]:
        """Send a request.

        Returns:
            A future of the reply; it fails as a transport's does, but not for the loss of a worker, as long as
            retries are left.
        """
        with self._lock:
            self._pending.append(ask)
        self._assign(ask)
        if ask.options.hedge_after is not None:
            timer = threading.Timer(ask.options.hedge_after, self._hedge, (ask,))
            timer.daemon = True
            timer.start()
            ask.future.add_done_callback(lambda _: timer.cancel())
        return ask.future

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Until the context is left this thread only waits, so this process can do what others have left."""
        with self._lock:
            self._waiting += 1
        try:
            self._assign()
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    @contextlib.contextmanager
    def own_share(self) -> Iterator[None]:
        """Until the context is left this process has a share of its own to run."""
        with self._lock:
            self._at_work[self._me].append(None)
        try:
            yield
        finally:
            with self._lock:
                self._at_work[self._me].remove(None)
            self._assign()

    def _hedge(self, ask: Ask) -> None:
        with self._lock:
            ask.elsewhere = True
            if not (ask.answered or ask in self._pending):
                self._pending.append(ask)
        self._assign()

    def _assign(self, new: Ask | None = None) -> None:
        """Give out what waits for a worker, as far as there are free ones; what is ``new``, in this thread."""
        while True:
            with self._lock:
                self._pending = [ask for ask in self._pending if not ask.answered]
                pairs = ((ask, self._free_worker(ask)) for ask in self._pending)
                ask, worker = next((pair for pair in pairs if pair[1] is not None), (None, None))
                if ask is None or worker is None:
                    return
                first = not ask.elsewhere and worker == ask.first
                self._pending.remove(ask)
                self._at_work[worker].append(ask)
                ask.under_way.add(worker)
                ask.tried.add(worker)
                ask.elsewhere = True
            if first:
                transport, requests = ask.transport, ask.requests[-1:]
            else:
                transport, requests = self._transport if worker != self._me else ask.beside(), ask.requests
            send = partial(self._send, ask, worker, transport, requests)
            if ask is new or worker == self._me:
                send()
            else:
                self._threads.run(send)

    def _free_worker(self, ask: Ask) -> int | None:
        """Who can do it now: a worker that has nothing of this caller's to do, or the caller, if it waits."""
        if ask.resident and not ask.elsewhere and not (ask.movable and self.is_lost(ask.first)):
            return None if self._at_work[ask.first] else ask.first
        size = self._membership.world_size
        for distance in range(size):  # so that the shares of several lost workers go to different ones
            rank = (ask.first + distance) % size
            free = rank != self._me and not (self.is_lost(rank) or self._at_work[rank])
            if free and rank not in ask.tried and ask.may_go(rank):
                return rank
        return self._me if self._waiting and not self._at_work[self._me] else None

    def _send(self, ask: Ask, worker: int, transport: Sender, requests: list[Sent]) -> None:
        try:
            reply = transport.send(worker, requests[0].again(), ask.seconds_left())
        except Exception as error:
            self._ended(ask, worker, transport, error)
            return
        reply.add_done_callback(partial(self._arrived, ask, worker, transport, requests))

    def _arrived(
        self, ask: Ask, worker: int, transport: Sender, requests: list[Sent], reply: Future[Message]
    ) -> None:
        error = reply.exception()
        if error is None and len(requests) > 1:
            error = self._difference(worker, requests[0], reply.result())
            if error is None:
                self._send(ask, worker, transport, requests[1:])
                return
        self._ended(ask, worker, transport, reply.result() if error is None else error)

    def _difference(self, worker: int, request: Sent, message: Message) -> Exception | None:
        """What keeps the graph that a worker has made anew from being the one that was lost."""
        try:
            reply: Reply = unpack(message.received())
        except Exception as error:
            return error
        if reply.exception is not None:
            return reply.exception.to_error(self._name(worker))
        if message.connected != request.connected:
            return RuntimeError(
                "the share of a lost worker has another graph when it runs again: its function depends on more than "
                "its arguments and torch's random numbers"
            )
        return None

    def _ended(self, ask: Ask, worker: int, transport: Sender, result: Message | BaseException) -> None:
        """Take note of what has come of an attempt."""
        settled: Message | BaseException | None = None
        late: set[int] = set()
        with self._lock:
            self._at_work[worker].remove(ask)
            ask.under_way.discard(worker)
            if ask.answered:
                pass
            elif isinstance(result, Message):
                settled, late = result, set(ask.under_way)
            elif ask.under_way or ask in self._pending:
                pass  # another attempt may do better
            elif worker != self._me and ask.retries and self._is_loss(worker, result):
                ask.retries -= 1
                self._pending.append(ask)
            else:
                settled = result
            ask.answered |= settled is not None
        for other in late - {self._me}:
            for graph in ask.graphs:
                self._releaser.release(self._transport, other, graph.key)
        if isinstance(settled, Message):
            for graph in ask.graphs:
                if transport is not ask.transport or worker != ask.first:
                    graph.moved(worker, transport)
            settle(ask.future, settled)
        elif settled is not None:
            ask.future.set_exception(settled)
        self._assign()

    def _is_loss(self, worker: int, error: BaseException) -> bool:
        """Whether a worker is lost, and the group goes on; a function that raises the same is no loss."""
        if not isinstance(error, WorkerLostError) or isinstance(error, RemoteError):
            return False
        try:
            self._membership.check(())
        except (PeerFailedError, WorkerLostError):
            return False
        return self._membership.goes_on_without(worker)

    def _name(self, worker: int) -> str:
        return self._membership.members[worker].name
