"""Workers on other hosts, by SSH: what a launch on this machine does, it does there."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

import torchopt_dist as todist
from tests.distributed.bare import say, watch
from tests.launch.families import alive, assert_gone, family_of, start_a_family
from tests.launch.sshd import NEEDS_SSHD, Sshd
from tests.worlds import free_port
from torchopt_dist.launch import Launcher, remote

pytestmark = [pytest.mark.timeout(120), NEEDS_SSHD]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    for machine in remote._machines.values():
        machine.close()
    server.stop()


@pytest.fixture
def launcher(sshd):
    def make(hosts=("node1",), nproc_per_host=1, **options):
        options = {"ssh_config": sshd.config, "handlers": [], **options}
        return Launcher(hosts=list(hosts), nproc_per_host=nproc_per_host, **options)

    return make


def place():
    return os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], os.environ["WORLD_SIZE"]


def test_values_of_several_hosts_come_back(launcher):
    result = launcher(["node1", "localhost", "node2", "node1"], [2, 1, 1, 1]).run(place)
    assert result.results == {
        "node1": [("0", "0", "0", "5"), ("1", "1", "0", "5")],
        "localhost": [("2", "0", "1", "5")],
        "node2": [("3", "0", "2", "5")],
        "node1#2": [("4", "0", "3", "5")],
    }


def sum_of_ranks(start):
    dist.init_process_group("gloo")
    total = start + int(os.environ["RANK"])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total


@pytest.mark.parametrize("hosts", [["node1", "node2"], ["node1", "localhost"], ["localhost", "node1"]])
def test_workers_of_all_hosts_meet(launcher, hosts):
    result = launcher(hosts, 2).run(sum_of_ranks, torch.ones(2, requires_grad=True) * 1.0)
    assert [result.rank(i).tolist() for i in range(4)] == [[10.0, 10.0]] * 4
    assert result.rank(3).requires_grad


@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def loss_of(weight, x):
    return (x @ weight).square().mean()


@todist.rank_zero_only
def gradient(weight, x):
    return torch.autograd.grad(loss_of(todist.replicated(weight), x), weight)[0]


def test_remote_calls_between_hosts_are_differentiable(launcher):
    torch.manual_seed(0)
    weight, x = torch.randn(3, dtype=torch.double, requires_grad=True), torch.randn(6, 3, dtype=torch.double)
    result = launcher(["node1", "node2"], rpc=True).run(gradient, weight, x)
    (expected,) = torch.autograd.grad((x @ weight).square().mean(), weight)
    torch.testing.assert_close(result.rank(0), expected)


def test_large_arguments_results_and_outputs_arrive_whole(launcher, tmp_path):
    big = torch.arange(5_000_000, dtype=torch.float32)

    def work(x):
        for i in range(20_000):
            print(f"line {i} of {os.environ['RANK']}", "=" * 50)
        return x + int(os.environ["RANK"])

    result = launcher(["node1", "node2"], [2, 1], log_dir=tmp_path).run(work, big)
    for rank in range(3):
        assert torch.equal(result.rank(rank), big + rank)
        lines = (tmp_path / f"rank{rank}.log").read_text().splitlines()
        assert lines == [f"line {i} of {rank} {'=' * 50}" for i in range(20_000)]


class MyError(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


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


def relay_of(agent):
    """It has started the forkserver, and that the agent."""
    return psutil.Process(agent).parent().ppid()


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
    with pytest.raises(todist.AgentFailedError, match="the agent on node2 died; rank 1 on node2 was ended"):
        launcher(["node1", "node2"]).run(crash, wait, tmp_path)
    thread.join()
    assert_gone([int(pid) for pid in (tmp_path / "family1").read_text().split()])


def test_a_relay_that_dies_is_a_lost_host_and_the_next_launch_has_a_new_one(launcher, tmp_path):
    def kill_the_relay():
        assert watch(tmp_path / "family1")
        relay = relay_of(int((tmp_path / "family1").read_text().split()[-1]))
        say(tmp_path / "killed", str(time.monotonic()))
        os.kill(relay, signal.SIGKILL)

    thread = threading.Thread(target=kill_the_relay)
    thread.start()
    with pytest.raises(
        todist.AgentFailedError, match="the agent on node2 was lost: its relay was ended by SIGKILL"
    ):
        launcher(["node1", "node2"]).run(crash, wait, tmp_path)
    thread.join()
    assert time.monotonic() - float((tmp_path / "killed").read_text()) < 5
    assert_gone([int(pid) for pid in (tmp_path / "family1").read_text().split()])
    assert len(launcher(["node1", "node2"]).run(place).results) == 2


def test_a_relay_that_is_stopped_is_a_lost_host(launcher, tmp_path):
    """As when the network is cut: there is no sign of life."""

    def stop_the_relay():
        assert watch(tmp_path / "family1")
        relay = relay_of(int((tmp_path / "family1").read_text().split()[-1]))
        say(tmp_path / "stopped", f"{relay} {time.monotonic()}")
        os.kill(relay, signal.SIGSTOP)

    thread = threading.Thread(target=stop_the_relay)
    thread.start()
    with pytest.raises(todist.AgentFailedError, match="node2 was lost: there was no sign of life for 2 s"):
        launcher(["node1", "node2"], agent_timeout=2).run(crash, wait, tmp_path)
    thread.join()
    relay, then = (tmp_path / "stopped").read_text().split()
    assert time.monotonic() - float(then) < 7
    os.kill(int(relay), signal.SIGCONT)  # it finds that the launcher has gone
    assert_gone([int(pid) for pid in (tmp_path / "family1").read_text().split()])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_ends_leaves_nothing_on_other_hosts(sshd, tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import pathlib, sys, threading
            from torchopt_dist.launch import Launcher
            from tests.launch.families import start_a_family

            def work():
                start_a_family(pathlib.Path({str(tmp_path)!r}))
                threading.Event().wait()

            Launcher(hosts=["node1", "node2"], nproc_per_host=1, ssh_config={str(sshd.config)!r}).run(work)
            """
        )
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    program = subprocess.Popen([sys.executable, script], env=env, stderr=subprocess.PIPE)
    try:
        family = family_of(tmp_path)
        relays = [relay_of(agent) for agent in family[4::5]]
        program.send_signal(number)
        program.wait(15)
        assert_gone([*family, *relays])
    finally:
        program.kill()
        program.communicate()


def test_the_environment_there_is_its_own_with_what_is_copied_and_added(launcher, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_COPIED", "yes")
    monkeypatch.setenv("MY_OWN", "no")
    (tmp_path / "file").write_text("FROM_FILE=1\nBOTH=file\n")
    options = {"env": {"ADDED": "2", "BOTH": "env"}, "env_file": tmp_path / "file"}
    env = launcher(**options).run(lambda: dict(os.environ)).rank(0)
    assert "SSH_CONNECTION" in env  # that is, the host's own
    assert env["CUDA_COPIED"] == "yes"
    assert "MY_OWN" not in env
    assert (env["FROM_FILE"], env["ADDED"], env["BOTH"]) == ("1", "2", "env")
    env = launcher(copy_env=["MY_*"]).run(lambda: dict(os.environ)).rank(0)
    assert env["MY_OWN"] == "no"
    assert "CUDA_COPIED" not in env
    with pytest.raises(TypeError, match=r"`copy_env` must be a list of patterns, got 'MY_\*'"):
        launcher(copy_env="MY_*")


def test_a_second_launch_finds_the_relay_warm(launcher):
    where = launcher()
    where.run(place)
    before = {machine for key, machine in remote._machines.items() if key[1] == "node1"}
    start = time.monotonic()
    where.run(place)
    assert time.monotonic() - start < 2.0  # importing torch alone would take longer
    assert before >= {machine for key, machine in remote._machines.items() if key[1] == "node1"}


def test_workers_there_launch_in_their_turn(launcher):
    def work():
        return Launcher(nproc_per_host=2, handlers=[]).run(place).results

    assert launcher().run(work).rank(0) == {"localhost": [("0", "0", "0", "2"), ("1", "1", "0", "2")]}


def test_lines_of_the_first_worker_of_each_host_are_shown(launcher, capfd):
    def work():
        print("I am", os.environ["RANK"])

    launcher(["node1", "node2"], 2, handlers=None).run(work)
    shown = capfd.readouterr().out.splitlines()
    assert sorted(shown) == ["[rank 0] I am 0", "[rank 2] I am 2"]


def test_restarts_reach_all_hosts(launcher, tmp_path):
    def work():
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    result = launcher(["node1", "node2"], max_restarts=1).run(work)
    assert result.results == {"node1": ["1"], "node2": ["1"]}


def test_a_key_of_an_agent_will_do_and_user_and_port_may_be_in_the_name(sshd, tmp_path, monkeypatch):
    agent = subprocess.run(
        ["ssh-agent", "-s", "-a", str(tmp_path / "agent")], check=True, capture_output=True, text=True
    )
    pid = int(agent.stdout.split("SSH_AGENT_PID=")[1].split(";")[0])
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        config = tmp_path / "config"
        config.write_text(f"Host *\n  UserKnownHostsFile {sshd.folder}/known_hosts\n")
        name = f"{getpass.getuser()}@127.0.0.1:{sshd.port}"
        where = Launcher(hosts=[name], nproc_per_host=1, ssh_config=config, handlers=[])
        with pytest.raises(todist.InitializationError, match="it refuses the login"):
            where.run(place)
        subprocess.run(["ssh-add", "-q", str(sshd.folder / "user_key")], check=True)
        assert where.run(place).results == {name: [("0", "0", "0", "1")]}
    finally:
        os.kill(pid, signal.SIGTERM)


def test_numbers_of_workers_are_each_hosts_own(launcher):
    cores = len(os.sched_getaffinity(0))
    assert len(launcher(nproc_per_host="cpu").run(place).results["node1"]) == cores
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"more GPUs than there are, 0 on node1, got 'gpu:2'"):
            launcher(nproc_per_host="gpu:2").run(place)


# What keeps a host from taking part: an error that names host and cause, within seconds.


def refuse(launcher, message, *hosts, error=todist.InitializationError, **options):
    start = time.monotonic()
    with pytest.raises(error, match=message):
        launcher(hosts or ["node1"], **options).run(place)
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
        todist.InitializationError, match="node1 cannot be reached by SSH: it refuses the login"
    ):
        Launcher(hosts=["node1"], nproc_per_host=1, ssh_config=config).run(place)


def test_a_host_that_is_not_known(sshd, tmp_path):
    config = tmp_path / "config"
    config.write_text(sshd.config.read_text().replace(f"{sshd.folder}/known_hosts", os.devnull))
    with pytest.raises(todist.InitializationError, match=r"node1 .*not in the file of known hosts"):
        Launcher(hosts=["node1"], nproc_per_host=1, ssh_config=config).run(place)


def test_a_host_that_does_not_answer(sshd):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        name = f"127.0.0.3:{silent.getsockname()[1]}".replace("127.0.0.3", "127.1")
        launcher = Launcher(hosts=[name], nproc_per_host=1, ssh_config=sshd.config, start_timeout=1.5)
        with pytest.raises(todist.InitializationError, match=r"there was no answer within 1\.5 s"):
            launcher.run(place)


def test_a_host_without_that_python(launcher):
    refuse(launcher, "node1 has no /no/such/python; `python` says", python="/no/such/python")


def test_a_host_without_the_package(launcher, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -c "import torchopt_dist"\n')
    python.chmod(0o755)
    refuse(launcher, "on node1 has no package torchopt_dist: install it there", python=str(python))


@pytest.mark.parametrize("what", ["torch", "Python", "torchopt_dist", "cloudpickle"])
def test_a_host_with_another_version(launcher, monkeypatch, what):
    versions = remote.versions()
    monkeypatch.setattr(remote, "versions", lambda: {**versions, what: "1.2.3"})
    # A name that no launch has reached yet: relays that are there are not asked again.
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
        launcher([name]).run(place)


def test_without_asyncssh_the_error_says_what_to_install(launcher, monkeypatch):
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    refuse(launcher, r"needs asyncssh: pip install 'torchopt_dist\[ssh\]'", "node3")


def test_nothing_listens_for_the_launch_but_the_store(launcher):
    """Launcher and hosts talk through SSH alone, so there is no door at which a stranger could knock."""

    def listeners(launcher_pid):
        relay = psutil.Process(relay_of(os.getppid()))
        theirs = [psutil.Process(launcher_pid), relay, *relay.children(recursive=True)]
        doors = [c.laddr for process in theirs for c in process.net_connections() if c.status == "LISTEN"]
        return [(door.ip, door.port) for door in doors], os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    doors, address, port = launcher().run(listeners, os.getpid()).rank(0)
    assert doors == [(address, int(port))]


def test_a_stranger_at_the_store_does_no_harm(launcher):
    def work():

        if os.environ["RANK"] == "0":
            strangers = [
                socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
                for _ in range(3)
            ]
            strangers[0].sendall(b"GET / HTTP/1.0\r\n\r\n")
            strangers[1].sendall(os.urandom(1 << 16))
        return sum_of_ranks(torch.zeros(1)).item()

    assert launcher(["node1", "node2"]).run(work).results == {"node1": [1.0], "node2": [1.0]}


def test_no_process_is_left_when_all_is_closed(sshd, launcher):
    pids = launcher(["node1"]).run(lambda: [os.getppid(), psutil.Process(os.getppid()).ppid()]).rank(0)
    for machine in list(remote._machines.values()):
        machine.close()
    assert_gone(pids)
    assert not alive(pids)
