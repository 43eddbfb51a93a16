"""A machine, as a launch sees it: how many workers it has room for, and a way to have agents there."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping

import psutil
import torch

from torchopt_dist.launch import meeting
from torchopt_dist.launch.forkserver import request_agent
from torchopt_dist.launch.messages import pair

__all__ = ["Machine", "ThisMachine", "allow_many_files", "is_this_machine", "kill"]


class Machine(ABC):
    """What this machine and others have in common.

    Attributes:
        name: as errors call it.
        here: whether it is this one.
        cores: the number of processor cores that workers may use.
        gpus: the number of its GPUs.
        env: the environment that programs have there.
        path: ``sys.path`` there.
        address: where the launcher reaches it.
        launcher_address: where it reaches the launcher, if there is no jump host between them.
    """

    name: str
    here: bool
    cores: int
    gpus: int
    env: Mapping[str, str]
    path: list[str]
    address: str = meeting.LOOPBACK
    launcher_address: str = meeting.LOOPBACK

    @abstractmethod
    def request_agent(self, env: Mapping[str, str]) -> socket.socket:
        """Have an agent forked there.

        Args:
            env: the environment that its workers will have.

        Returns:
            The launcher's end of its control channel.
        """

    @abstractmethod
    def open_meeting(self) -> socket.socket:
        """A channel to what helps to find a place to meet, there."""

    @abstractmethod
    def kill_agent(self, pid: int) -> None:
        """End an agent that gives no sign of life. Its workers are ended with it."""

    @property
    def held_up_at(self) -> float:
        """When something that came from there, and all that came after it, was last held up here.

        By ``time.monotonic``: there has been no silence before.
        """
        return -math.inf

    def why_lost(self) -> str | None:
        """Why it cannot be reached any more; ``None`` while it can."""
        return None


class ThisMachine(Machine):
    """The machine that the launcher runs on."""

    name = "this machine"
    here = True

    def __init__(self) -> None:
        self.cores, self.gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
        self.env, self.path = dict(os.environ), list(sys.path)

    def request_agent(self, env: Mapping[str, str]) -> socket.socket:
        """Have an agent forked by this process's own forkserver."""
        return request_agent(env)

    def open_meeting(self) -> socket.socket:
        """A channel to a thread of this process."""
        ours, theirs = pair()
        threading.Thread(target=meeting.serve, args=(theirs,), name="todist meeting", daemon=True).start()
        return ours

    def kill_agent(self, pid: int) -> None:
        """Kill it."""
        kill(pid)


def kill(pid: int) -> None:
    """End a process, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def allow_many_files() -> None:
    """Let this process have as many open files as the system allows: a worker takes four to six of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_this_machine(name: str) -> bool:
    """Whether a host is this machine, under one of its names or addresses."""
    own = socket.gethostname()
    addresses = {a.address for known in psutil.net_if_addrs().values() for a in known}
    return name in {"localhost", "127.0.0.1", "::1", own, own.partition(".")[0]} | addresses
