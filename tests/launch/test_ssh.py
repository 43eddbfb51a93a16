"""Workers on other hosts, by SSH: what a launch on this machine does, it does there."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import time

import psutil
import pytest
import torch
import torch.distributed as dist

import torchopt_dist as todist
from tests.launch.families import forkserver_of
from tests.launch.sshd import NEEDS_SSHD
from torchopt_dist.launching import Launcher
from torchopt_dist.launching import _cluster as cluster

pytestmark = [pytest.mark.timeout(120), NEEDS_SSHD]


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


def reached(name):
    return {task.result() for key, task in cluster._machines.items() if key[1] == name and task.done()}


def test_a_second_launch_finds_the_forkserver_warm(launcher):
    where = launcher()
    where.run(place)
    before = reached("node1")
    start = time.monotonic()
    where.run(place)
    assert time.monotonic() - start < 2.0  # importing torch alone would take longer
    assert before
    assert before == reached("node1")


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
        with pytest.raises(todist.errors.InitializationError, match="it refuses the login"):
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


def test_nothing_listens_for_the_launch_but_the_store(launcher):
    """Launcher and hosts talk through SSH alone, so there is no door at which a stranger could knock."""

    def listeners(launcher_pid):
        server = psutil.Process(forkserver_of(os.getppid()))
        theirs = [psutil.Process(launcher_pid), server, *server.children(recursive=True)]
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
