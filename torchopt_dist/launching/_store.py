"""An agent's part in the rendezvous: sockets at which the workers can meet, tried by other agents → the store there.

A connection only transfers a token, since another machine may have the same address in another network.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import psutil
import torch.distributed as dist

from torchopt_dist.errors import InitializationError
from torchopt_dist.launching._messages import Listening
from torchopt_dist.launching._processes import ready
from torchopt_dist.process.network import LOOPBACK, check_loopback

__all__ = ["Listeners", "reach", "store_at"]

STORE_SECONDS = 60
TOKEN_BYTES = 16
TURN_SECONDS = 0.1


class Listeners:
    """Sockets at addresses of this machine, that give each caller a token.

    Args:
        port: the port; 0 means any free one.
        everywhere: whether at all addresses of the machine; else at the loopback address.

    Raises:
        InitializationError: the port is taken, or the machine has no loopback address.

    Attributes:
        where: the message with the addresses, for the launcher.
    """

    def __init__(self, port: int, everywhere: bool) -> None:
        self._listeners: dict[str, socket.socket] = {}
        if not everywhere:
            check_loopback(LOOPBACK)
        for address in _own_addresses() if everywhere else [LOOPBACK]:
            try:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                listener = socket.create_server((address, port), family=family, backlog=1024)
            except OSError as error:
                if self._listeners and error.errno != errno.EADDRINUSE:
                    continue  # the address is not ready, as one of IPv6 in its first second
                self.close()
                raise InitializationError(
                    f"`master_port` must be free on {address}, or 0 for any free port, got {port}: "
                    f"{os.strerror(error.errno or 0)}"
                ) from error
            listener.setblocking(False)
            self._listeners[address] = listener
        ports = {address: each.getsockname()[1] for address, each in self._listeners.items()}
        self.where = Listening(ports, secrets.token_bytes(TOKEN_BYTES))

    def __iter__(self) -> Iterator[socket.socket]:
        return iter(self._listeners.values())

    def greet(self, listener: socket.socket) -> None:
        """Send the token to the next process that connects."""
        with contextlib.suppress(OSError), listener.accept()[0] as caller:  # the caller may have left again
            caller.setblocking(False)
            caller.send(self.where.token)

    def keep(self, address: str) -> socket.socket:
        """The socket at one address; the others are closed."""
        kept = self._listeners.pop(address)
        self.close()
        return kept

    def close(self) -> None:
        """Close all sockets."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners = {}


def store_at(listener: socket.socket) -> dist.TCPStore:
    """A store that listens there; it is closed with the last reference to it, and has threads."""
    address, port = listener.getsockname()[:2]
    return dist.TCPStore(
        address,
        port,
        None,
        is_master=True,
        timeout=timedelta(seconds=STORE_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reach(where: Listening, seconds: float, goes_on: Callable[[], bool]) -> frozenset[str]:
    """Try all addresses at once; returns those that can be reached.

    Args:
        where: the addresses.
        seconds: how long to try.
        goes_on: called repeatedly; returns whether to continue.
    """
    reached: set[str] = set()
    callers: dict[socket.socket, tuple[str, bytearray]] = {}
    with contextlib.ExitStack() as opened:
        for address, port in where.ports.items():
            with contextlib.suppress(OSError):  # the address is of a kind that this machine has not
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                caller = opened.enter_context(socket.socket(family))
                caller.setblocking(False)
                caller.connect_ex((address, port))
                callers[caller] = address, bytearray()
        until = time.monotonic() + seconds
        while callers and (left := until - time.monotonic()) > 0 and goes_on():
            for caller in ready([(each.fileno(), False, each) for each in callers], min(left, TURN_SECONDS)):
                address, received = callers[caller]
                more = b""
                with contextlib.suppress(OSError):
                    more = caller.recv(TOKEN_BYTES)
                received += more
                if not more or len(received) >= TOKEN_BYTES:
                    del callers[caller]
                    if received == where.token:
                        reached.add(address)
    return frozenset(reached)


def _own_addresses() -> list[str]:
    """The loopback address, then those of IPv4, then those of IPv6."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    known = [a for name, entries in psutil.net_if_addrs().items() if name in up for a in entries]
    four = [a.address for a in known if a.family == socket.AF_INET and not a.address.startswith("127.")]
    six = [a.address for a in known if a.family == socket.AF_INET6 and "%" not in a.address]
    return [LOOPBACK, *four, *(address for address in six if address != "::1")]
