"""A machine → its cores and GPUs, and connections to new agents on it."""

from __future__ import annotations

import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping

import psutil
import torch

from torchopt_dist.launching import _forkserver as forkserver
from torchopt_dist.launching import _processes as processes
from torchopt_dist.launching._store import LOOPBACK

__all__ = ["Machine", "ThisMachine", "is_this_machine"]


class Machine(ABC):
    """A machine, this one or another.

    Attributes:
        name: its name in errors.
        here: whether it is this machine.
        cores: the number of processor cores that workers may use.
        gpus: the number of its GPUs.
        env: the environment that programs have there.
        path: ``sys.path`` there.
        address: the address at which the launcher reaches it.
        launcher_address: the address at which it reaches the launcher, if there is no jump host between them.
    """

    name: str
    here: bool
    cores: int
    gpus: int
    env: Mapping[str, str]
    path: list[str]
    address: str = LOOPBACK
    launcher_address: str = LOOPBACK

    @abstractmethod
    def connect(self, env: Mapping[str, str]) -> socket.socket:
        """A connection to a new agent there.

        Args:
            env: the environment that its workers will have.

        Raises:
            OSError: the system lets no process be started, or no file be opened.
        """

    @abstractmethod
    def kill(self, pid: int) -> None:
        """Kill a process that gives no sign of life: a worker, or an agent, whose workers end with it."""

    def why_lost(self, seconds: float = 0.0) -> str | None:
        """The reason for which the machine cannot be reached any more; ``None`` while it can.

        Args:
            seconds: how long to wait for the reason to become known.
        """
        return None


class ThisMachine(Machine):
    """The machine that the launcher runs on."""

    name = "this machine"
    here = True

    def __init__(self) -> None:
        self.cores, self.gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
        self.env, self.path = dict(os.environ), list(sys.path)

    def connect(self, env: Mapping[str, str]) -> socket.socket:
        """A connection to an agent that this process's own forkserver forks."""
        return forkserver.connect(env)

    def kill(self, pid: int) -> None:
        """Kill a process."""
        processes.kill(pid)


def is_this_machine(name: str) -> bool:
    """Whether a host is this machine, under one of its names or addresses."""
    own = socket.gethostname()
    addresses = {a.address for known in psutil.net_if_addrs().values() for a in known}
    return name in {"localhost", "127.0.0.1", "::1", own, own.partition(".")[0]} | addresses
