"""One TCP connection from every worker to rank 0 → who has joined, who waits at a barrier, who failed, who was lost.

RPC alone tells a caller that a worker it is *talking to* has died. The membership tells all workers about all: a
rank that raises reports its traceback on it, and a rank that dies drops it. Rank 0 is the hub and hands messages on.

Messages are lines of JSON, never pickles, and a connection that does not start with this run's token is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from torchopt_dist.distributed.membership.direct_links import DirectLinks
from torchopt_dist.distributed.membership.hub import END, HUB, JOIN_SECONDS, START, Barrier, Hub
from torchopt_dist.distributed.membership.link import STOPPED, UNREACHABLE, ToHub
from torchopt_dist.distributed.membership.members import Failure, Member, check_members
from torchopt_dist.distributed.membership.state import MembershipState
from torchopt_dist.distributed.membership.stopped import StoppedProcesses, Watchdog
from torchopt_dist.distributed.rendezvous.sealed_store import SealedStore
from torchopt_dist.distributed.rendezvous.store import GroupEndedError
from torchopt_dist.errors import InitializationError, PeerFailedError
from torchopt_dist.process.liveness import Liveness

__all__ = ["Membership"]

MAX_REPORT = 1 << 20
"""Characters of a traceback; each is at most 12 bytes in JSON."""


class Membership(MembershipState):
    """This worker's connection to rank 0; on rank 0 the hub as well.

    Unless ``me.on_loss == "end"`` the loss of another rank than 0, once all have started, is no error of its own:
    barriers do not wait for that rank, and with ``"replace"`` a new process may have it. The membership's own thread
    calls ``on_failure`` once, and ``on_replacement`` with each new process, to which calls still fail then.
    """

    def __init__(
        self,
        me: Member,
        world_size: int,
        on_failure: Callable[[Failure], None],
        liveness: Liveness | None = None,
        on_replacement: Callable[[Member], None] = lambda _: None,
    ) -> None:
        super().__init__(me, world_size)
        self._on_replacement = on_replacement
        self._on_failure = on_failure
        self._liveness = liveness = liveness or Liveness()
        self._stopped: StoppedProcesses | None = None
        self._watchdog: Watchdog | None = None
        self._watching: asyncio.Future[None] | None = None
        self._hub_gone = threading.Event()
        self._hub_gone.set()
        self._hub = Hub(world_size, me.on_loss, liveness, self._receive) if me.rank == HUB else None
        self._to_hub: ToHub | None = None
        self.links = DirectLinks(liveness)
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._thread = threading.Thread(target=self._loop.run_forever, name="todist-membership", daemon=True)
        self._thread.start()

    def join(self, store: SealedStore, host: str, timeout: float) -> tuple[Member, ...]:
        """Connect with all the others, at ``host`` on rank 0, and return all the workers, by rank.

        Raises ``InitializationError`` if a worker is missing, or two have one name; ``PeerFailedError`` if another rank
        failed meanwhile; ``GroupEndedError`` if this worker replaces a lost one, and the others are ending already.
        """
        if self.world_size > 2:
            self.me = replace(self.me, link=self._run(self.links.listen(host, self.world_size)))
        if self._hub is not None:
            if self.world_size > 1:
                port = self._run(self._hub.listen(host, store.make_token("membership")))
                store.tell("membership", json.dumps({"host": host, "port": port}))
            self._run(self._hub.handle({"join": asdict(self.me)}))
        else:
            where = "rank 0"
            try:
                hub = json.loads(store.told("membership")[0])
                where = f"rank 0's membership hub at {hub['host']}:{hub['port']}"
                me = self.me
                self._to_hub = ToHub(me.rank, me.incarnation, self._liveness, self._receive, self._hub_ended)
                self._run(self._to_hub.connect(**hub, token=store.token("membership")))
                self._hub_gone.clear()
                self._send({"join": asdict(self.me)})
            except GroupEndedError:
                raise
            except (OSError, dist.DistError) as error:
                raise InitializationError(f"rank {self.me.rank} cannot reach {where}: {error}") from error
        try:
            self._wait(lambda: bool(self.members), timeout, "all workers to join", late=InitializationError)
        except PeerFailedError:
            if not self.members:  # else that rank has found out what this one is about to
                raise
        check_members(self.members, self.me)
        return self.members

    def announce(self, timeout: float) -> None:
        """Announce this worker, which replaces a lost one, to the others, and wait until all have replied.

        Raises ``GroupEndedError`` if the others are at their end.
        """
        self._set_member(self.me)
        self._send({"announce": asdict(self.me)})
        what = "the others to know where it listens"
        self._wait(lambda: self._known, timeout, what, late=InitializationError)

    def start(self, timeout: float) -> None:
        """Wait until all ranks have called this; if this worker replaces a lost one, until the others can call it.

        Raises ``GroupEndedError`` if the others are at their end.
        """
        if not self.joins_late:
            self.barrier(range(self.world_size), START)
            return
        self._send({"ready": self.me.rank, "incarnation": self.me.incarnation})
        self._wait(lambda: self._started, timeout, "the others to call it", late=InitializationError)

    def barrier(self, ranks: Sequence[int], purpose: str = "", timeout: float | None = None) -> None:
        """Wait until all ``ranks``, this one among them, have called ``barrier`` with the same ranks and purpose.

        Raises ``PeerFailedError`` if a rank failed meanwhile, and ``WorkerLostError`` if one of ``ranks`` was lost and
        the group does not go on without it, or ``timeout`` seconds have passed.
        """
        group = tuple(sorted(set(ranks)))
        turn = self._turns[purpose, group] = self._turns.get((purpose, group), 0) + 1
        barrier = Barrier(purpose, group, turn)
        self._send({"arrive": barrier, "rank": self.me.rank})
        what = f"ranks {[*group]} to come to a barrier"
        self._wait(lambda: barrier in self._released, timeout, what, group)
        self._released.discard(barrier)

    def final_barrier(self) -> None:
        """Wait until every rank has called this, so that calls of those at work are answered; see :meth:`barrier`."""
        self.barrier(range(self.world_size), END)

    def leave_barrier(self, all_answered: bool, timeout: float) -> bool:
        """Wait until every rank has called this, after :meth:`final_barrier`; errors as :meth:`barrier`.

        Returns whether ``all_answered`` holds for all ranks: each has a reply to each of its requests.
        """
        if not all_answered:
            self.note_unanswered()  # reaches the others before they are released
        self.barrier(range(self.world_size), "leave", timeout)
        return self._all_answered

    def fail(self, report: str, summary: str = "") -> None:
        """Send this rank's traceback, if long its two ends, and its summary to the others; return when it is sent."""
        if len(report) > MAX_REPORT:
            left_out = f"\n... {len(report) - MAX_REPORT} characters left out ...\n"
            report = report[: MAX_REPORT // 2] + left_out + report[-MAX_REPORT // 2 :]
        self._send({"failed": self.me.rank, "report": report, "summary": summary})

    def wait_for(self, thread: threading.Thread, timeout: float) -> None:
        """Wait for a thread to end, or the loss of a rank, ``timeout`` seconds at most; errors as :meth:`barrier`."""

        def watch() -> None:
            thread.join()
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=watch, daemon=True).start()
        self._wait(lambda: not thread.is_alive() or bool(self.lost), timeout, "the others to shut down RPC")

    def watch(self, rank: int) -> None:
        """Let :attr:`links` watch the network to a worker; rank 0 has its own connections."""
        if HUB not in (rank, self.me.rank) and self.members[rank].link and not self._closing:
            self._loop.call_soon_threadsafe(self.links.watch, self.members, self.me.rank, rank)

    def note_unanswered(self) -> None:
        """Tell all ranks that this one has given up a request, so that the transport cannot end in order."""
        self._send({"unanswered": self.me.rank})

    def wait_for_hub(self, timeout: float) -> None:
        """Wait until rank 0 has left the group, ``timeout`` seconds at most; not if it has failed, or is this rank."""
        if HUB not in self.failures:
            self._hub_gone.wait(timeout)

    def close(self) -> None:
        """Leave the group, so that the others do not take the end of the connection for a failure."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()  # nothing is received any more for which a thread could wait
        try:
            with contextlib.suppress(OSError, TimeoutError):  # the hub may be gone
                self._send({"left": self.me.rank})
                self._run(self._shut())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=1.0)
            if not self._thread.is_alive():
                self._loop.close()

    def drop_connections(self) -> None:
        """In a process that was forked from this worker: hold none of its connections, whose end tells its death.

        Closing them in asyncio's way would take them from the selector of the kernel, which the worker goes on using.
        """
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for key in tuple((self._selector.get_map() or {}).values()):  # none when this worker has left
            os.dup2(nothing, key.fd, inheritable=False)
        os.close(nothing)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=JOIN_SECONDS)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            if self._hub is not None:
                self._run(self._hub.handle(message))
            elif self._to_hub is not None:
                self._run(self._to_hub.send(message))
        except (OSError, TimeoutError) as error:  # so that what users see is never a bare error of a socket
            self.check(())
            raise self._failure(HUB, cause=UNREACHABLE).error() from error

    def _hub_ended(self, cause: str) -> None:
        self._hub_gone.set()
        if not self._hub_left:
            self._receive({"failed": HUB, "cause": cause})

    def _receive(self, message: dict[str, Any]) -> None:
        with self._changed:
            if self._closing:
                return
            news = self._note(message)
            if "members" in message:
                self._watching = asyncio.ensure_future(self._watch_processes())
        if isinstance(news, Member):
            if self._stopped is not None and news.process_table == self.me.process_table:
                self._stopped.watch(news.rank, news.pid)
            self._on_replacement(news)
        if "tell" in message and self._to_hub is not None:
            self._to_hub.link.put({"told": message["tell"], "rank": self.me.rank})
        if isinstance(news, Failure):
            if news.cause == STOPPED and self._stopped is not None:
                self._stopped.kill(news.rank)
            self._on_failure(news)

    def _is_another(self, rank: int) -> bool:
        return rank != self.me.rank and rank not in self.failures

    async def _watch_processes(self) -> None:
        """Report stopped and ended workers of this machine; if there are no others, let a watchdog watch this one."""
        pids = {
            member.rank: member.pid
            for member in self.members
            if member.pid and member.process_table == self.me.process_table and self._is_another(member.rank)
        }
        if self.me.pid and not pids and len(self.members) > 1 and Watchdog.can_be:
            hub = None if self._to_hub is None else self._to_hub.where({"watchdog": True})
            self._watchdog = Watchdog(self._liveness, hub)
        self._stopped = stopped = StoppedProcesses(pids, self._liveness)
        while pids:
            await asyncio.sleep(self._liveness.interval)
            for rank, cause in stopped.look():
                of = self.members[rank].incarnation
                message = {"failed": rank, "cause": cause, "incarnation": of}
                if self._hub is not None:
                    await self._hub.handle(message)
                elif rank != HUB and self._to_hub is not None:
                    await self._to_hub.send(message)
                else:  # the others hear of rank 0 when it has been killed
                    self._hub_ended(cause)

    async def _shut(self) -> None:
        await self.links.close()
        if self._watchdog is not None:
            self._watchdog.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._hub is not None:
            await self._hub.close()
        if self._to_hub is not None:
            await self._to_hub.close()
