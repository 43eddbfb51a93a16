"""What keeps a host from taking part: an error that names host and cause, within seconds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

import torchopt_dist as todist
from tests.launch.sshd import NEEDS_SSHD
from tests.processes import free_port
from torchopt_dist.launching import Launcher
from torchopt_dist.launching import _connections as connections
from torchopt_dist.launching import _machines as machines
from torchopt_dist.launching._connections import in_loop, log_in

pytestmark = [pytest.mark.timeout(120), NEEDS_SSHD]


def refuse(launcher, message, *hosts, error=todist.errors.InitializationError, **options):
    start = time.monotonic()
    with pytest.raises(error, match=message):
        launcher(hosts or ["node1"], **options).run(os.getpid)
    assert time.monotonic() - start < 20


def test_an_unknown_host(launcher):
    refuse(launcher, r"nowhere\.invalid cannot be reached by SSH: the name is unknown", "nowhere.invalid")


def test_several_that_cannot_be_reached_are_all_named(launcher):
    refuse(launcher, r"(?s)a\.invalid cannot .*b\.invalid cannot", "a.invalid", "node1", "b.invalid")


def test_a_host_where_nothing_listens(launcher):
    name = f"{os.environ.get('USER', 'root')}@127.0.0.2:{free_port()}"
    refuse(launcher, rf"{name} cannot be reached by SSH: .*Connect call failed|refused", name)


def test_a_host_that_refuses_the_key(sshd, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    config = tmp_path / "config"
    config.write_text(sshd.config.read_text().replace(f"{sshd.folder}/user_key", f"{tmp_path}/other"))
    with pytest.raises(
        todist.errors.InitializationError, match="node1 cannot be reached by SSH: it refuses the login"
    ):
        Launcher(hosts=["node1"], nproc_per_host=1, ssh_config=config).run(os.getpid)


def test_a_host_that_is_not_known(sshd, tmp_path):
    config = tmp_path / "config"
    config.write_text(sshd.config.read_text().replace(f"{sshd.folder}/known_hosts", os.devnull))
    with pytest.raises(todist.errors.InitializationError, match=r"node1 .*not in the file of known hosts"):
        Launcher(hosts=["node1"], nproc_per_host=1, ssh_config=config).run(os.getpid)


def relayed(port, cut_off):
    """A server before another one's port, which cuts the first connections off; the address, and those it took."""

    async def carry(reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def take(reader, writer):
        taken.append(writer)
        if len(taken) <= cut_off:
            writer.transport.abort()
            return
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, there[1]), carry(there[0], writer), return_exceptions=True)

    taken = []
    server = in_loop(asyncio.start_server(take, "127.0.0.1", 0)).result(10)
    return server, taken


def log_in_by(sshd, relay):
    port = relay.sockets[0].getsockname()[1]
    config = sshd.folder / "relayed"
    config.write_text(sshd.entry("*", "127.0.0.1", Port=port, HostKeyAlias=f"[127.0.0.1]:{sshd.port}"))
    return in_loop(log_in("node1", str(config), 5.0, 10.0)).result(20)


def test_a_login_that_is_cut_off_is_tried_again(sshd):
    relay, taken = relayed(sshd.port, cut_off=2)
    try:
        in_loop(closed(log_in_by(sshd, relay))).result(10)
        assert len(taken) == 3
    finally:
        in_loop(closed(relay)).result(10)


async def closed(server):
    server.close()


def test_logins_that_are_all_cut_off_are_an_error(sshd, monkeypatch):
    monkeypatch.setattr(connections, "PAUSES", (0.0, 0.0))
    relay, taken = relayed(sshd.port, cut_off=100)
    try:
        with pytest.raises(
            todist.errors.InitializationError, match=r"node1 cannot be reached by SSH: .*onnection"
        ):
            log_in_by(sshd, relay)
        assert len(taken) == 3
    finally:
        in_loop(closed(relay)).result(10)


def test_a_host_that_does_not_answer(sshd):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        name = f"127.0.0.3:{silent.getsockname()[1]}".replace("127.0.0.3", "127.1")
        launcher = Launcher(hosts=[name], nproc_per_host=1, ssh_config=sshd.config, start_timeout=1.5)
        with pytest.raises(todist.errors.InitializationError, match=r"there was no answer within 1\.5 s"):
            launcher.run(os.getpid)


def test_a_host_without_that_python(launcher):
    refuse(launcher, "node1 has no /no/such/python; `python` says", python="/no/such/python")


def test_a_host_without_the_package(launcher, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -c "import torchopt_dist"\n')
    python.chmod(0o755)
    refuse(launcher, "on node1 has no package torchopt_dist: install it there", python=str(python))


@pytest.mark.parametrize("what", ["torch", "Python", "torchopt_dist", "cloudpickle"])
def test_a_host_with_another_version(launcher, monkeypatch, what):
    versions = machines.versions()
    monkeypatch.setattr(machines, "versions", lambda: {**versions, what: "1.2.3"})
    # A name that no launch has reached yet: forkservers that are there are not asked again.
    message = f"all hosts must have the same {what}, and node3 has {versions[what]}, this machine 1.2.3"
    refuse(launcher, message, "node3")


def test_a_host_without_the_folder(launcher, monkeypatch, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    monkeypatch.setattr(os, "getcwd", lambda: str(folder))
    refuse(launcher, f"the working folder must be on all hosts, and {folder} is not on node3", "node3")


def test_a_port_that_is_taken_there(launcher):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        refuse(
            launcher,
            f"`master_port` must be free .* got {port}.* on node1",
            "node1",
            "node2",
            master_port=port,
        )


@pytest.mark.parametrize("name", ["a b", "node1:", "node1:port", "@node1", "user@", "x@y@z:1:2"])
def test_a_name_of_another_form(launcher, name):
    with pytest.raises(ValueError, match=r"`hosts` must hold names of the form \[user@\]host\[:port\], got"):
        launcher([name]).run(os.getpid)


def test_without_asyncssh_the_error_says_what_to_install(launcher, monkeypatch):
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    refuse(launcher, r"needs asyncssh: pip install 'torchopt_dist\[ssh\]'", "node3")
