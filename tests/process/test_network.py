from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import psutil
import pytest

from tests.processes import free_port, python
from torchopt_dist.process import network
from torchopt_dist.process.network import choose_interface, local_address

VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that what a test sets is undone
        monkeypatch.delenv(variable)


def chosen():
    return {variable: os.environ.get(variable) for variable in VARIABLES}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.3.4.5"])
def test_this_machine_is_reached_by_the_loopback(host):
    loopback = next(name for name, known in psutil.net_if_addrs().items() if known[0].address == "127.0.0.1")
    assert choose_interface(host) == loopback
    assert chosen() == dict.fromkeys(VARIABLES, loopback)


@pytest.mark.parametrize("given", VARIABLES)
def test_what_is_given_is_left(monkeypatch, given):
    monkeypatch.setenv(given, "eth7")
    interface = choose_interface("127.0.0.1")
    assert chosen() == {variable: "eth7" if variable == given else interface for variable in VARIABLES}


def test_an_unknown_host_sets_nothing():
    assert choose_interface("no-such-host.invalid") is None
    assert chosen() == dict.fromkeys(VARIABLES)


def test_an_address_of_no_interface_sets_nothing(monkeypatch):
    monkeypatch.setattr(network, "local_address", lambda host: "192.0.2.1")
    assert choose_interface("127.0.0.1") is None
    assert chosen() == dict.fromkeys(VARIABLES)


def test_the_zone_of_an_address_is_no_part_of_it(monkeypatch):
    def interfaces():
        def entry(address):
            return SimpleNamespace(family=socket.AF_INET6, address=address)

        return {"eth0": [entry("fe80::10%eth0")], "eth1": [entry("fe80::1%eth1")]}

    monkeypatch.setattr(psutil, "net_if_addrs", interfaces)
    monkeypatch.setattr(network, "local_address", lambda host: "fe80::1")
    assert choose_interface("fe80::2") == "eth1"
    assert chosen() == dict.fromkeys(VARIABLES, "eth1")


def test_the_address_that_packets_leave_from():
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert local_address("localhost") in ("127.0.0.1", "::1")
    with pytest.raises(OSError, match=r"not known|No address|failure"):
        local_address("no-such-host.invalid")


# Two machines: each a network namespace with an interface of its own, and a wrong one beside it.


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def two_machines():
    names = [f"todist{os.getpid()}{letter}" for letter in "ab"]
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2's `ip`")
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", "link0", "netns", names[0], "type", "veth", "peer", "link1", "netns", names[1])
            for number, name in enumerate(names):
                ip("-n", name, "link", "set", "lo", "up")
                # The decoy comes first in every list, and leads nowhere.
                ip("-n", name, "link", "add", "decoy0", "type", "veth", "peer", "decoy1")
                ip("-n", name, "address", "add", f"10.88.{number}.1/24", "dev", "decoy0")
                ip("-n", name, "link", "set", "decoy0", "up")
                ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", f"link{number}")
                ip("-n", name, "link", "set", f"link{number}", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


PROGRAM = """
import json, os, sys
import torch
import torchopt_dist as todist

@todist.parallelize(todist.batch_partitioner, todist.mean_reducer)
def loss_fn(w, x):
    return (w * x).mean()

@todist.auto_init_rpc()
def main():
    if todist.get_rank() == 0:
        w = torch.ones(3, requires_grad=True)
        loss_fn(todist.replicated(w), torch.arange(15.0).reshape(5, 3)).backward()
        print(json.dumps(["grad", w.grad.tolist()]), flush=True)
    names = [os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")]
    print(json.dumps(["interfaces", todist.get_rank(), names]), flush=True)

main()
"""


def test_a_world_forms_across_two_machines(two_machines, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    port = free_port()
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    env.update(TODIST_INIT_TIMEOUT="60", OMP_NUM_THREADS="1", PYTHONPATH=os.getcwd())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    torchrun += ["--master_addr=10.77.0.1", f"--master_port={port}"]
    nodes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *torchrun, f"--node_rank={rank}", str(program)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(two_machines)
    ]
    try:
        ends = [node.communicate(timeout=250) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], "\n".join(err for _, err in ends)
        said = [json.loads(line) for out, _ in ends for line in out.splitlines() if line.startswith("[")]
    finally:
        for node in nodes:
            with node:
                node.kill()
    assert ["interfaces", 0, ["link0", "link0"]] in said
    assert ["interfaces", 1, ["link1", "link1"]] in said
    assert ["grad", pytest.approx([2.0, 7 / 3, 8 / 3])] in said


# No loopback address, as in a sandbox without a network.

WITHOUT_LOOPBACK = """
import ctypes, os, subprocess, sys
if ctypes.CDLL(None).unshare(0x40000000):  # a network of its own, in which `lo` is down
    sys.exit("no network namespaces here")
if sys.argv[1] == "IPv6 only":
    for words in ("link set lo up", "address delete 127.0.0.1/8 dev lo"):
        subprocess.run(["ip", *words.split()], check=True)
import pytest
import torch
import torchopt_dist as todist
said = r"its loopback address 127.0.0.1.* `ip link set lo up`"

def main():
    w = torch.ones(3, requires_grad=True)
    (y,) = todist.remote_sync_call(lambda: (w * w).sum(), partitioner=0)
    y.backward()
    return w.grad.tolist()

assert todist.auto_init_rpc(transport="zmq")(main)() == [2.0, 2.0, 2.0]  # which meets nobody
for start in (
    todist.auto_init_rpc(transport="rpc")(main),
    lambda: todist.launch(main, nproc_per_host=2),
):
    with pytest.raises(todist.errors.InitializationError, match=said):
        start()
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
with pytest.raises(todist.errors.InitializationError, match=said):
    todist.auto_init_rpc()(main)()
"""


@pytest.mark.parametrize("loopback", ["down", "IPv6 only"])
def test_a_machine_without_loopback_address_is_told_so_at_once(loopback):
    if loopback == "IPv6 only" and shutil.which("ip") is None:
        pytest.skip("needs iproute2's `ip`")
    done = python("-c", WITHOUT_LOOPBACK, loopback)
    if "no network namespaces" in done.stderr:
        pytest.skip("no network namespaces here")
    assert done.returncode == 0, done.stderr
