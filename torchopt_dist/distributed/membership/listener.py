"""A host and a token → the connections that begin with the token; strangers cost few files and few lines of the log."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import time
from collections.abc import Awaitable, Callable

from torchopt_dist.distributed.membership.link import MAX_LINE

__all__ = ["Listener"]

log = logging.getLogger(__name__)

TOKEN_SECONDS = 10.0
MORE_STRANGERS = 32
LOG_SECONDS = 1.0
"""Between two lines of the log."""
RETRY_SECONDS = 0.2
"""Until another connection is accepted, when the system lets no file be opened."""


class Listener:
    """Lets ``serve`` serve, in the event loop's thread, the connections that begin with ``token`` and a new line.

    As many as there are workers, and a few more, may be without the token at a time; one more ends the oldest, since
    workers give the token at once.
    """

    def __init__(
        self, what: str, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    ):
        self.token = ""
        self._what = what
        self._serve = serve
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._logged_at = float("-inf")
        self._not_logged = 0

    async def listen(self, host: str, workers: int) -> int:
        """Accept connections at that address, of so many workers; returns the port."""
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        self._socket = listening = socket.socket(family)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(workers + MORE_STRANGERS)
        self._go_on(self._accept(listening, workers + MORE_STRANGERS))
        return int(listening.getsockname()[1])

    async def close(self) -> None:
        """Accept no more, and end the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    def _go_on(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket, most: int) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE)
            except OSError as error:  # too many files are open: who connects waits
                self._log(f"cannot accept a connection: {error}")
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._strangers[writer] = None
            self._go_on(self._greet(reader, writer))
            if len(self._strangers) > most:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.transport.abort()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            known = await self._knows_token(reader)
            self._strangers.pop(writer, None)
            if known:
                with contextlib.suppress(OSError):  # it has broken before it began
                    await self._serve(reader, writer)
            else:
                peer = writer.get_extra_info("peername")
                self._log(f"refused a connection without the token from {peer}")
        except asyncio.CancelledError:
            pass  # this rank is leaving
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):  # nothing is left to be cancelled
                await writer.wait_closed()

    async def _knows_token(self, reader: asyncio.StreamReader) -> bool:
        token = f"{self.token}\n".encode()
        try:
            given = await asyncio.wait_for(reader.readexactly(len(token)), TOKEN_SECONDS)
        except (TimeoutError, EOFError, OSError):  # silence, a hang-up
            return False
        return hmac.compare_digest(given, token)

    def _log(self, event: str) -> None:
        """Log an event, unless one was logged just now."""
        if time.monotonic() < self._logged_at + LOG_SECONDS:
            self._not_logged += 1
            return
        more = f"; and {self._not_logged} more events like this before" if self._not_logged else ""
        log.warning("%s %s%s", self._what, event, more)
        self._logged_at, self._not_logged = time.monotonic(), 0
