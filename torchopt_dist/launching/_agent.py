"""One stream to the launcher ⇄ the workers of one host in one launch: their starts, their output and their ends.

The agent is the only process on its host that communicates with the launcher. It forks the workers, forwards their
output, and reports how they end. It is the kernel's "child subreaper": a process that a worker has started, and whose
parent has ended, becomes the agent's child. So whatever workers start stays among the agent's descendants, and the
agent does not end before they have. When the launcher says so or ends, the agent ends all of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVarTuple

import setproctitle

from torchopt_dist.errors import InitializationError
from torchopt_dist.launching import _processes as processes
from torchopt_dist.launching import _store as store
from torchopt_dist.launching import _worker as worker
from torchopt_dist.launching._messages import Listening, Stream, ToAgent, ToLauncher
from torchopt_dist.process.out_of_memory import out_of_memory_kills
from torchopt_dist.process.signals import INTERRUPT

__all__ = ["Agent"]

Told = TypeVarTuple("Told")

CHUNK = 1 << 16
ALIVE_SECONDS = 1.0
"""Between two signs of life, until the launcher has said otherwise."""
INTERRUPT_SECONDS = 0.4
"""For workers to notice an interrupt; one that runs Python code notices it at once."""
LAST_WORDS_SECONDS = 5.0
"""For the launcher to take what workers have written before they ended."""
ORPHANED_GRACE = 1.0
"""Seconds that workers have when the launcher has ended and not waited for them, at most."""


@dataclass(frozen=True)
class _Worker:
    """A worker that has been forked.

    Attributes:
        rank: its rank.
        pipes: descriptor of the reading end of a pipe → the name of the pipe: ``stdout``, ``stderr`` or ``report``.
    """

    rank: int
    pipes: dict[int, str]


class Agent(ToAgent):
    """Looks after the workers of one host in one launch.

    Args:
        connection: the socket to the launcher.
        watched: descriptors of processes; the end of one of them means that the launcher has ended. The first is the
            process at the other end of the connection.
    """

    def __init__(self, connection: socket.socket, watched: list[int]) -> None:
        self._stream, self._peer = Stream(connection), watched[0]
        self._woken, self._wake = processes.wake_on_children()
        opened = [processes.open_process(pid) for pid in watched]
        self._launcher_ends = [descriptor for descriptor in opened if descriptor is not None]
        self._launcher_has_ended = len(self._launcher_ends) < len(watched)
        self._workers: list[_Worker] = []
        self._running: dict[int, _Worker] = {}
        """Those of them whose process has not ended, by that."""
        self._listeners: store.Listeners | None = None
        self._store: Any = None
        self._grace: float | None = None
        """Seconds for the workers to end, once they are to."""
        self._kills_before = out_of_memory_kills()
        self._between_signs = ALIVE_SECONDS
        self._spoke_at = -math.inf

    def run(self) -> None:
        """Work until the launcher says that the launch is over, or ends."""
        os.setsid()
        setproctitle.setproctitle(f"todist: agent of {self._peer}")
        processes.adopt_orphans()
        while self._grace is None and not self._launcher_has_ended:
            self._turn(self._between_signs)
        self._end(ORPHANED_GRACE if self._grace is None else self._grace)

    # The loop.

    def _turn(self, seconds: float) -> None:
        """Handle the next events; wait for them so many seconds."""
        self._speak()
        for act in processes.ready(self._watched(), seconds):
            act()

    def _watched(self) -> Iterator[tuple[int, bool, Callable[[], object]]]:
        """What is watched, with what is done; workers' pipes are not while the launcher does not read."""
        yield self._woken, False, self._wake_up
        if not self._launcher_has_ended:
            yield self._stream.fileno(), self._stream.waits_to_send, self._hear
            for descriptor in self._launcher_ends:
                yield descriptor, False, self._lose_launcher
        if self._listeners is not None:
            for listener in self._listeners:
                yield listener.fileno(), False, functools.partial(self._listeners.greet, listener)
        if self._launcher_has_ended or not self._stream.is_full:
            for writer in self._workers:
                for pipe in writer.pipes:
                    yield pipe, False, functools.partial(self._read_in_order, pipe, writer)

    def _speak(self) -> None:
        """Give a sign of life, if it is time for one."""
        now = time.monotonic()
        if now - self._spoke_at >= self._between_signs and not self._stream.waits_to_send:
            self._spoke_at = now
            self._tell(ToLauncher.alive, os.getpid())

    def _tell(self, message: Callable[[Any, Any, *Told], None], *args: *Told) -> None:
        if not self._launcher_has_ended:
            try:
                self._stream.put(message, *args)
            except OSError:
                self._lose_launcher()

    def _hear(self) -> None:
        try:
            self._stream.send()
            received = self._stream.receive()
        except (EOFError, OSError):
            self._lose_launcher()
            return
        for name, args in received or ():
            getattr(self, name)(*args)

    def _lose_launcher(self) -> None:
        self._launcher_has_ended = True

    def speak(self, seconds: float) -> None:
        """Give a sign of life as often as that from now on."""
        self._between_signs = seconds

    def stop(self, grace: float) -> None:
        """Leave the loop, to end."""
        self._grace = grace

    # The rendezvous.

    def listen(self, port: int, everywhere: bool) -> None:
        """Listen until the workers start, and say where."""
        try:
            self._listeners = store.Listeners(port, everywhere)
        except InitializationError as error:
            self._tell(ToLauncher.answered, Listening({}, b"", str(error)))
            return
        self._tell(ToLauncher.answered, self._listeners.where)

    def reach(self, where: Listening, seconds: float) -> None:
        """Say which addresses can be reached."""
        self._tell(ToLauncher.answered, store.reach(where, seconds, self._goes_on))

    def _goes_on(self) -> bool:
        """Handle all else that has happened; returns whether the launcher is still there."""
        self._turn(0.0)
        return self._grace is None and not self._launcher_has_ended

    # Starts of workers.

    def start(
        self,
        settings: bytes,
        env: dict[int, dict[str, str]],
        cores: frozenset[int] | None,
        umask: int | None,
        store: str | None,
        task: bytes,
    ) -> None:
        """Fork the workers, then make the store."""
        if cores is not None:
            os.sched_setaffinity(0, cores)
        if umask is not None:
            os.umask(umask)
        listener = None
        if self._listeners is not None and store is not None:
            listener = self._listeners.keep(store)
        try:
            for rank, own in env.items():
                work = functools.partial(worker.work, rank, settings, own, task)
                self._fork(rank, work, listener)
        except OSError as error:  # there are too many files or processes
            self._tell(ToLauncher.not_started, error.errno or 0, str(error.strerror))
            return
        if listener is not None:  # now, since no process should be forked from one that has threads
            threading.Thread(
                target=self._hold_store, args=(listener,), name="todist store", daemon=True
            ).start()

    def _hold_store(self, listener: socket.socket) -> None:
        """Make the store in a thread, since torch looks names up, which may take seconds."""
        try:
            self._store = store.store_at(listener)
        except RuntimeError as error:
            self._store = error
            os.write(self._wake, b"\0")

    def _fork(self, rank: int, work: Callable[..., NoReturn], listener: socket.socket | None) -> None:
        ends: dict[str, tuple[int, int]] = {}
        agent = os.getpid()
        try:
            for name in ("stdout", "stderr", "report"):
                ends[name] = os.pipe2(os.O_CLOEXEC)
            pid = os.fork()
        except OSError:
            for pair in ends.values():
                os.close(pair[0])
                os.close(pair[1])
            raise
        if pid == 0:
            try:
                self._become_worker(agent, [pair[0] for pair in ends.values()])
                if listener is not None:
                    listener.close()
                work(**{name: pair[1] for name, pair in ends.items()})
            finally:
                os._exit(1)
        forked = _Worker(rank, {reading: name for name, (reading, _) in ends.items()})
        for reading, writing in ends.values():
            os.close(writing)
            os.set_blocking(reading, False)
        self._workers.append(forked)
        self._running[pid] = forked
        self._tell(ToLauncher.started, rank, pid)

    def _become_worker(self, agent: int, not_for_it: list[int]) -> None:
        """In a process that has just been forked: close everything that belongs to the agent."""
        processes.end_with_parent(agent)  # should the agent be killed
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # SIGINT and SIGTERM are the worker's own to set
        os.setsid()
        of_others = [pipe for forked in self._workers for pipe in forked.pipes]
        for descriptor in (*not_for_it, *of_others, self._woken, self._wake, *self._launcher_ends):
            os.close(descriptor)
        self._stream.close()

    # What workers write, and how they end.

    def _read_in_order(self, pipe: int, writer: _Worker) -> None:
        """Forward a chunk; what a worker has printed comes before what it reports of that."""
        if writer.pipes.get(pipe) == "report":
            self._drain(writer, but=pipe)
        if pipe in writer.pipes:  # and was not closed since this turn began
            self._read(pipe, writer)

    def _read(self, pipe: int, writer: _Worker) -> bool:
        """Forward a chunk of what has been written into a pipe; returns whether there was any."""
        try:
            data = os.read(pipe, CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._tell(ToLauncher.written, writer.rank, writer.pipes[pipe], data)
            return True
        os.close(pipe)
        del writer.pipes[pipe]
        return False

    def _drain(self, writer: _Worker, but: int | None = None) -> None:
        """Forward all that a worker has written up to now, its last words to standard error after the rest.

        Its child processes may go on writing, so no more is read than the pipe can hold.

        Args:
            writer: the worker.
            but: the descriptor of a pipe to leave out.
        """
        import fcntl  # which only Unix has

        for pipe in [each for each in writer.pipes if each != but]:
            for _ in range(fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) // CHUNK + 1):
                if not self._read(pipe, writer):
                    break

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 1 << 12)
        if isinstance(self._store, RuntimeError):
            self._tell(ToLauncher.not_started, 0, str(self._store))
            self._store = None
        for pid, status in processes.reap(os.WUNTRACED | os.WCONTINUED):
            changed = self._running.get(pid)
            if changed is None:
                continue  # what a worker has started, and has not waited for
            self._drain(changed)
            if os.WIFSTOPPED(status):
                self._tell(ToLauncher.halted, changed.rank, os.WSTOPSIG(status))
            elif os.WIFCONTINUED(status):
                self._tell(ToLauncher.halted, changed.rank, None)
            else:
                del self._running[pid]
                killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                oom = killed and out_of_memory_kills() > self._kills_before
                self._tell(ToLauncher.exited, changed.rank, os.waitstatus_to_exitcode(status), oom)

    def _end(self, grace: float) -> None:
        """End the workers, and then kill all descendants of this process that are left.

        An interrupt lets ``finally`` blocks of a worker run. A worker in C code does not notice it, and is ended by
        SIGTERM. A worker that handles SIGTERM itself gets that alone.

        Args:
            grace: seconds that workers have before they are killed.
        """
        own = {pid: processes.handles(pid, signal.SIGTERM) for pid in self._running} if grace > 0 else {}
        for pid, handles in own.items():
            processes.kill(pid, signal.SIGTERM if handles else INTERRUPT)
            processes.kill(pid, signal.SIGCONT)  # should it have been stopped
        until = self._wait_for_ends(INTERRUPT_SECONDS, time.monotonic() + grace)
        for pid in self._running:
            if own.get(pid) is False and processes.handles(pid, INTERRUPT):  # it has not noticed
                processes.kill(pid, signal.SIGTERM)
        self._wait_for_ends(grace, until)
        processes.end_descendants(meanwhile=self._speak)
        for writer in self._workers:
            self._drain(writer)
        with contextlib.suppress(OSError):
            if not self._launcher_has_ended:
                self._stream.send_all(LAST_WORDS_SECONDS)

    def _wait_for_ends(self, seconds: float, until: float) -> float:
        """Wait for workers to end, so many seconds, and not after ``until``; that is earlier if the launcher ends."""
        launcher_waits, end = not self._launcher_has_ended, time.monotonic() + seconds
        while self._running and (left := min(end, until) - time.monotonic()) > 0:
            self._turn(min(self._between_signs, left))
            if launcher_waits and self._launcher_has_ended:
                until, launcher_waits = min(until, time.monotonic() + ORPHANED_GRACE), False
        return until
