"""The RPC group that this process is in → all of its state: names, connections, kept graphs, threads.

All of it ends with the group. The only global is which group that is; ``life/running_group.py`` makes, starts and ends
the group.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchopt_dist.distributed.group.chunks import Streams
from torchopt_dist.distributed.group.graph_releaser import GraphReleaser
from torchopt_dist.distributed.group.kept import Kept, KeptGraph, Residents, graph_missing
from torchopt_dist.distributed.group.mirrors import Held, mirror_missing
from torchopt_dist.distributed.group.outstanding import Outstanding
from torchopt_dist.distributed.group.spans import Recorder
from torchopt_dist.distributed.membership.members import Member, OnLoss
from torchopt_dist.distributed.membership.membership import Membership
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.requests import Key
from torchopt_dist.distributed.transport.base import Transport
from torchopt_dist.distributed.transport.retries import Retries
from torchopt_dist.errors import NotInitializedError, PeerFailedError, WorkerLostError
from torchopt_dist.process.future import Future
from torchopt_dist.process.threads import ThreadPool

__all__ = [
    "Group",
    "answering_group",
    "current_group",
    "errors_of_runs",
    "find_group",
    "incarnation_of",
    "set_group",
]


NUMBER_BITS = 40
"""Processes that have one rank, one after another, give no number twice, since others may have keys with numbers."""


class Group:
    """An RPC group, as this worker sees it.

    Attributes:
        settings: what ``auto_init_rpc`` was called with; a second call inside ``main`` must ask for the same.
        prepared_by: its ``worker_init_fn``.
        call_timeout: the default time-out of calls in seconds; 0 means no limit.
        ask: sends another worker a question that the program does not notice.
        process: the id of this process, by which a fork is recognized.
        incarnation: how often this worker's rank has been given to a new process.
        first_number: the first of this process's numbers; those of earlier processes of the rank are smaller.
        kept_graphs: the graphs of the calls that this worker has answered.
        teams: by its workers' ranks, the process group of each team that this worker is in.
        leading: is held while this worker, as a team's first, has the team compute; one request at a time.
        known_functions: those of which this worker has told callers what there is to tell, by their code.
        threads: run work that must not wait for a thread.
        errors: those of nodes in a backward pass, by the number of the engine's run, while someone asks for them.
        bars: for calls with a progress bar, by number, a function of a worker and its number of finished tasks.
        outstanding: bounds the requests that a thread sends before it waits for replies.
        ending: whether no new calls may be made; those of other workers are still answered.
    """

    def __init__(
        self,
        membership: Membership,
        settings: tuple[Any, ...],
        call_timeout: float,
        transport: Callable[[Group], Transport],
        ask: Callable[..., Future[list[Any]]],
        answer: Callable[[Message, Kept[KeptGraph], Recorder], Message],
    ) -> None:
        self.membership = membership
        self.settings = settings
        self.prepared_by: Callable[[], Any] | None = None
        self.call_timeout = call_timeout
        self.ask = ask
        self._answer = answer
        self.process = os.getpid()
        self.rank = membership.me.rank
        self.incarnation = membership.me.incarnation
        self.first_number = self.incarnation << NUMBER_BITS
        self.names = tuple(member.name for member in self.members)
        self.numbers = itertools.count(self.first_number)
        self.kept_graphs = Kept[KeptGraph](graph_missing, self.has_gone)
        self.known_functions: set[object] = set()
        self.threads = ThreadPool()
        self.residents = Residents(self.has_gone)
        self.mirrors = Kept[Held](mirror_missing)
        self.teams: dict[tuple[int, ...], Any] = {}
        self.leading = threading.Lock()
        self.streams = Streams()
        self.bars: dict[int, Callable[[int, int], None]] = {}
        self.errors: dict[int, list[BaseException]] = {}
        self.recorder = Recorder(self.rank)
        self.releaser = GraphReleaser()
        self.before_leaving: list[Callable[[float], None]] = []
        """Called with seconds when all ranks have come to the end: each waits for what it has under way."""
        self.ending = False
        self.transport = transport(self)
        membership.links.on_cut = self._cut
        self.retries = Retries(membership, self.threads, self.releaser.release, self.transport, self.new_key)
        self.outstanding = Outstanding(len(self.names))

    @property
    def members(self) -> tuple[Member, ...]:
        """The workers, by rank, each with the data of its present process."""
        return self.membership.members

    @property
    def on_loss(self) -> OnLoss:
        """What the group does when a worker is lost: ``"end"``, ``"continue"`` or ``"replace"``."""
        return self.membership.me.on_loss

    @property
    def lost(self) -> Mapping[int, WorkerLostError]:
        """The ranks that were lost, in the order of their loss, each with the error that says how."""
        return self.membership.lost

    def new_key(self) -> Key:
        """A key that no other graph or value has."""
        return self.rank, next(self.numbers)

    def answer(self, request: Message) -> Message:
        """The reply to a request of another worker; an exception of the request is the reply's."""
        self.outstanding.slots = None  # what this thread has run before has requests of its own
        return self._answer(request, self.kept_graphs, self.recorder)

    def has_gone(self, key: Key) -> bool:
        """Whether the process that has made a key is known to have ended; another one may have its rank."""
        rank, number = key
        return rank in self.membership.failures or incarnation_of(number) < self.members[rank].incarnation

    def _cut(self, worker: int, error: WorkerLostError) -> None:
        """Let calls to a worker fail, since the network to it is cut."""

        def work() -> None:
            if self.transport.unanswered():
                with contextlib.suppress(WorkerLostError, PeerFailedError):  # the group ends
                    self.membership.note_unanswered()
                self.transport.worker_lost(worker, error)

        self.threads.run(work)

    def same_program(self, rank: int) -> bool:
        """Whether ``__main__`` of that worker is this worker's, so that its functions can be sent by name."""
        members = self.membership.members
        here = members[self.rank].program
        return bool(here) and members[rank].program == here

    def is_forked(self) -> bool:
        """Whether this process is a fork of the worker, and so not in the group."""
        return self.process != os.getpid()

    def check_process(self) -> None:
        """Raise :class:`NotInitializedError` in a fork of this worker, which would wait for a reply for ever."""
        if self.process != os.getpid():  # as `is_forked`: each call asks
            raise NotInitializedError(
                f"this process is a fork of {self.names[self.rank]}, and does not have its connections: make remote "
                "calls, their backwards and barriers in the worker itself, which has called `auto_init_rpc`"
            )

    def close(self, seconds: float = 0.0) -> None:
        """Drop all that the group holds, and end its threads, each when its work is done; wait at most so long."""
        deadline = time.monotonic() + seconds
        self.ending = True
        self.kept_graphs.clear()
        self.residents.clear()
        self.mirrors.clear()
        self.teams.clear()
        self.streams.clear()
        self.releaser.close(seconds)
        self.threads.close(max(0.0, deadline - time.monotonic()))


_group: Group | None = None


def incarnation_of(number: int) -> int:
    """The incarnation of the process that has made a number."""
    return number >> NUMBER_BITS


def set_group(group: Group | None) -> None:
    """Set the group of this process; ``None`` means that it is in none."""
    global _group
    _group = group


def _leave_to_parent() -> None:
    """In a process that was forked from a worker: it is not the group's, and does not hide the worker's death."""
    if _group is not None:
        _group.membership.drop_connections()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def find_group() -> Group | None:
    """The group in which calls can be made, if there is one."""
    return None if _group is None or _group.ending else _group


def current_group() -> Group:
    """The group in which calls can be made; raises :class:`NotInitializedError` if there is none."""
    if _group is None or _group.ending:
        raise NotInitializedError(
            "no RPC group: decorate the program's `main` with `@todist.auto_init_rpc()`, and make remote calls "
            "while it runs; on workers of `todist.launch`, give it `rpc=True`"
        )
    return _group


def errors_of_runs() -> dict[int, list[BaseException]]:
    """The group's ``errors``; none, if it has ended."""
    return {} if _group is None else _group.errors


def answering_group() -> Group:
    """The group that answers requests of other workers, from before the first one until after the last one.

    Raises :class:`NotInitializedError` if there is none.
    """
    if _group is None:
        raise NotInitializedError("the RPC group of this worker has ended")
    return _group
