"""Names → machines in one network: network namespaces, each with a host name and an address of its own, on a bridge."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.hosts import ip

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name, path=PATH) is None]
NEEDS_MACHINES = pytest.mark.skipif(
    bool(missing) or os.getuid() != 0, reason=f"needs root and iproute2, without {missing}"
)
NETWORK = "10.76.0"
_numbers = itertools.count()


class Machines:
    """Machines that can reach each other.

    Args:
        folder: for their files; each machine sees all files.
        names: the host names; the bridge is on the first machine.
        published: other names by which all of them know a machine.

    Attributes:
        names: the host names.
        addresses: the address of each.
    """

    def __init__(self, folder: Path, names: Sequence[str], published: dict[str, str] | None = None) -> None:
        self.folder, self.names = folder, list(names)
        self.addresses = {name: f"{NETWORK}.{number + 1}" for number, name in enumerate(names)}
        mark = f"todist{os.getpid()}m{next(_numbers)}n"
        self._namespaces = {name: f"{mark}{number}" for number, name in enumerate(names)}
        known = {name: name for name in names} if published is None else published
        hosts = "".join(f"{self.addresses[name]} {each}\n" for each, name in known.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")

    def make(self) -> None:
        """Make the machines; skip the test where that is forbidden."""
        hub, *others = self._namespaces.values()
        try:
            for namespace in self._namespaces.values():
                ip("netns", "add", namespace)
                ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", hub, "link", "add", "net0", "type", "bridge")
            for number, namespace in enumerate(others):
                ends = (("netns", hub, "name", f"to{number}"), ("netns", namespace, "name", "net0"))
                ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
                ip("-n", hub, "link", "set", f"to{number}", "master", "net0", "up")
            for name, namespace in self._namespaces.items():
                ip("-n", namespace, "address", "add", f"{self.addresses[name]}/24", "dev", "net0")
                ip("-n", namespace, "link", "set", "net0", "up")
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")

    def command(self, *words: object, on: str, first: str = ":") -> list[str]:
        """A command → the one that runs it on a machine.

        Args:
            words: the command.
            on: the name of the machine.
            first: what the shell does before it, such as mounts that only this command sees.
        """
        names = f"hostname {on} && mount --bind {self.folder}/hosts /etc/hosts"
        own = ["sh", "-c", f"{names} && {first} && exec {shlex.join(map(str, words))}"]
        return ["nsenter", f"--net=/run/netns/{self._namespaces[on]}", "unshare", "--uts", "--mount", *own]

    def processes(self, on: str) -> list[psutil.Process]:
        """What runs on a machine."""
        found = []
        for pid in self._pids(on):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def cut(self, on: str) -> None:
        """Take a machine from the network."""
        ip("-n", self._namespaces[on], "link", "set", "net0", "down")

    def join(self, on: str) -> None:
        """Give it back."""
        ip("-n", self._namespaces[on], "link", "set", "net0", "up")

    def kill(self, on: str) -> None:
        """Kill all that runs on a machine."""
        for _ in range(2):  # what has been forked meanwhile
            for pid in self._pids(on):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        """Kill everything, and remove the machines."""
        for name, namespace in self._namespaces.items():
            self.kill(name)
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)

    def _pids(self, on: str) -> list[int]:
        words = ["ip", "netns", "pids", self._namespaces[on]]
        return [int(pid) for pid in subprocess.run(words, capture_output=True, text=True).stdout.split()]
