"""A socket or a pipe that a process on this machine holds the other end of: what a ferry carries from and to.

A channel or a pipe has one number, the same at both ends of the stream. Either end gives numbers of its own.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchopt_dist.launch.frames import Frames, Kind

__all__ = ["Channel", "Port", "Ports", "Sink", "Source", "watch"]


@dataclass(eq=False)
class Channel:
    """A socket whose other end somebody on this machine holds.

    Attributes:
        number: the same at both ends of the stream.
        socket: our end.
        root: whether it leads to an agent, which tells how workers end; else it leads to a worker.
        sent: identity of a file that has been sent → its number, and a descriptor that keeps the identity from being
            given to another file.
        received: number → descriptor of a file that has arrived.
    """

    number: int
    socket: socket.socket
    root: bool
    sent: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close this end."""
        self.socket.close()
        for descriptor in (*(kept for _, kept in self.sent.values()), *self.received.values()):
            os.close(descriptor)


@dataclass(eq=False)
class Pipe:
    """One end of a pipe whose other end is on the other machine."""

    number: int
    end: int

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self.end

    def close(self) -> None:
        """Close this end."""
        os.close(self.end)


class Source(Pipe):
    """A process on this machine writes into it."""


class Sink(Pipe):
    """A process on this machine reads from it."""


Port = Channel | Pipe


class Ports:
    """All ports of one ferry, by their number.

    Args:
        frames: where the other end is told that a port has ended.
        selector: watches the ports from which something may come.
        odd: whether the numbers that this end gives are odd.
    """

    def __init__(self, frames: Frames, selector: selectors.BaseSelector, *, odd: bool) -> None:
        self._frames, self._selector = frames, selector
        self._known: dict[int, Port] = {}
        self._numbers = iter(range(1 if odd else 2, 1 << 62, 2))

    def __iter__(self) -> Iterator[Port]:
        """Those that there are now; they may be removed meanwhile."""
        return iter(list(self._known.values()))

    def __contains__(self, number: int) -> bool:
        return number in self._known

    def get(self, number: int) -> Port | None:
        """The port of that number; ``None`` if it has ended."""
        return self._known.get(number)

    def new_number(self) -> int:
        """A number that nothing else has."""
        return next(self._numbers)

    def add(self, port: Port) -> None:
        """Take charge of a port."""
        self._known[port.number] = port

    def add_channel(self, number: int, end: socket.socket, root: bool) -> None:
        """Take charge of our end of a channel."""
        end.setblocking(False)
        self.add(Channel(number, end, root))

    def remove(self, port: Port, tell: bool) -> None:
        """Close a port, and perhaps tell the other end."""
        if self._known.pop(port.number, None) is not None:
            watch(self._selector, port.fileno(), 0)
            port.close()
            if tell:
                self._frames.put(Kind.END, port.number)

    def watch(self) -> None:
        """Have the selector report what is said here, unless too much waits to be sent."""
        events = 0 if self._frames.full else selectors.EVENT_READ
        for port in self._known.values():
            if not isinstance(port, Sink):
                watch(self._selector, port.fileno(), events, port)

    def close(self) -> None:
        """Close all of them."""
        for port in self._known.values():
            port.close()


def watch(selector: selectors.BaseSelector, descriptor: int, events: int, data: object = None) -> None:
    """Have a selector watch a descriptor for these events from now on; 0 means for none."""
    key = selector.get_map().get(descriptor)
    if key is None:
        if events:
            selector.register(descriptor, events, data)
    elif not events:
        selector.unregister(descriptor)
    elif key.events != events:
        selector.modify(descriptor, events, data)
