"""Messages and pipes of one machine ⇄ frames on a stream ⇄ messages and pipes of another machine.

On one machine the launcher, the agents and the workers pass sockets, pipes and files in memory to each other. A ferry
at each end of a stream carries that over: what is sent here with a descriptor arrives there with one of the same kind.
A message that brings a socket opens a channel; one that brings a pipe makes bytes that are written there come out here;
a file in memory is copied. So neither a launcher nor an agent knows that the other is far away.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import pickle
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable

from torchopt_dist.launch.frames import Frames, Kind
from torchopt_dist.launch.messages import LARGEST, MOST_DESCRIPTORS, pair
from torchopt_dist.launch.ports import Channel, Pipe, Sink, Source

__all__ = ["NO_LIFE", "Ferry"]

CHUNK = 1 << 16
ALIVE_SECONDS = 1.0
SIGNS = 4
"""Signs of life are sent so often within the patience of the other end, and every second, if there is nothing else."""
BLOCKED_SECONDS = 0.01
"""Until what cannot be handed over yet is tried again."""
NO_LIFE = "there was no sign of life"
MOST_IN_TURN = 64
"""Messages of one channel that are taken before others have their turn."""


class Ferry:
    """One end of a stream.

    Args:
        into: descriptor that the other end's bytes come from; the ferry closes it.
        out: descriptor that bytes for the other end go to; may be the same one.
        odd: whether this end gives odd numbers; the other must give even ones.
        patience: seconds without a byte from the other end after which it counts as lost; the same at both ends.
        opener: answers :meth:`open` of the other end: payload → our end of a new channel. It may take its time.
        early: bytes that have been read from ``into`` already.
    """

    def __init__(
        self,
        into: int,
        out: int,
        *,
        odd: bool,
        patience: float,
        opener: Callable[[bytes], socket.socket] | None = None,
        early: bytes = b"",
    ) -> None:
        self._frames = Frames(into, out, early)
        self._patience, self._opener = patience, opener
        self._interval = min(ALIVE_SECONDS, patience / SIGNS)
        self._numbers = iter(range(1 if odd else 2, 1 << 62, 2))
        self._ports: dict[int, Channel | Pipe] = {}
        self._files: dict[int, int] = {}
        """Files that are arriving, by their number."""
        self._blocked: Callable[[], bool] | None = None
        """What cannot be handed over yet, to be tried again. Nothing that has arrived may pass it."""
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._lock = threading.Lock()
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._heard = time.monotonic()
        self._end: str | None = None
        self._closed = False

    # What other threads may call.

    def open(self, payload: bytes) -> socket.socket:
        """A channel that the other end's opener makes of ``payload``."""
        ours, theirs = pair()

        def start() -> None:
            channel = self._add_channel(next(self._numbers), theirs, root=True)
            self._frames.put(Kind.OPEN, channel.number, payload)

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
            self._deliver()
            while self._end is None:
                self._turn()
            return self._end
        finally:
            with self._lock:
                self._closed = True
            while self._calls:  # channels that were asked for just now: the asker sees their end
                self._calls.popleft()()
            for port in self._ports.values():
                port.close()
            self._frames.close()
            for descriptor in (self._woken, self._wake, *self._files.values()):
                os.close(descriptor)
            self._selector.close()

    def _turn(self) -> None:
        reading = self._blocked is None
        self._watch_all(reading)
        heard = False
        ready: list[Channel | Pipe] = []
        for key, mask in self._selector.select(self._until_sign() if reading else BLOCKED_SECONDS):
            if key.fd == self._woken:
                self._take_calls()
            elif key.data is not None:
                ready.append(key.data)
            elif key.fd == self._frames.into and mask & selectors.EVENT_READ:
                heard = True
                self._receive()
        # Output first, then what workers say, and last what their agent says of them: that they have ended.
        for port in sorted(ready, key=lambda port: (isinstance(port, Channel), getattr(port, "root", False))):
            self._take_from(port)
        self._deliver()
        self._send()
        now = time.monotonic()
        if now - self._frames.spoke >= self._interval and not self._frames.to_send:
            self._frames.put(Kind.ALIVE, 0)
        if heard or not reading:
            self._heard = now
        elif now - self._heard > self._patience:
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
            self._watch(descriptor, events, None)
        for port in self._ports.values():
            if not isinstance(port, Sink):
                self._watch(port.fileno(), 0 if frames.full else selectors.EVENT_READ, port)

    def _watch(self, descriptor: int, events: int, data: object) -> None:
        key = self._selector.get_map().get(descriptor)
        if key is None:
            if events:
                self._selector.register(descriptor, events, data)
        elif not events:
            self._selector.unregister(descriptor)
        elif key.events != events:
            self._selector.modify(descriptor, events, data)

    def _take_calls(self) -> None:
        os.read(self._woken, CHUNK)
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

    def _add_channel(self, number: int, end: socket.socket, root: bool) -> Channel:
        end.setblocking(False)
        channel = self._ports[number] = Channel(number, end, root)
        return channel

    def _remove(self, port: Channel | Pipe, tell: bool) -> None:
        if self._ports.pop(port.number, None) is not None:
            self._watch(port.fileno(), 0, None)
            port.close()
            if tell:
                self._frames.put(Kind.END, port.number)

    # From this machine to the stream.

    def _take_from(self, port: Channel | Pipe) -> None:
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
                self._remove(source, tell=True)

    def _take_message(self, channel: Channel) -> bool:
        """Take one message; whether there may be another."""
        if channel.number not in self._ports:
            return False
        try:
            data, descriptors, _, _ = socket.recv_fds(
                channel.socket, LARGEST, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except ConnectionError:
            data, descriptors = b"", []
        if channel.root:
            self._take_all_but_roots()
        if not data:
            self._remove(channel, tell=True)
            return False
        cargo = [self._load(channel, descriptor) for descriptor in descriptors]
        self._frames.put(Kind.MESSAGE, channel.number, pickle.dumps((data, cargo)))
        return True

    def _take_all_but_roots(self) -> None:
        """What an agent says of a worker must not overtake what the worker has said before."""
        for port in list(self._ports.values()):
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
                channel.sent[identity] = (next(self._numbers), descriptor)
                self._frames.put_file(channel.sent[identity][0], os.dup(descriptor), state.st_size)
            return ("file", channel.sent[identity][0])
        number = next(self._numbers)
        if stat.S_ISSOCK(state.st_mode):
            self._add_channel(number, socket.socket(fileno=descriptor), root=False)
            return ("channel", number)
        os.set_blocking(descriptor, False)
        self._ports[number] = Sink(number, descriptor)
        return ("pipe", number)

    # From the stream to this machine.

    def _deliver(self) -> None:
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
            self._remove(port, tell=False)

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
                self._add_channel(number, answers[0], root=True)
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
                self._remove(channel, tell=True)
            for descriptor in given:
                os.close(descriptor)
            return True

        self._try(send)

    def _open_end(self, kind: str, number: int) -> int:
        """The end to give away of a new channel or pipe."""
        if kind == "channel":
            ours, theirs = pair()
            self._add_channel(number, ours, root=False)
            return theirs.detach()
        end, into = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(end, False)
        self._ports[number] = Source(number, end)
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
                    self._remove(sink, tell=True)
            return True

        return pour
