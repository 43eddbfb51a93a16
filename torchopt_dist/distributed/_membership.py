"""One TCP connection from every worker to rank 0 → who is there, who waits at a barrier, who failed, who is gone.

RPC alone tells a caller that a worker it is *talking to* has died. The membership tells all workers about all: a
rank that raises reports its traceback on it, and a rank that dies drops it. Rank 0 is the hub and hands messages on.

Messages are lines of JSON, never pickles, and a connection that does not start with this run's token is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from torchopt_dist.errors import InitializationError, PeerFailedError, WorkerLostError

__all__ = ["Failure", "Member", "Membership"]

log = logging.getLogger(__name__)

HUB = 0
END = "end"
"""The last barrier; it does not wait for ranks that have died."""
JOIN_SECONDS = 10.0
MAX_LINE = 1 << 24
MAX_REPORT = 1 << 20
"""Characters of a traceback; each is at most 12 bytes in JSON."""
KEEPALIVE_OPTIONS = (
    ("TCP_KEEPIDLE", 1),
    ("TCP_KEEPINTVL", 1),
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 4000),
)
"""Seconds, seconds, a count, and milliseconds: a connection ends after 4 s to 5 s without an answer."""


@dataclass(frozen=True)
class Member:
    """A worker, as it makes itself known to the others.

    Attributes:
        rank: its rank.
        name: its name, unique among the workers.
        program: the path of its ``__main__``; on workers with the same path ``__main__.f`` is the same function.
    """

    rank: int
    name: str
    program: str


@dataclass(frozen=True)
class Failure:
    """The failure of a rank.

    Attributes:
        rank: its rank.
        report: its traceback; empty if the rank died without sending one.
        summary: the error in one line.
    """

    rank: int
    report: str
    summary: str = ""

    def error(self) -> PeerFailedError | WorkerLostError:
        """The exception to raise on the other ranks."""
        if self.report:
            error = PeerFailedError(f"rank {self.rank} failed:\n\n{self.report.rstrip()}")
            error.summary = f"rank {self.rank} failed: {self.summary}"
            return error
        return WorkerLostError(f"rank {self.rank} died: its connection was closed without a report")


class Membership:
    """This worker's connection to rank 0; on rank 0 the hub as well.

    Args:
        me: this worker.
        world_size: the number of workers.
        on_failure: called once, from the membership's own thread, when another rank reports a failure.
    """

    def __init__(self, me: Member, world_size: int, on_failure: Callable[[Failure], None]) -> None:
        self.me = me
        self.world_size = world_size
        self.members: tuple[Member, ...] = ()
        self.failures: dict[int, Failure] = {}
        self._on_failure = on_failure
        self._released: set[str] = set()
        self._hub_left = False
        self._hub_gone = threading.Event()
        self._hub_gone.set()
        self._all_answered = True
        self._sequence: dict[str, int] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._hub = _Hub(world_size, self._receive) if me.rank == HUB else None
        self._to_hub: asyncio.StreamWriter | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="todist-membership", daemon=True)
        self._thread.start()

    def join(self, store: dist.Store, host: str, timeout: float) -> tuple[Member, ...]:
        """Connect with all the others.

        Args:
            store: where rank 0 tells its address and this run's token.
            host: the address at which the others reach this machine; rank 0 listens at no other one.
            timeout: seconds to wait for the others.

        Returns:
            All the workers, by rank.

        Raises:
            InitializationError: a worker is missing, or two have one name.
            PeerFailedError: another rank failed meanwhile.
        """
        if self._hub is not None:
            port = self._run(self._hub.listen(host))
            store.set("membership", json.dumps({"host": host, "port": port, "token": self._hub.token}))
            self._run(self._hub.handle({"join": asdict(self.me)}, None))
        else:
            where = "rank 0"
            try:
                hub = json.loads(store.get("membership"))
                where = f"rank 0's membership hub at {hub['host']}:{hub['port']}"
                self._run(self._connect(**hub))
            except (OSError, dist.DistError) as error:
                raise InitializationError(f"rank {self.me.rank} cannot reach {where}: {error}") from error
        try:
            self._wait(lambda: bool(self.members), timeout, "all workers to join")
        except TimeoutError as error:
            raise InitializationError(str(error)) from None
        except PeerFailedError:
            if not self.members:  # else that rank has found out what this one is about to
                raise
        names = [member.name for member in self.members]
        for rank, name in enumerate(names):
            if name in names[:rank]:
                raise InitializationError(
                    f"worker_name_format gave ranks {names.index(name)} and {rank} the same name {name!r}; "
                    "names must be unique"
                )
        return self.members

    def barrier(self, ranks: Sequence[int], purpose: str = "", timeout: float | None = None) -> None:
        """Wait until all ``ranks``, this one among them, have called ``barrier`` with the same ranks and purpose.

        Raises:
            PeerFailedError: a rank failed meanwhile.
            WorkerLostError: one of ``ranks`` died meanwhile.
            TimeoutError: ``timeout`` seconds have passed.
        """
        group = sorted(set(ranks))
        name = f"{purpose}:{','.join(map(str, group))}"
        sequence = self._sequence[name] = self._sequence.get(name, 0) + 1
        key = f"{name}#{sequence}"
        self._send({"arrive": key, "rank": self.me.rank, "group": group})
        self._wait(lambda: key in self._released, timeout, f"ranks {group} to come to a barrier", group)
        self._released.discard(key)

    def final_barrier(self) -> None:
        """Wait until every rank that has not died has called this, so that calls of those still at work are answered.

        Raises:
            PeerFailedError: a rank failed meanwhile.
            WorkerLostError: a rank died; raised when the others are done, or at once if it was rank 0.
        """
        self._send({"arrive": END, "rank": self.me.rank, "group": list(range(self.world_size))})
        self._wait(lambda: END in self._released, None, "all ranks to end", ranks=())
        self.check()

    def leave_barrier(self, all_answered: bool, timeout: float) -> bool:
        """Wait until every rank has called this, after :meth:`final_barrier`; errors as :meth:`barrier`.

        Args:
            all_answered: whether this rank has a reply to each of its requests.
            timeout: seconds.

        Returns:
            Whether all ranks have.
        """
        if not all_answered:
            self._send({"unanswered": self.me.rank})  # reaches the others before they are released
        self.barrier(range(self.world_size), "leave", timeout)
        return self._all_answered

    def fail(self, report: str, summary: str = "") -> None:
        """Send this rank's traceback, and the same in one line, to all the others, and return when it is sent.

        Of a very long traceback only the beginning and the end are sent.
        """
        if len(report) > MAX_REPORT:
            left_out = f"\n... {len(report) - MAX_REPORT} characters left out ...\n"
            report = report[: MAX_REPORT // 2] + left_out + report[-MAX_REPORT // 2 :]
        self._send({"failed": self.me.rank, "report": report, "summary": summary})

    def wait_for(self, thread: threading.Thread, timeout: float) -> None:
        """Wait for a thread to end, ``timeout`` seconds at most; errors as :meth:`barrier`."""

        def watch() -> None:
            thread.join()
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=watch, daemon=True).start()
        self._wait(lambda: not thread.is_alive(), timeout, "the others to shut down RPC")

    def wait_for_hub(self, timeout: float) -> None:
        """Wait until rank 0 has left the group, ``timeout`` seconds at most; not if it has failed, or is this rank."""
        if HUB not in self.failures:
            self._hub_gone.wait(timeout)

    def close(self) -> None:
        """Leave the group, so that the others do not take the end of the connection for a death."""
        self._closing = True
        try:
            with contextlib.suppress(OSError, TimeoutError):  # the hub may be gone
                self._send({"left": self.me.rank})
                self._run(self._shut())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=1.0)
            if not self._thread.is_alive():
                self._loop.close()

    def check(self, ranks: Sequence[int] | None = None) -> None:
        """Raise if a rank has reported a failure, or if one of ``ranks`` is gone."""
        for failure in tuple(self.failures.values()):
            if failure.report or failure.rank == HUB or ranks is None or failure.rank in ranks:
                raise failure.error()

    def _wait(
        self,
        condition: Callable[[], bool],
        timeout: float | None,
        what: str,
        ranks: Sequence[int] | None = None,
    ) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self.check(ranks)  # first, since a rank that came to a barrier may have died after that
                if condition():
                    return
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"rank {self.me.rank} waited {timeout:g} s for {what}")
                self._changed.wait(left)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=JOIN_SECONDS)

    def _send(self, message: dict[str, Any]) -> None:
        if self._hub is not None:
            self._run(self._hub.handle(message, None))
        elif self._to_hub is not None:
            self._run(_write(self._to_hub, message))

    async def _connect(self, host: str, port: int, token: str) -> None:
        reader, self._to_hub = await asyncio.open_connection(host, port, limit=MAX_LINE)
        _keep_alive(self._to_hub)
        self._to_hub.write(token.encode() + b"\n")
        await _write(self._to_hub, {"join": asdict(self.me)})
        self._hub_gone.clear()
        self._listening = asyncio.ensure_future(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        async for message in _messages(reader):
            self._receive(message)
        self._hub_gone.set()
        if not self._hub_left:
            self._receive({"failed": HUB, "report": ""})

    def _receive(self, message: dict[str, Any]) -> None:
        failure = None
        with self._changed:
            if self._closing:
                return
            if "members" in message:
                self.members = tuple(Member(**member) for member in message["members"])
            elif "release" in message:
                self._released.add(message["release"])
            elif "left" in message:
                self._hub_left = True
            elif "unanswered" in message:
                self._all_answered = False
            elif message["failed"] not in {self.me.rank, *self.failures}:
                failure = Failure(message["failed"], message["report"], message.get("summary", ""))
                self.failures[failure.rank] = failure
            self._changed.notify_all()
        if failure is not None:
            self._on_failure(failure)

    async def _shut(self) -> None:
        if self._hub is not None:
            await self._hub.close()
        if self._to_hub is not None:
            self._listening.cancel()
            self._to_hub.close()
            await asyncio.gather(self._listening, self._to_hub.wait_closed(), return_exceptions=True)


class _Hub:
    """Rank 0's side: receives the messages of all workers, and sends what follows from them to all, rank 0 included."""

    def __init__(self, world_size: int, to_self: Callable[[dict[str, Any]], None]) -> None:
        self.token = secrets.token_hex(16)
        self.world_size = world_size
        self._to_self = to_self
        self._members: dict[int, dict[str, Any]] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._arrived: dict[str, set[int]] = {}
        self._dead: set[int] = set()

    async def listen(self, host: str) -> int:
        self._server = await asyncio.start_server(self._accept, host, 0, limit=MAX_LINE, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = None
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if not await self._knows_token(reader):
                log.warning(
                    "the membership hub refused a connection without the token from %s",
                    writer.get_extra_info("peername"),
                )
                return
            _keep_alive(writer)
            async for message in _messages(reader):
                if "join" in message:
                    rank = int(message["join"]["rank"])
                await self.handle(message, writer)
            if rank in self._writers:  # the connection ended, and it did not say that it left
                await self.handle({"failed": rank, "report": ""}, None)
        except asyncio.CancelledError:
            pass  # this rank is leaving
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):  # nothing is left to be cancelled
                await writer.wait_closed()
            self._connections.discard(task)

    async def _knows_token(self, reader: asyncio.StreamReader) -> bool:
        try:
            token = await asyncio.wait_for(reader.readline(), JOIN_SECONDS)
        except (TimeoutError, ValueError, OSError):  # silence, an endless line, a hang-up
            return False
        return hmac.compare_digest(token.strip(), self.token.encode())

    async def handle(self, message: dict[str, Any], writer: asyncio.StreamWriter | None) -> None:
        if "join" in message:
            rank = message["join"]["rank"]
            self._members[rank] = message["join"]
            if writer is not None:
                self._writers[rank] = writer
            if len(self._members) == self.world_size:
                await self._broadcast({"members": [self._members[r] for r in range(self.world_size)]})
        elif "arrive" in message:
            arrived = self._arrived.setdefault(message["arrive"], set())
            arrived.add(message["rank"])
            here = arrived | self._dead if message["arrive"] == END else arrived
            if here.issuperset(message["group"]):
                del self._arrived[message["arrive"]]
                await self._broadcast({"release": message["arrive"]}, message["group"])
        elif "left" in message and message["left"] != HUB:
            self._writers.pop(message["left"], None)
        else:
            if "failed" in message:
                self._dead.add(message["failed"])
                self._writers.pop(message["failed"], None)
            await self._broadcast(message)
            if END in self._arrived and self._arrived[END] | self._dead >= set(range(self.world_size)):
                del self._arrived[END]
                await self._broadcast({"release": END})

    async def _broadcast(self, message: dict[str, Any], ranks: Sequence[int] | None = None) -> None:
        for rank, writer in tuple(self._writers.items()):
            if ranks is None or rank in ranks:
                with contextlib.suppress(OSError):  # the end of a connection is reported where it is read
                    await _write(writer, message)
        if ranks is None or HUB in ranks:
            self._to_self(message)

    async def close(self) -> None:
        self._server.close()
        for writer in self._writers.values():
            writer.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Let the kernel probe the other machine's kernel each second, so that a cut network ends the connection.

    The two processes take no part in that, so a worker that computes for long is not taken for a dead one.
    """
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE_OPTIONS:
        if hasattr(socket, option):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


async def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _messages(reader: asyncio.StreamReader) -> Any:
    """The messages on a connection until it ends, however it ends."""
    while True:
        try:
            line = await reader.readline()
        except (OSError, ValueError):  # ValueError: a line that is longer than any of ours
            return
        if not line.endswith(b"\n"):
            return
        yield json.loads(line)
