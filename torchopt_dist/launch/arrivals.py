"""Frames that have arrived → what they hold, handed over on this machine in its order."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable

from torchopt_dist.launch.frames import Frames, Kind
from torchopt_dist.launch.messages import pair
from torchopt_dist.launch.ports import Channel, Ports, Sink, Source

__all__ = ["BLOCKED_SECONDS", "Arrivals", "Opener"]

BLOCKED_SECONDS = 0.01
"""Until what cannot be handed over yet is tried again."""

Opener = Callable[[bytes], socket.socket]
"""What a channel is to be of → our end of it."""


class Arrivals:
    """What comes to this machine.

    Args:
        frames: where it comes from.
        ports: where it goes.
        opener: makes the channels that the other end opens; it may take its time.
    """

    def __init__(self, frames: Frames, ports: Ports, opener: Opener | None) -> None:
        self._frames, self._ports, self._opener = frames, ports, opener
        self._files: dict[int, int] = {}
        """Files that are arriving, by their number."""
        self._blocked: Callable[[], bool] | None = None
        """What cannot be handed over yet, to be tried again. Nothing that has arrived may pass it."""

    @property
    def blocked(self) -> bool:
        """Whether something cannot be handed over yet."""
        return self._blocked is not None

    def close(self) -> None:
        """Close the files that have not been handed over."""
        for descriptor in self._files.values():
            os.close(descriptor)

    def deliver(self) -> None:
        """Hand over what has arrived, in its order."""
        if self._blocked is not None:
            attempt, self._blocked = self._blocked, None
            self._try(attempt)
        while self._blocked is None:
            frame = self._frames.next()
            if frame is None:
                return
            self._handle(*frame)

    def _try(self, attempt: Callable[[], bool]) -> None:
        if not attempt():
            self._blocked = attempt

    def _handle(self, kind: Kind, number: int, content: bytes) -> None:
        port = self._ports.get(number)
        if kind is Kind.OPEN:
            self._try(self._answer(number, content))
        elif kind is Kind.PIECE:
            if number not in self._files:
                self._files[number] = os.memfd_create("todist", os.MFD_CLOEXEC)
            os.write(self._files[number], content)
        elif kind is Kind.MESSAGE:
            self._hand_on(number, *pickle.loads(content))
        elif kind is Kind.BYTES and isinstance(port, Sink):
            self._try(self._pour(port, memoryview(content)))
        elif kind is Kind.END and port is not None:
            self._ports.remove(port, tell=False)

    def _answer(self, number: int, payload: bytes) -> Callable[[], bool]:
        """Ask the opener, in a thread: it may take its time. What comes back tells whether it has answered."""
        answers: list[socket.socket | None] = []

        def ask() -> None:
            answer = None
            try:
                answer = self._opener(payload) if self._opener is not None else None
            finally:
                answers.append(answer)

        def answered() -> bool:
            if not answers:
                return False
            if answers[0] is None:
                self._frames.put(Kind.END, number)
            else:
                self._ports.add_channel(number, answers[0], root=True)
            return True

        thread = threading.Thread(target=ask, name="todist opener", daemon=True)
        thread.start()
        thread.join(BLOCKED_SECONDS)  # which is mostly enough
        return answered

    def _hand_on(self, number: int, data: bytes, cargo: list[tuple[str, int]]) -> None:
        """Send a message on a channel of this machine, with what came with it."""
        channel = self._ports.get(number)
        if not isinstance(channel, Channel):  # it has ended here, and the other end will soon know
            for kind, item in cargo:
                if kind != "file":
                    self._frames.put(Kind.END, item)
                elif item in self._files:
                    os.close(self._files.pop(item))
            return
        lent, given = [], []
        for kind, item in cargo:
            if kind == "file":
                if item in self._files:
                    channel.received[item] = self._files.pop(item)
                lent.append(channel.received[item])
            else:
                given.append(self._open_end(kind, item))
                lent.append(given[-1])

        def send() -> bool:
            try:
                if lent:
                    socket.send_fds(channel.socket, [data], lent)
                else:
                    channel.socket.send(data)
            except BlockingIOError:
                return False
            except OSError:  # nobody holds the other end any more
                self._ports.remove(channel, tell=True)
            for descriptor in given:
                os.close(descriptor)
            return True

        self._try(send)

    def _open_end(self, kind: str, number: int) -> int:
        """The end to give away of a new channel or pipe."""
        if kind == "channel":
            ours, theirs = pair()
            self._ports.add_channel(number, ours, root=False)
            return theirs.detach()
        end, into = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(end, False)
        self._ports.add(Source(number, end))
        return into

    def _pour(self, sink: Sink, data: memoryview) -> Callable[[], bool]:
        """What writes ``data`` into a pipe, as much at a time as fits, and tells whether all is written."""
        left = data

        def pour() -> bool:
            nonlocal left
            while left and sink.number in self._ports:
                try:
                    left = left[os.write(sink.end, left) :]
                except BlockingIOError:
                    return False
                except OSError:  # nobody reads it any more
                    self._ports.remove(sink, tell=True)
            return True

        return pour
