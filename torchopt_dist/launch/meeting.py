"""The hosts of a launch → the address and port at which all of their workers meet, and the store there.

On one machine that is the loopback address. Between machines the first host, which has rank 0, listens on all its
addresses, the others try which of them they reach, and the first that all reach is taken. A connection is only made to
hand over a token: another machine may have the same address in another network.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist

from torchopt_dist.errors import AgentFailedError, InitializationError
from torchopt_dist.launch.at_once import at_once
from torchopt_dist.launch.messages import Held, Hold, Listen, Listening, Reach, Reached, receive, send

if TYPE_CHECKING:
    from torchopt_dist.launch.machine import Machine

__all__ = ["EVERYWHERE", "LOOPBACK", "Meeting", "listen", "serve", "store_at"]

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
STORE_SECONDS = 60
REACH_SECONDS = 5.0
ANSWER_SECONDS = 20.0
TOKEN_BYTES = 16
ATTEMPTS = 20
"""To find a port that is free at all addresses: each address has connections of its own."""


class Meeting:
    """The store at which workers meet. It lives until :meth:`close`.

    Args:
        machines: those of the hosts, the first host's first.
        port: where the store listens; 0 means any free port.

    Raises:
        InitializationError: the port is taken, or not all hosts reach the first.
        AgentFailedError: a host was lost.

    Attributes:
        address: the store's address, for all workers.
        port: its port.
    """

    def __init__(self, machines: Sequence[Machine], port: int) -> None:
        first, others = machines[0], list(dict.fromkeys(m for m in machines if m is not machines[0]))
        self._store: dist.TCPStore | None = None
        self._channel: socket.socket | None = None
        if first.here and not others:
            listener = listen(LOOPBACK, port)
            self.address, self.port = LOOPBACK, listener.getsockname()[1]
            self._store = store_at(listener)
            return
        self._channel = first.open_meeting()
        try:
            self.address, self.port = _agree(first, others, self._channel, port)
        except BaseException:
            self._channel.close()
            raise

    def close(self) -> None:
        """End the store."""
        self._store = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _agree(first: Machine, others: list[Machine], channel: socket.socket, port: int) -> tuple[str, int]:
    where = _ask(first, channel, Listen(port))
    if where.error is not None:
        raise InitializationError(f"{where.error} on {first.name}")
    if not others:
        where = replace(where, addresses=(LOOPBACK,))
    else:
        known = [other.launcher_address for other in others] if first.here else [first.address]
        likely = [address for address in known if address in where.addresses]
        where = replace(where, addresses=tuple(dict.fromkeys((*likely, *where.addresses[1:]))))
        reached = at_once(lambda other: _try(other, where), others)
        common = [address for address in where.addresses if all(address in found for found in reached)]
        if not common:
            raise InitializationError(_why_apart(first, others, reached, where))
        where = replace(where, addresses=tuple(common))
    _ask(first, channel, Hold(where.addresses[0]))
    return where.addresses[0], where.port


def _why_apart(first: Machine, others: list[Machine], reached: list[frozenset[str]], where: Listening) -> str:
    lost = [other.name for other, found in zip(others, reached, strict=True) if not found]
    if not lost:
        names = ", ".join(other.name for other in others)
        return f"{names} reach no address of {first.name}, where rank 0 is, that all of them reach"
    return (
        f"{', '.join(lost)} cannot reach {first.name}, where rank 0 is, at port {where.port} of any of its "
        f"addresses {', '.join(where.addresses)}: is there a firewall? `master_port` chooses the port"
    )


def _try(machine: Machine, where: Listening) -> frozenset[str]:
    with contextlib.closing(machine.open_meeting()) as channel:
        answer: Reached = _ask(machine, channel, Reach(where, REACH_SECONDS))
        return answer.addresses


def _ask(machine: Machine, channel: socket.socket, question: Listen | Reach | Hold) -> Any:
    channel.settimeout(ANSWER_SECONDS)
    try:
        send(channel, question)
        answer = receive(channel)
    except (TimeoutError, ConnectionError):
        answer = None
    if answer is None:
        raise AgentFailedError(
            f"{machine.name} gave no answer when a place to meet was looked for: "
            f"{machine.why_lost() or f'{ANSWER_SECONDS:g} s have passed'}"
        )
    return answer[0]


def serve(channel: socket.socket) -> None:
    """Answer the launcher until it closes the channel, in a thread on each host."""
    door: _Door | None = None
    store = None
    with channel:
        while (received := receive(channel)) is not None:
            question, _ = received
            with contextlib.suppress(OSError):  # the launcher has ended
                if isinstance(question, Listen):
                    try:
                        door = _Door(question.port)
                        send(channel, door.where)
                    except InitializationError as error:
                        send(channel, Listening((), 0, b"", str(error)))
                elif isinstance(question, Reach):
                    send(channel, Reached(_reach(question.where, question.seconds)))
                elif isinstance(question, Hold):
                    assert door is not None
                    listener = door.close_all_but(question.address)
                    assert listener is not None
                    store, door = store_at(listener), None
                    send(channel, Held())
    if door is not None:
        door.close_all_but(None)
    del store


class _Door:
    """Listeners on all addresses of this machine, at one port, that give each caller the token."""

    def __init__(self, port: int) -> None:
        self._listeners = _listen_everywhere(port)
        port = next(iter(self._listeners.values())).getsockname()[1]
        self.where = Listening(tuple(self._listeners), port, secrets.token_bytes(TOKEN_BYTES))
        self._closing, self._close = socket.socketpair()
        self._thread = threading.Thread(target=self._greet, name="todist door", daemon=True)
        self._thread.start()

    def _greet(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in (*self._listeners.values(), self._closing):
                selector.register(listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._closing:
                        return
                    assert isinstance(key.fileobj, socket.socket)
                    with contextlib.suppress(OSError), key.fileobj.accept()[0] as caller:
                        caller.sendall(self.where.token)

    def close_all_but(self, address: str | None) -> socket.socket | None:
        self._close.close()
        self._thread.join()
        self._closing.close()
        kept = self._listeners.pop(address, None) if address is not None else None
        _close(self._listeners.values())
        return kept


def _listen_everywhere(port: int) -> dict[str, socket.socket]:
    """A listener at each address of this machine, all at one port: at one that is free at all of them, if it is 0."""
    for attempts_left in reversed(range(1 if port else ATTEMPTS)):
        listeners: dict[str, socket.socket] = {}
        taken, chosen = False, port
        for address in _own_addresses():
            try:
                listeners[address] = listen(address, chosen)
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


def _reach(where: Listening, seconds: float) -> frozenset[str]:
    until = time.monotonic() + seconds

    def reaches(address: str) -> bool:
        try:
            with socket.create_connection((address, where.port), seconds) as caller:
                caller.settimeout(max(until - time.monotonic(), 0.01))
                return caller.recv(TOKEN_BYTES, socket.MSG_WAITALL) == where.token
        except OSError:
            return False

    found = at_once(reaches, where.addresses)
    return frozenset(address for address, there in zip(where.addresses, found, strict=True) if there)


def listen(address: str, port: int) -> socket.socket:
    """A listener at one address of this machine, and at no other; at a free port, if it is 0.

    Raises:
        InitializationError: the port is taken.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise InitializationError(
            f"`master_port` must be free on {address}, or 0 for any free port, got {port}: {error.strerror}"
        ) from error
    return listener


def store_at(listener: socket.socket) -> dist.TCPStore:
    """A store that listens there; it is closed with the last reference to it."""
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
