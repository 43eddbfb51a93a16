"""However a worker, an agent, a forkserver or the launcher ends: the launch tells it, and nothing is left elsewhere."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import psutil
import pytest

import torchopt_dist as todist
from tests.functions import MyError
from tests.launch.families import alive, assert_gone, family_of, forkserver_of, start_a_family
from tests.launch.sshd import NEEDS_SSHD
from tests.processes import start_python
from tests.waits import say, watch
from torchopt_dist.launching import _cluster as cluster

pytestmark = [pytest.mark.timeout(120), NEEDS_SSHD]


def test_what_a_worker_there_raises_is_raised_at_once(launcher, tmp_path):
    def work():
        if os.environ["RANK"] == "0":
            assert watch(tmp_path / "family1")
            say(tmp_path / "raised", str(time.monotonic()))
            raise MyError(code=3)
        start_a_family(tmp_path)
        threading.Event().wait()

    with pytest.raises(MyError, match="code 3") as caught:
        launcher(["node1", "node2"]).run(work)
    # The last second may go by until the other host's worker, told by SIGTERM, has ended.
    assert time.monotonic() - float((tmp_path / "raised").read_text()) < 3
    assert caught.value.worker == "rank 0 on node1"
    assert caught.value.code == 3
    assert "raise MyError(code=3)" in caught.value.remote_traceback
    assert_gone([int(pid) for pid in (tmp_path / "family1").read_text().split()])


def wait():
    threading.Event().wait()


def crash(how, folder):
    print("last", "words")
    if os.environ["RANK"] == "1":
        start_a_family(folder)
        how()
    threading.Event().wait()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 on node2 was ended by SIGKILL"),
        (lambda: os._exit(0), "rank 1 on node2 exited with code 0"),
        (lambda: sys.exit(3), r"rank 1 on node2 called sys.exit\(3\)"),
    ],
    ids=["killed", "gone", "sys.exit"],
)
def test_a_worker_there_that_ends_is_an_error_that_tells_how(launcher, tmp_path, how, message):
    with pytest.raises(todist.WorkerFailedError, match=message) as caught:
        launcher(["node1", "node2"]).run(crash, how, tmp_path)
    assert caught.value.log == ("last words",)
    assert_gone([int(pid) for pid in (tmp_path / "family1").read_text().split()])


def test_an_agent_there_that_dies_is_named_and_leaves_nothing(launcher, tmp_path):
    def kill_the_agent():
        assert watch(tmp_path / "family1")
        os.kill(int((tmp_path / "family1").read_text().split()[-1]), signal.SIGKILL)

    thread = threading.Thread(target=kill_the_agent)
    thread.start()
    with pytest.raises(
        todist.errors.AgentFailedError, match="the agent on node2 died; rank 1 on node2 was ended"
    ):
        launcher(["node1", "node2"]).run(crash, wait, tmp_path)
    thread.join()
    assert_gone([int(pid) for pid in (tmp_path / "family1").read_text().split()])


def test_a_forkserver_that_dies_is_a_lost_host_and_the_next_launch_has_a_new_one(launcher, tmp_path):
    def kill_the_server():
        assert watch(tmp_path / "family1")
        server = forkserver_of(int((tmp_path / "family1").read_text().split()[-1]))
        say(tmp_path / "killed", str(time.monotonic()))
        os.kill(server, signal.SIGKILL)

    thread = threading.Thread(target=kill_the_server)
    thread.start()
    with pytest.raises(
        todist.errors.AgentFailedError,
        match="the agent on node2 was lost: its forkserver was ended by SIGKILL",
    ):
        launcher(["node1", "node2"]).run(crash, wait, tmp_path)
    thread.join()
    assert time.monotonic() - float((tmp_path / "killed").read_text()) < 5
    assert_gone([int(pid) for pid in (tmp_path / "family1").read_text().split()])
    assert len(launcher(["node1", "node2"]).run(os.getpid).results) == 2


def test_an_agent_there_that_is_stopped_is_killed_and_named(launcher, tmp_path):
    def stop_the_agent():
        assert watch(tmp_path / "family1")
        os.kill(int((tmp_path / "family1").read_text().split()[-1]), signal.SIGSTOP)

    thread = threading.Thread(target=stop_the_agent)
    thread.start()
    message = "the agent on node2 gave no sign of life for 2 s, and was killed; rank 1 on node2 was ended"
    with pytest.raises(todist.errors.AgentFailedError, match=message):
        launcher(["node1", "node2"], liveness=todist.Liveness(patience=2)).run(crash, wait, tmp_path)
    thread.join()
    assert_gone([int(pid) for pid in (tmp_path / "family1").read_text().split()])


@pytest.mark.nightly
def test_an_ssh_server_that_is_stopped_is_a_lost_host(sshd, launcher, tmp_path):
    """As when the network is cut: there is no sign of life, in either direction."""
    cold = {"python": sys.executable}  # a forkserver that is a child of its SSH server's session
    stopped = []

    def stop_the_server():
        assert watch(tmp_path / "family1")
        session = psutil.Process(forkserver_of(int((tmp_path / "family1").read_text().split()[-1]))).parent()
        while session.pid != sshd.process.pid:
            session.suspend()
            stopped.append(session)
            session = session.parent()

    thread = threading.Thread(target=stop_the_server)
    thread.start()
    try:
        with pytest.raises(
            todist.errors.AgentFailedError,
            match="node2 was lost: there was no sign of life for 2 s; rank 1 on node2",
        ):
            launcher(["node1", "node2"], liveness=todist.Liveness(patience=2), **cold).run(
                crash, wait, tmp_path
            )
        thread.join()
        assert_gone([int(pid) for pid in (tmp_path / "family1").read_text().split()], 10.0)
    finally:
        for process in stopped:
            process.kill()
    assert len(launcher(["node1", "node2"]).run(os.getpid).results) == 2


LAUNCHER = """
import pathlib, sys, threading
from torchopt_dist.launching import Launcher
from tests.launch.families import start_a_family

def work():
    start_a_family(pathlib.Path(sys.argv[1]))
    threading.Event().wait()

Launcher(hosts=["node1"], nproc_per_host=2, ssh_config=sys.argv[2], python=sys.argv[3]).run(work)
"""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly),
        signal.SIGKILL,
    ],
)
def test_a_launcher_that_ends_leaves_nothing_on_other_hosts(sshd, warm_executable, tmp_path, number):
    program = start_python("-c", LAUNCHER, tmp_path, sshd.config, warm_executable)
    try:
        family = family_of(tmp_path)
        servers = [forkserver_of(agent) for agent in family[4::5]]
        program.send_signal(number)
        program.communicate(timeout=15)
        assert_gone([*family, *servers])
    finally:
        program.close()


def test_no_process_is_left_when_all_is_closed(sshd, launcher):
    pids = launcher(["node1"]).run(lambda: [os.getppid(), forkserver_of(os.getppid())]).rank(0)
    cluster.close_all()
    assert_gone(pids)
    assert not alive(pids)
