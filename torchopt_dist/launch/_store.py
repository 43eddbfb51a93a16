"""An agent's part in the rendezvous: sockets at which the workers can meet, tried by other agents → the store there.

A connection is only made to hand over a token: another machine may have the same address in another network.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

import psutil
import torch.distributed as dist

from torchopt_dist.errors import InitializationError
from torchopt_dist.launch._messages import Listen, Listening, Reach, Reached

__all__ = ["LOOPBACK", "Listeners", "reach", "store_at"]

LOOPBACK = "127.0.0.1"
STORE_SECONDS = 60
TOKEN_BYTES = 16
TURN_SECONDS = 0.1
ATTEMPTS = 20
"""To find a port that is free at all addresses: each address has connections of its own."""


class Listeners:
    """Sockets at one port of this machine's addresses, that give each caller a token.

    Args:
        question: at which port and addresses.

    Raises:
        InitializationError: the port is taken.

    Attributes:
        where: what the launcher is told.
    """

    def __init__(self, question: Listen) -> None:
        self._listeners = (
            _listen_everywhere(question.port)
            if question.everywhere
            else {LOOPBACK: _listen(LOOPBACK, question.port)}
        )
        port = next(iter(self._listeners.values())).getsockname()[1]
        self.where = Listening(tuple(self._listeners), port, secrets.token_bytes(TOKEN_BYTES))

    def __iter__(self) -> Iterator[socket.socket]:
        return iter(self._listeners.values())

    def greet(self, listener: socket.socket) -> None:
        """Give the next caller the token."""
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
        _close(self._listeners.values())
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


def reach(question: Reach, goes_on: Callable[[], bool]) -> Reached:
    """Try all addresses at once.

    Args:
        question: which addresses.
        goes_on: called all the time; whether to go on.
    """
    where, found = question.where, set()
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for address in where.addresses:
            with contextlib.suppress(OSError):  # the address is of a kind that this machine has not
                caller = opened.enter_context(_socket(address))
                caller.setblocking(False)
                caller.connect_ex((address, where.port))
                selector.register(caller, selectors.EVENT_READ, (caller, address, bytearray()))
        until = time.monotonic() + question.seconds
        while selector.get_map() and (left := until - time.monotonic()) > 0 and goes_on():
            for key, _ in selector.select(min(left, TURN_SECONDS)):
                caller, address, heard = key.data
                more = b""
                with contextlib.suppress(OSError):
                    more = caller.recv(TOKEN_BYTES)
                heard += more
                if not more or len(heard) >= TOKEN_BYTES:
                    selector.unregister(caller)
                    if heard == where.token:
                        found.add(address)
    return Reached(frozenset(found))


def _socket(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)


def _listen_everywhere(port: int) -> dict[str, socket.socket]:
    """A listener at each address of this machine, all at one port: at one that is free at all of them, if it is 0."""
    for attempts_left in reversed(range(1 if port else ATTEMPTS)):
        listeners: dict[str, socket.socket] = {}
        taken, chosen = False, port
        for address in _own_addresses():
            try:
                listeners[address] = _listen(address, chosen)
            except InitializationError as error:
                in_use = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
                if not listeners or (in_use and port):
                    _close(listeners.values())
                    raise
                taken |= in_use  # else the address is not ready, and left out
                continue
            chosen = listeners[address].getsockname()[1]
        if not taken or not attempts_left:
            break
        _close(listeners.values())
    return listeners


def _close(listeners: Iterable[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def _own_addresses() -> list[str]:
    """The loopback address, then those of IPv4, then those of IPv6."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    known = [a for name, entries in psutil.net_if_addrs().items() if name in up for a in entries]
    four = [a.address for a in known if a.family == socket.AF_INET and not a.address.startswith("127.")]
    six = [a.address for a in known if a.family == socket.AF_INET6 and "%" not in a.address]
    return [LOOPBACK, *four, *(address for address in six if address != "::1")]


def _listen(address: str, port: int) -> socket.socket:
    """A listener at one address of this machine, and at no other; at a free port, if it is 0.

    Raises:
        InitializationError: the port is taken.
    """
    listener = _socket(address)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise InitializationError(
            f"`master_port` must be free on {address}, or 0 for any free port, got {port}: {error.strerror}"
        ) from error
    return listener
