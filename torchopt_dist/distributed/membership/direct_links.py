"""Workers of other machines that this worker calls → notice when the network between the two is cut.

Rank 0 hears of all workers, but the network between two workers that both reach rank 0 can be cut: their calls would
wait for ever. So the first call to a worker of another machine opens a connection that carries no messages: the kernels
of the two machines probe it, whatever the processes do.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import secrets
import time
from collections.abc import Callable, Sequence

from torchopt_dist.distributed.membership.link import AGAIN_SECONDS, NO_ANSWER, keep_alive
from torchopt_dist.distributed.membership.listener import Listener
from torchopt_dist.distributed.membership.members import Member
from torchopt_dist.errors import WorkerLostError
from torchopt_dist.process.liveness import Liveness

__all__ = ["DirectLinks"]


class DirectLinks:
    """This worker's connections to those that it calls; used in one thread, which runs the event loop.

    ``on_cut`` is called with a rank, and with the error that says between which workers the network is cut.
    """

    def __init__(self, liveness: Liveness) -> None:
        self.on_cut: Callable[[int, WorkerLostError], None] = lambda rank, error: None
        self._liveness = liveness
        self._listener = Listener("the watch over the network", self._hold)
        self._listener.token = secrets.token_hex(16)
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def listen(self, host: str, workers: int) -> str:
        """Accept connections of so many workers; returns the address as text, empty if ``host`` is a loopback one."""
        if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            return ""
        return f"{host} {await self._listener.listen(host, workers)} {self._listener.token}"

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold a connection until the other end, which says no more than the token, is gone."""
        keep_alive(writer, self._liveness)
        await reader.read(1)

    def watch(self, members: Sequence[Member], here: int, there: int) -> None:
        """Watch the network between two workers, unless that is done already, or rank 0's connections tell."""
        member = members[there]
        if there in self._tasks or not member.link or member.process_table == members[here].process_table:
            return
        self._tasks[there] = asyncio.ensure_future(self._watch(members[here], member))

    async def _watch(self, here: Member, there: Member) -> None:
        try:
            cut = await self._is_cut(there)
        except OSError:  # that worker has ended, which rank 0 tells
            return
        finally:
            del self._tasks[there.rank]
        if cut:
            seconds = self._liveness.patience
            error = WorkerLostError(
                f"the network between {here.name} on {here.host} and {there.name} on {there.host} is cut: nothing has "
                f"passed for {seconds:g} s, though rank 0 reaches both",
                rank=there.rank,
                worker=there.name,
                host=there.host,
                cause="unreachable",
            )
            self.on_cut(there.rank, error)

    async def _is_cut(self, there: Member) -> bool:
        """Wait until the network has been silent for the patience, or the other worker has ended.

        Raises ``OSError`` if the other worker had ended before.
        """
        host, port, token = there.link.split()
        until = time.monotonic() + self._liveness.patience
        while (left := until - time.monotonic()) > 0:
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), left)
            except TimeoutError:
                break
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # which says nothing about the network
                    until = time.monotonic() + self._liveness.patience
                elif error.errno not in NO_ANSWER:
                    raise
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            try:
                keep_alive(writer, self._liveness)
                writer.write(f"{token}\n".encode())
                await reader.read(1)
                return False
            except OSError as error:
                if error.errno in NO_ANSWER:
                    return True
                until = (
                    time.monotonic() + self._liveness.patience
                )  # it was reset: perhaps by something between
                await asyncio.sleep(AGAIN_SECONDS)
            finally:
                writer.close()
        return True

    async def close(self) -> None:
        """Close the connections."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._listener.close(), *tasks, return_exceptions=True)
