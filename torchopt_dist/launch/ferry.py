"""Messages and pipes of one machine ⇄ frames on a stream ⇄ messages and pipes of another machine.

On one machine the launcher, the agents and the workers pass sockets, pipes and files in memory to each other. A ferry
at each end of a stream carries that over: what is sent here with a descriptor arrives there with one of the same kind.
A message that brings a socket opens a channel; one that brings a pipe makes bytes that are written there come out here;
a file in memory is copied. So neither a launcher nor an agent knows that the other is far away.

The way of what is said: a port (``ports.py``) → ``departures.py`` → ``frames.py`` → the stream → ``frames.py`` →
``arrivals.py`` → a port there.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from torchopt_dist.launch.arrivals import BLOCKED_SECONDS, Arrivals, Opener
from torchopt_dist.launch.departures import Departures
from torchopt_dist.launch.frames import Frames, Kind
from torchopt_dist.launch.messages import pair
from torchopt_dist.launch.ports import Port, Ports, watch

__all__ = ["NO_LIFE", "Ferry"]

ALIVE_SECONDS = 1.0
SIGNS = 4
"""Signs of life are sent so often within the patience of the other end, and every second, if there is nothing else."""
WAKES = 1 << 16
"""Bytes that wake the loop, at most; it is enough to see one of them."""
NO_LIFE = "there was no sign of life"


class Ferry:
    """One end of a stream.

    Args:
        into: descriptor that the other end's bytes come from; the ferry closes it.
        out: descriptor that bytes for the other end go to; may be the same one.
        odd: whether this end gives odd numbers; the other must give even ones.
        patience: seconds without a byte from the other end after which it counts as lost; the same at both ends.
        opener: answers :meth:`open` of the other end: payload → our end of a new channel. It may take its time.
        early: bytes that have been read from ``into`` already.

    Attributes:
        held_up_at: when the other end last had to wait, since something could not be handed over yet.
    """

    def __init__(
        self,
        into: int,
        out: int,
        *,
        odd: bool,
        patience: float,
        opener: Opener | None = None,
        early: bytes = b"",
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._frames = Frames(into, out, early)
        self._ports = Ports(self._frames, self._selector, odd=odd)
        self._departures = Departures(self._frames, self._ports)
        self._arrivals = Arrivals(self._frames, self._ports, opener)
        self._patience, self._interval = patience, min(ALIVE_SECONDS, patience / SIGNS)
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._lock = threading.Lock()
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._heard = time.monotonic()
        self.held_up_at = -math.inf
        self._end: str | None = None
        self._closed = False

    # What other threads may call.

    def open(self, payload: bytes) -> socket.socket:
        """A channel that the other end's opener makes of ``payload``."""
        ours, theirs = pair()

        def start() -> None:
            number = self._ports.new_number()
            self._ports.add_channel(number, theirs, root=True)
            self._frames.put(Kind.OPEN, number, payload)

        self._call(start, theirs.close)
        return ours

    def close(self) -> None:
        """Have :meth:`run` return."""
        self._call(lambda: self._finish("it was closed"), lambda: None)

    @property
    def ended(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._closed

    def _call(self, function: Callable[[], object], otherwise: Callable[[], object]) -> None:
        with self._lock:
            if self._closed:
                otherwise()
                return
            self._calls.append(function)
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake, b"\0")

    # The loop.

    def run(self) -> str:
        """Carry until the stream ends.

        Returns:
            Why it ended.
        """
        self._heard = time.monotonic()
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            self._arrivals.deliver()
            while self._end is None:
                self._turn()
            return self._end
        finally:
            with self._lock:
                self._closed = True
            while self._calls:  # channels that were asked for just now: the asker sees their end
                self._calls.popleft()()
            self._ports.close()
            self._frames.close()
            self._arrivals.close()
            for descriptor in (self._woken, self._wake):
                os.close(descriptor)
            self._selector.close()

    def _turn(self) -> None:
        reading = not self._arrivals.blocked
        self._watch_all(reading)
        heard = False
        ready: list[Port] = []
        for key, mask in self._selector.select(self._until_sign() if reading else BLOCKED_SECONDS):
            if key.fd == self._woken:
                self._take_calls()
            elif key.data is not None:
                ready.append(key.data)
            elif key.fd == self._frames.into and mask & selectors.EVENT_READ:
                heard = True
                self._receive()
        self._departures.take(ready)
        self._arrivals.deliver()
        self._send()
        now = time.monotonic()
        if now - self._frames.spoke >= self._interval and not self._frames.to_send:
            self._frames.put(Kind.ALIVE, 0)
        if heard:
            self._heard = now
        if not reading:
            self.held_up_at = now
        if now - max(self._heard, self.held_up_at) > self._patience:
            self._finish(f"{NO_LIFE} for {self._patience:g} s")

    def _until_sign(self) -> float:
        """Seconds until the next sign of life is due."""
        if self._frames.to_send:
            return self._interval
        return max(0.0, self._frames.spoke + self._interval - time.monotonic())

    def _watch_all(self, reading: bool) -> None:
        frames = self._frames
        wanted = {frames.into: selectors.EVENT_READ if reading else 0}
        wanted[frames.out] = wanted.get(frames.out, 0) | (selectors.EVENT_WRITE if frames.to_send else 0)
        for descriptor, events in wanted.items():
            watch(self._selector, descriptor, events)
        self._ports.watch()

    def _take_calls(self) -> None:
        os.read(self._woken, WAKES)
        while self._calls:
            self._calls.popleft()()

    def _send(self) -> None:
        try:
            self._frames.send()
        except OSError as error:
            self._finish(f"it broke: {error.strerror}")

    def _receive(self) -> None:
        try:
            self._frames.receive()
        except EOFError:
            self._finish("the other end closed it")
        except OSError as error:
            self._finish(f"it broke: {error.strerror}")

    def _finish(self, why: str) -> None:
        self._end = self._end or why
