"""Who may have agents forked, and what ends them: connections to a forkserver, and streams of an agent."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time

import psutil
import pytest

import torchopt_dist as todist
from tests.launch.families import assert_gone, forkserver_of, is_forkserver
from tests.launch.sshd import NEEDS_SSHD, Sshd
from tests.processes import ON_TWO, start_python
from torchopt_dist.launching import Launcher
from torchopt_dist.launching import _cluster as cluster
from torchopt_dist.launching import _forkserver as forkserver
from torchopt_dist.launching._messages import Stream

pytestmark = pytest.mark.timeout(60)


def agents():
    server = psutil.Process(forkserver._server.process.pid)
    servers = {server, *filter(is_forkserver, server.children())}
    return {child for each in servers for child in each.children()} - servers


def wait_for_agents(number, before, seconds=20.0):
    deadline = time.monotonic() + seconds
    while len(agents() - before) != number:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_connection_is_an_agent_that_gives_signs_of_life_and_its_end_is_the_agents():
    ON_TWO.run(int)
    before = agents()
    stream = Stream(forkserver.connect(os.environ))
    pid = None
    deadline = time.monotonic() + 20
    while pid is None:
        assert time.monotonic() < deadline
        for name, args in stream.receive() or ():
            assert name == "alive"
            (pid,) = args
    assert forkserver_of(pid) == forkserver._server.process.pid
    stream.close()
    assert_gone([pid])
    wait_for_agents(0, before)


STRANGER = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.connect(chr(0) + sys.argv[1])
    print("refused" if not stranger.recv(100) else "served")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_user_gets_no_agent():
    ON_TWO.run(int)
    before = agents()
    program = subprocess.run(
        [sys.executable, "-S", "-c", STRANGER, forkserver._server.address[1:]],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert program.stdout == "refused\n"
    assert agents() <= before
    assert ON_TWO.run(os.getpid).results  # and the others are served as before


def test_what_a_connection_says_is_for_its_agent_and_holds_nobody_else_up():
    ON_TWO.run(int)
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as odd:
        silent.connect(forkserver._server.address)
        odd.connect(forkserver._server.address)
        odd.sendall(struct.pack("!IQ", 3, 0) + b"odd")  # no pickle: that agent ends
        assert ON_TWO.run(os.getpid).results


MANY_FILES = """
import os, resource, signal, socket
from torchopt_dist.launching import _forkserver as forkserver
from torchopt_dist.launching import _processes as processes
processes.allow_many_files()
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(f"{chr(0)}todist-many-{os.getpid()}")
    listener.listen()
    address, high = listener.getsockname(), os.dup2(listener.fileno(), 1500)
server = os.fork()
if server == 0:
    forkserver.serve(high, os.getppid())
    os._exit(0)
with socket.socket(socket.AF_UNIX) as caller:
    caller.settimeout(20)
    caller.connect(address)
    os.close(high)
    print(len(caller.recv(100)) > 0)
os.kill(server, signal.SIGKILL)
"""


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1600, reason="needs 1600 open files")
def test_a_program_with_more_than_a_thousand_open_files_can_launch():
    """Its forkserver's socket keeps its number, which `select` would not take."""
    program = start_python("-c", MANY_FILES)
    out, err = program.communicate(timeout=40)
    assert (out, err) == ("True\n", "")


def test_a_server_that_has_ended_is_not_asked_though_its_successor_still_listens(monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(f"\0todist-dying-{os.getpid()}")
        dying.listen()
        dying.setblocking(False)
        old = forkserver._Server(dying.getsockname(), forkserver.read_on_import(os.environ), ended)
        monkeypatch.setattr(forkserver, "_server", old)
        with forkserver.connect(os.environ):
            assert forkserver._server is not old
        forkserver._server.stop()
        with pytest.raises(BlockingIOError):
            dying.accept()


SUCCESSION = """
import os, signal, socket, sys
from types import SimpleNamespace
import psutil
from tests.launch.families import assert_gone
from tests.waits import wait_until
from torchopt_dist.launching import _forkserver as forkserver
from torchopt_dist.launching._messages import FrameReader
(imports, begun), (may, go_on) = os.pipe(), os.pipe()

def import_when_told(name):
    os.write(begun, b"begun")
    os.read(may, 1)

def forks_agents():
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(20)
        caller.connect(listener.getsockname())
        reader = FrameReader()
        while not (heard := reader.feed(caller.recv(100))):
            pass
        _, (pid,) = heard[0]
        return psutil.Process(pid).ppid()

with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(f"{chr(0)}todist-succession-{os.getpid()}")
    listener.listen()
    server = os.fork()
    if server == 0:
        forkserver.PRELOAD_WHEN_IDLE = "a module that takes long"
        forkserver.importlib = SimpleNamespace(import_module=import_when_told)
        forkserver.serve(listener.fileno(), os.getppid())
        os._exit(0)
    assert forks_agents() == server
    assert os.read(imports, 10) == b"begun"
    assert forks_agents() == server  # nobody waits for the import
    os.write(go_on, b"1")
    wait_until(lambda: forks_agents() != server)
    successor = forks_agents()
    assert psutil.Process(successor).ppid() == server
    if sys.argv[1] == "successor":
        os.kill(successor, signal.SIGKILL)
        wait_until(lambda: forks_agents() == server)
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    assert_gone([successor])
"""


@pytest.mark.parametrize("ends_first", ["server", "successor"])
def test_no_launch_waits_for_what_only_some_workers_need(ends_first):
    """A successor imports it, and forks the agents from then on, until it or the forkserver ends."""
    out, err = start_python("-c", SUCCESSION, ends_first).communicate(timeout=50)
    assert (out, err) == ("", "")


def test_launches_in_a_launch_use_the_same_forkserver():
    def server_and_agent():
        return forkserver_of(os.getppid()), os.getppid()

    def outer():
        inner = Launcher(nproc_per_host=1, handlers=[], log_dir=None).run(server_and_agent).rank(0)
        return inner, server_and_agent()

    (server, agent), (outer_server, outer_agent) = ON_TWO.run(outer).rank(0)
    assert server == outer_server == forkserver._server.process.pid
    assert agent != outer_agent


@NEEDS_SSHD
def test_where_connections_to_sockets_are_forbidden_a_program_makes_them(tmp_path, warm_executable):
    server = Sshd(tmp_path / "sshd", more="DisableForwarding yes\n")
    try:
        by_ssh = {"hosts": ["node1", "node2"], "ssh_config": server.config, "python": warm_executable}
        launcher = Launcher(nproc_per_host=1, handlers=[], **by_ssh)
        big = "x" * 3_000_000
        result = launcher.run(lambda value: (os.environ["RANK"], value), big)
        assert result.results == {"node1": [("0", big)], "node2": [("1", big)]}

        def die():
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)

        with pytest.raises(todist.errors.AgentFailedError, match=r"the agent on node[12] died"):
            launcher.run(die)
    finally:
        cluster.close_all(["node1", "node2"])
        server.stop()
