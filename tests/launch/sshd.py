"""A folder, an address → OpenSSH's server there for this user alone, and a configuration file that knows it."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess

import pytest

from tests.processes import free_port
from tests.waits import wait_until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
NEEDS_SSHD = pytest.mark.skipif(SSHD is None, reason="there is no sshd (Debian: openssh-server)")


class Sshd:
    """A server that lets this user in by a key made for it.

    Args:
        folder: for its keys, its configuration and its log.
        address: where it listens.
        names: what the configuration file calls it.
        prefix: a command that runs it, such as `ip netns exec name`.
        more: lines of its configuration.

    Attributes:
        config: what a launcher's `ssh_config` wants: `node1`, `node2` and `node3` are this server.
        port: where it listens.
    """

    def __init__(self, folder, address="127.0.0.1", names=("node1", "node2", "node3"), prefix=(), more=""):
        self.folder, self.address, self.port = folder, address, free_port()
        folder.mkdir(exist_ok=True)
        for name in ("host_key", "user_key"):
            if not (folder / name).exists():
                command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
                subprocess.run(command, check=True)
        os.makedirs("/run/sshd", exist_ok=True) if os.getuid() == 0 else None
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nPidFile none\nUsePAM no\n"
            "StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\n"
            f"MaxStartups 100\nPrintMotd no\n{more}"
        )
        key = (folder / "host_key.pub").read_text().rsplit(" ", 1)[0]
        known = f"[{address}]:{self.port}" if self.port != 22 else address
        (folder / "known_hosts").write_text(f"{known} {key}\n")
        self.config = folder / "config"
        named = [self.entry(name, address) for name in names]
        self.config.write_text("".join([*named, self.entry("*", None)]))
        listen = ["-o", f"ListenAddress={address}", "-p", str(self.port)]
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.process = subprocess.Popen(
            [*prefix, SSHD, "-D", "-e", "-f", str(folder / "sshd_config"), *listen],
            stderr=log,
            env={"PATH": os.environ["PATH"]},
            start_new_session=True,
        )
        os.close(log)
        wait_until(lambda: f"listening on {address}" in self.log(), 10.0, self.log)

    def entry(self, name, address, **more):
        """What a configuration file says of a host."""
        options = {
            "HostName": address,
            "Port": self.port,
            "User": getpass.getuser(),
            "IdentityFile": self.folder / "user_key",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self.folder / "known_hosts",
            **more,
        }
        lines = [f"  {key} {value}\n" for key, value in options.items() if value is not None]
        return f"Host {name}\n" + "".join(lines)

    def stop(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log(self):
        return (self.folder / "log").read_text()
