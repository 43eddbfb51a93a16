"""Hosts → the store of their rendezvous, at an address that they reach; it is held by the launcher."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from torchopt_dist.launch.cluster import Host
from torchopt_dist.launch.elastic.records import HERE, STORE_SECONDS
from torchopt_dist.launch.machine import Machine, ThisMachine
from torchopt_dist.launch.meeting import EVERYWHERE, LOOPBACK, Meeting, listen, store_at

__all__ = ["RendezvousStore", "open_store"]


def open_store(hosts: list[Host], port: int) -> RendezvousStore:
    """Open the store.

    Args:
        hosts: that shall reach it.
        port: where it listens; 0 means any free port.

    Raises:
        InitializationError: the port is taken, or not all hosts reach this machine.
        AgentFailedError: a host was lost.
    """
    return _Door(port) if _is_alone(hosts) else RendezvousStore(hosts, port)


def _is_alone(hosts: list[Host]) -> bool:
    """Whether no other machine has been reached, but some may be later."""
    others = [host.machine for host in hosts if not host.machine.here]
    return bool(others) and all(machine.why_lost() is not None for machine in others)


class RendezvousStore:
    """The store, in this process, at an address that all machines reach. It lives until :meth:`close`.

    Attributes:
        port: where it listens.
    """

    _client: dist.TCPStore | None = None

    def __init__(self, hosts: list[Host], port: int) -> None:
        here = next((host.machine for host in hosts if host.machine.here), None) or ThisMachine()
        reached = [host.machine for host in hosts if host.machine.why_lost() is None]
        self._meeting = Meeting([here, *reached], port)
        self.port = self._meeting.port

    def address_for(self, machine: Machine) -> str:
        """Where a machine finds the store."""
        del machine
        return self._meeting.address

    def note_reached(self, machine: Machine) -> None:
        """Take note that a machine has been reached, perhaps for the first time."""

    def connect(self) -> None:
        """What must be done before :meth:`set`."""
        self._client = dist.TCPStore(
            self.address_for(ThisMachine()),
            self.port,
            None,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_SECONDS),
        )

    def set(self, key: str, value: str) -> None:
        """Tell the hosts."""
        assert self._client is not None
        self._client.set(key, value)

    def close(self) -> None:
        """End it."""
        self._client = None
        self._meeting.close()


class _Door(RendezvousStore):
    """The same, at all addresses, since it is not known yet which of them other machines will reach."""

    def __init__(self, port: int) -> None:
        listener = listen(EVERYWHERE, port)
        self.port = listener.getsockname()[1]
        self._server: dist.TCPStore | None = store_at(listener)

    def address_for(self, machine: Machine) -> str:
        """Where a machine finds the store."""
        return LOOPBACK if machine.here else machine.launcher_address

    def note_reached(self, machine: Machine) -> None:
        """The hosts shall know by which address others find the launcher's machine."""
        if not machine.here and self._client is not None:
            self._client.set(HERE, machine.launcher_address)

    def close(self) -> None:
        """End it."""
        self._client = self._server = None
