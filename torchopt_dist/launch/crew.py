"""What the launcher knows of a worker, and of the agent that has forked it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
from dataclasses import dataclass, field
from typing import Any

from torchopt_dist.launch.cluster import Host
from torchopt_dist.launch.duties import read_value
from torchopt_dist.launch.logs import LineReader, WorkerLogs
from torchopt_dist.launch.messages import TOO_MANY_FILES, pair

__all__ = ["Agent", "Worker", "open_worker"]


@dataclass(eq=False)
class Worker:
    """What is known of one worker.

    Attributes:
        rank: its rank.
        local_rank: its rank on its host.
        host: the name of that.
        channel: on which it tells of its function.
        output: of standard output, and of standard error.
        pid: its process, once that is known.
        running: whether its function is about to be called, or has been.
        result: the descriptor of the packed value that it has returned.
        failed: whether there is an error that tells how it failed.
        status: its exit code, or minus a signal, once its process has ended.
        halted: since when it has been stopped, and by which signal.
    """

    rank: int
    local_rank: int
    host: str
    channel: socket.socket
    output: tuple[LineReader, ...]
    pid: int | None = None
    running: bool = False
    result: int | None = None
    failed: bool = False
    status: int | None = None
    halted: tuple[float, int] | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def decided(self) -> bool:
        """Whether it is known what came of its function."""
        return self.failed or self.result is not None

    def take_value(self) -> Any:
        """What it has returned; can be asked once.

        Raises:
            SerializationError: it cannot be read here.
        """
        assert self.result is not None
        descriptor, self.result = self.result, None
        return read_value(descriptor, str(self))

    def drain(self) -> None:
        """Hand on all that it has written."""
        for reader in self.output:
            reader.drain()

    def close(self) -> None:
        """Close its channel and the pipes of its output."""
        self.channel.close()
        for reader in self.output:
            reader.close()


def open_worker(rank: int, local_rank: int, host: str, logs: WorkerLogs) -> tuple[Worker, socket.socket]:
    """A worker that has not been forked yet, and its own end of its channel.

    Args:
        rank: its rank.
        local_rank: its rank on its host.
        host: the name of that.
        logs: where its lines go.

    Raises:
        OSError: this process has too many open files.
    """
    with contextlib.ExitStack() as opened:
        try:
            channel, for_worker = pair()
            opened.callback(channel.close)
            opened.callback(for_worker.close)
            output = []
            for stream in ("stdout", "stderr"):
                output.append(LineReader(logs, rank, local_rank, host, stream))
                opened.callback(output[-1].close)
                opened.callback(os.close, output[-1].for_worker)
        except OSError as error:
            raise OSError(error.errno, TOO_MANY_FILES) from error
        opened.pop_all()
    return Worker(rank, local_rank, host, channel, tuple(output)), for_worker


@dataclass(eq=False)
class Agent:
    """What is known of one agent.

    Attributes:
        host: where it is.
        control: on which it takes orders, and tells how workers end.
        workers: those that it was told to fork.
        pid: its process, once that is known.
        heard: when it last gave a sign of life.
        told_to_stop: whether it is to end.
        ended: whether it has ended, or counts as such.
    """

    host: Host
    control: socket.socket
    workers: list[Worker] = field(default_factory=list)
    pid: int | None = None
    heard: float = math.inf
    told_to_stop: bool = False
    ended: bool = False

    @property
    def waits_to_be_heard(self) -> bool:
        """Whether it has said something that nobody has taken yet."""
        ready = select.poll()
        ready.register(self.control, select.POLLIN)
        return bool(ready.poll(0))
