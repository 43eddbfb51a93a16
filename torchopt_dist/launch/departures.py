"""What is said on this machine, with what comes with it → frames for the other machine."""

from __future__ import annotations

import fcntl
import os
import pickle
import socket
import stat
from collections.abc import Iterable

from torchopt_dist.launch.frames import Frames, Kind
from torchopt_dist.launch.messages import receive_data
from torchopt_dist.launch.ports import Channel, Port, Ports, Sink, Source

__all__ = ["Departures"]

CHUNK = 1 << 16
MOST_IN_TURN = 64
"""Messages of one channel that are taken before others have their turn."""


class Departures:
    """What leaves this machine.

    Args:
        frames: where it goes.
        ports: where it comes from.
    """

    def __init__(self, frames: Frames, ports: Ports) -> None:
        self._frames, self._ports = frames, ports

    def take(self, ready: Iterable[Port]) -> None:
        """Take from the ports at which there is something."""
        # Output first, then what workers say, and last what their agent says of them: that they have ended.
        for port in sorted(ready, key=lambda port: (isinstance(port, Channel), getattr(port, "root", False))):
            self._take_from(port)

    def _take_from(self, port: Port) -> None:
        if isinstance(port, Source):
            self._take_bytes(port, CHUNK)
        elif isinstance(port, Channel):
            for _ in range(MOST_IN_TURN):
                if not self._take_message(port):
                    break

    def _take_bytes(self, source: Source, most: int) -> None:
        while most > 0 and source.number in self._ports:
            try:
                data = os.read(source.end, CHUNK)
            except BlockingIOError:
                return
            most -= len(data)
            if data:
                self._frames.put(Kind.BYTES, source.number, data)
            else:
                self._ports.remove(source, tell=True)

    def _take_message(self, channel: Channel) -> bool:
        """Take one message; whether there may be another."""
        if channel.number not in self._ports:
            return False
        try:
            data, descriptors = receive_data(channel.socket)
        except BlockingIOError:
            return False
        except ConnectionError:
            data, descriptors = b"", []
        if channel.root:
            self._take_all_but_roots()
        if not data:
            self._ports.remove(channel, tell=True)
            return False
        cargo = [self._load(channel, descriptor) for descriptor in descriptors]
        self._frames.put(Kind.MESSAGE, channel.number, pickle.dumps((data, cargo)))
        return True

    def _take_all_but_roots(self) -> None:
        """What an agent says of a worker must not overtake what the worker has said before."""
        for port in self._ports:
            if isinstance(port, Source):
                self._take_bytes(port, fcntl.fcntl(port.end, fcntl.F_GETPIPE_SZ) + 1)
            elif isinstance(port, Channel) and not port.root:
                self._take_from(port)

    def _load(self, channel: Channel, descriptor: int) -> tuple[str, int]:
        """Take charge of a descriptor that came with a message: its kind and number."""
        state = os.fstat(descriptor)
        if stat.S_ISREG(state.st_mode):
            identity = (state.st_dev, state.st_ino)
            if identity in channel.sent:
                os.close(descriptor)
            else:
                channel.sent[identity] = (self._ports.new_number(), descriptor)
                self._frames.put_file(channel.sent[identity][0], os.dup(descriptor), state.st_size)
            return ("file", channel.sent[identity][0])
        number = self._ports.new_number()
        if stat.S_ISSOCK(state.st_mode):
            self._ports.add_channel(number, socket.socket(fileno=descriptor), root=False)
            return ("channel", number)
        os.set_blocking(descriptor, False)
        self._ports.add(Sink(number, descriptor))
        return ("pipe", number)
