"""A socket or a pipe that a process on this machine holds the other end of: what a ferry carries from and to."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

__all__ = ["Channel", "Pipe", "Sink", "Source"]


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
