"""Machines that are made of network namespaces → worlds whose ranks live on them, and a network that can fail as asked.

What the machines send goes through this process, packet by packet, which can drop or delay each of them: the kernel's
own means for that (``netem``) are not everywhere. Each machine has an interface of the kind TUN, whose end is here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Self

import pytest

from tests.processes import World

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 65_535
_numbers = itertools.count()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def enter(namespace: str) -> None:
    """Have this thread, and what it starts, live in a network namespace."""
    with open(f"/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _open_interface(namespace: str) -> int:
    """The other end of a new interface ``net0`` there."""
    ends = []

    def work() -> None:  # in a thread of its own, as the namespace is a thread's
        enter(namespace)
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        ends.append(end)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", b"net0", IFF_TUN | IFF_NO_PI))

    errors: list[BaseException] = []

    def tell() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return ends[0]


class Hosts:
    """Machines in one network.

    Args:
        size: how many.

    Attributes:
        loss: the share of the packets that get lost.
        delay: seconds that each packet takes.
        lost: how many have.
        cut: pairs of hosts between which nothing passes.
    """

    def __init__(self, size: int) -> None:
        mark = f"todist{os.getpid()}h{next(_numbers)}"
        self.names = [f"{mark}{number}" for number in range(size)]
        self.addresses = [f"10.79.0.{number + 1}" for number in range(size)]
        self.loss, self.delay, self.lost = 0.0, 0.0, 0
        self.cut: set[frozenset[int]] = set()
        self._ends: list[int] = []
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="network", daemon=True)

    def __enter__(self) -> Self:
        if shutil.which("ip") is None:
            pytest.skip("needs iproute2's `ip`")
        try:
            for name, address in zip(self.names, self.addresses, strict=True):
                ip("netns", "add", name)
                self._ends.append(_open_interface(name))
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "address", "add", f"{address}/24", "dev", "net0")
                ip("-n", name, "link", "set", "net0", "up")
        except (subprocess.CalledProcessError, OSError) as error:
            self._remove()
            pytest.skip(f"no network namespaces with interfaces here: {error}")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._wake, b"\0")
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for descriptor in (*self._ends, self._woken, self._wake):
            os.close(descriptor)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def _carry(self) -> None:
        numbers = {socket.inet_aton(address): number for number, address in enumerate(self.addresses)}
        sources = {end: number for number, end in enumerate(self._ends)}
        chance, order = random.Random(0), itertools.count()
        waiting: list[tuple[float, int, int, bytes]] = []
        while True:
            left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select([self._woken, *self._ends], [], [], left)
            if self._woken in ready:
                return
            for end in ready:
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(end, MTU)
                    target = numbers.get(packet[16:20])
                    if packet[0] >> 4 != 4 or target is None:
                        continue
                    if chance.random() < self.loss:
                        self.lost += 1
                    elif frozenset((sources[end], target)) not in self.cut:
                        due = time.monotonic() + self.delay
                        heapq.heappush(waiting, (due, next(order), target, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # the interface's queue is full
                    os.write(self._ends[target], packet)

    def world(self, **env: str) -> World:
        """A world with one rank on each machine."""
        place = {"MASTER_ADDR": self.addresses[0], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        return World(len(self.names), env={**place, **env}, enter=_Enter(self.names))


class _Enter:
    """What each rank does first: it goes to its machine."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __call__(self, rank: int) -> None:
        name = self._names[rank]
        enter(name)
        for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            os.environ.pop(variable, None)
        socket.gethostname = lambda: name  # so that it shares no table of processes with the others
