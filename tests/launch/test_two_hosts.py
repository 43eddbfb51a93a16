"""Launches on hosts that have a network each: namespaces of the kernel, with addresses and an sshd of their own.

    launcher ── bridge ──┬── alpha ── gamma
                         └── beta

Each host has an interface that leads nowhere beside the one that leads to the others, and it is the first in every
list; its address is the same on all hosts. Only alpha reaches gamma. The launcher has a network of its own, too: a
process that stays, so that its connections do.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import csv
import ctypes
import importlib.util
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchopt_dist as todist
from tests.examples.running import run_python
from tests.launch.elastic.worlds import in_worlds, world_of
from tests.launch.families import assert_gone, family_of, start_a_family
from tests.launch.sshd import NEEDS_SSHD, Sshd
from tests.waits import say, wait_until
from torchopt_dist.launching import Launcher
from torchopt_dist.launching import _cluster as cluster

pytestmark = [pytest.mark.timeout(120), NEEDS_SSHD]

EXAMPLE = Path(__file__).parents[2] / "examples" / "maml_digits.py"
NAMES = ("alpha", "beta", "gamma")
ADDRESSES = {"alpha": "10.77.0.1", "beta": "10.77.0.2", "gamma": "10.78.0.2"}
LIVENESS = todist.Liveness(patience=3)
"""One for all launches, so that they have connections in common."""
CLONE_NEWNET = 0x40000000


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Network:
    """The hosts' namespaces, and the launcher's."""

    def __init__(self):
        self.names = {name: f"todist{os.getpid()}{name}" for name in ("launcher", *NAMES)}

    def make(self):
        for name in self.names:
            ip("netns", "add", self.names[name])
            self.ip(name, "link", "set", "lo", "up")
        for name in NAMES:
            self.ip(name, "link", "add", "decoy0", "type", "veth", "peer", "decoy1")
            self.up(name, "decoy0", "172.17.0.1/16")
        self.ip("launcher", "link", "add", "bridge0", "type", "bridge")
        self.up("launcher", "bridge0", "10.77.0.9/24")
        for number, name in enumerate(NAMES[:2]):
            self.connect(("launcher", f"port{number}"), (name, f"net{number}"))
            self.ip("launcher", "link", "set", f"port{number}", "master", "bridge0")
            self.up("launcher", f"port{number}")
            self.up(name, f"net{number}", f"{ADDRESSES[name]}/24")
        self.connect(("alpha", "inner0"), ("gamma", "inner1"))
        self.up("alpha", "inner0", "10.78.0.1/24")
        self.up("gamma", "inner1", f"{ADDRESSES['gamma']}/24")

    def ip(self, name, *words):
        ip("-n", self.names[name], *words)

    def up(self, name, interface, address=None):
        if address is not None:
            self.ip(name, "address", "add", address, "dev", interface)
        self.ip(name, "link", "set", interface, "up")

    def connect(self, one, other):
        ends = (
            ["netns", self.names[one[0]], "name", one[1]],
            ["netns", self.names[other[0]], "name", other[1]],
        )
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])

    def inside(self, name):
        return ["ip", "netns", "exec", self.names[name]]

    def processes(self, name):
        """Pid and command line of all that run there."""
        words = ["ip", "netns", "pids", self.names[name]]
        found = []
        for pid in subprocess.run(words, capture_output=True, text=True).stdout.split():
            with contextlib.suppress(OSError):
                found.append((int(pid), Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")))
        return found

    def remove(self):
        for name, namespace in self.names.items():
            for pid, _ in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


@pytest.fixture(scope="module")
def network():
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2's `ip`")
    made = Network()
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def config(network, tmp_path_factory):
    """A configuration file that knows the hosts: gamma is reached by way of alpha."""
    folder = tmp_path_factory.mktemp("hosts")
    servers = []
    try:
        for name in NAMES:
            servers.append(Sshd(folder / name, ADDRESSES[name], (name,), network.inside(name)))
        jump = {"gamma": {"ProxyJump": "alpha"}}
        entries = [
            server.entry(name, ADDRESSES[name], **jump.get(name, {}))
            for name, server in zip(NAMES, servers, strict=True)
        ]
        (folder / "config").write_text("".join(entries))
        yield folder / "config"
    finally:
        for server in servers:
            server.stop()


def enter(namespace):
    """Have this process, which has one thread, and what it starts, live in a namespace."""
    with open(f"/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ.pop(variable, None)


@pytest.fixture(scope="module")
def elsewhere(network):
    """Runs functions on the launcher's host."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        1, spawn, initializer=enter, initargs=(network.names["launcher"],)
    ) as pool:
        yield pool


@pytest.fixture(scope="module")
def by_ssh(config, warm_executable):
    """How a launch reaches the hosts, where forkservers are forks of a process that has imported torch."""
    return {"nproc_per_host": 1, "ssh_config": config, "python": warm_executable, "liveness": LIVENESS}


@pytest.fixture
def launch(elsewhere, by_ssh):
    """A launch from there: function and arguments, hosts and options → the values of the ranks."""

    def run(function, *args, hosts=NAMES[:2], **options):
        options = {"hosts": list(hosts), "handlers": [], "log_dir": None, **by_ssh, **options}
        return elsewhere.submit(run_there, options, function, *args).result()

    return run


def run_there(options, function, *args):
    result = Launcher(**options).run(function, *args)
    return [value for values in result.results.values() for value in values]


# A world forms.


def places(rpc=False):
    """What torch needs to know of the network, and whether it works."""
    if not rpc:
        dist.init_process_group("gloo")
        total = torch.ones(3) * (int(os.environ["RANK"]) + 1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        assert total.tolist() == [3.0] * 3
    return tuple(os.environ[name] for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"))


def at(address, *interfaces):
    return [(address, interface, interface) for interface in interfaces]


@pytest.mark.parametrize(
    ("hosts", "address", "interfaces"),
    [
        (("alpha", "beta"), "10.77.0.1", ("net0", "net1")),
        (("beta", "alpha"), "10.77.0.2", ("net1", "net0")),
        (("localhost", "beta"), "10.77.0.9", ("bridge0", "net1")),
        (("beta", "localhost"), "10.77.0.2", ("net1", "bridge0")),
        (("alpha", "gamma"), "10.78.0.1", ("inner0", "inner1")),
        (("gamma", "alpha"), "10.78.0.2", ("inner1", "inner0")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_workers_meet_at_an_address_that_is_routed(launch, hosts, address, interfaces):
    """gamma is behind a jump host: the launcher knows no address of alpha that it can use."""
    assert launch(places, hosts=hosts) == at(address, *interfaces)


@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def loss_of(weight, x):
    return (x @ weight).square().mean() + 0.0 * len(os.environ["GLOO_SOCKET_IFNAME"])


@todist.rank_zero_only
def gradient(weight, x):
    return torch.autograd.grad(loss_of(todist.replicated(weight), x), weight)[0]


@pytest.mark.parametrize("hosts", [("alpha", "beta"), ("gamma", "alpha")], ids="-".join)
def test_remote_calls_between_hosts_are_differentiable(launch, hosts):
    torch.manual_seed(0)
    weight, x = torch.randn(3, dtype=torch.double, requires_grad=True), torch.randn(6, 3, dtype=torch.double)
    found, _ = launch(gradient, weight, x, hosts=hosts, rpc=True)
    (expected,) = torch.autograd.grad((x @ weight).square().mean(), weight)
    torch.testing.assert_close(found, expected)


def test_an_interface_that_the_user_names_is_left(launch):
    env = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    assert launch(places, True, env=env) == [("10.77.0.1", "lo", "lo")] * 2


# The main job.

SHORT = ("--meta-steps", 2, "--tasks", 4, "--test-tasks", 2, "--eval-every", 1, "--no-baselines", "--double")


def arguments(path):
    return [
        *map(str, SHORT),
        "--output",
        str(path.with_suffix(".png")),
        "--csv",
        str(path.with_suffix(".csv")),
    ]


def rows(path):
    with path.with_suffix(".csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The curve that one process draws."""
    path = tmp_path_factory.mktemp("alone") / "curve"
    run_python(EXAMPLE, *arguments(path))
    return rows(path)


def same_curve(path, alone):
    assert len(alone) == 3
    for here, there in zip(rows(path), alone, strict=True):
        assert here == pytest.approx(there, rel=1e-2)
    assert rows(path)[1] == pytest.approx(alone[1], rel=1e-6)  # Adam has not magnified any rounding yet
    return True


def train_there(options, words):
    sys.path.insert(0, str(EXAMPLE.parent))  # as it is for one who writes a script there
    example = importlib.import_module("maml_digits")
    args = example.build_parser().parse_args(words)
    assert isinstance(args, argparse.Namespace)
    return Launcher(**options).run(example.main, args).results


@pytest.mark.nightly
def test_the_digits_are_learned_on_two_hosts(elsewhere, by_ssh, alone, tmp_path):
    path = tmp_path / "curve"
    options = {"hosts": ["alpha", "beta"], "log_dir": tmp_path, **by_ssh}
    results = elsewhere.submit(train_there, options, arguments(path)).result()
    assert results == {"alpha": [None], "beta": [None]}
    assert "on 2 worker(s)" in (tmp_path / "rank0.log").read_text()
    assert same_curve(path, alone)


@pytest.mark.nightly
def test_the_digits_are_learned_on_two_hosts_by_a_command(network, config, alone, warm_executable, tmp_path):
    path = tmp_path / "curve"
    before = [process for name in NAMES for process in network.processes(name)]
    command = [*network.inside("launcher"), warm_executable, "-m", "torchopt_dist", "launch"]
    command += ["--hosts", "alpha", "beta", "--nproc-per-host", "1", "--ssh-config", str(config)]
    command += ["--python", warm_executable]
    command += ["--log-dir", str(tmp_path / "logs"), str(EXAMPLE), *arguments(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80)
    assert done.returncode == 0, done.stderr
    assert "on 2 worker(s)" in done.stdout
    assert same_curve(path, alone)
    after = [process for name in NAMES for process in network.processes(name)]
    assert_gone([pid for pid, _ in set(after) - set(before)])


# Networks that are cut, or were never there.


def wait_with_a_family(folder):
    start_a_family(folder)
    time.sleep(100)


def test_a_host_that_is_cut_off_is_named_and_nothing_is_left_there(
    network, elsewhere, by_ssh, launch, tmp_path
):
    launch(places)  # so that the forkservers of another launch are there, too
    options = {"hosts": ["alpha", "beta"], "handlers": [], "log_dir": None, **by_ssh}
    future = elsewhere.submit(run_there, options, wait_with_a_family, tmp_path)
    try:
        family = family_of(tmp_path)
        cut = time.monotonic()
        network.ip("launcher", "link", "set", "port1", "down")
        message = (
            "the agent on beta was lost: there was no sign of life for 3 s; rank 1 on beta was ended with it"
        )
        with pytest.raises(todist.errors.AgentFailedError, match=message):
            future.result()
        assert time.monotonic() - cut < 7
        assert_gone(family, 10 - (time.monotonic() - cut))
        assert_gone([pid for pid, command in network.processes("beta") if "sshd" not in command], 10)
        assert any("sshd" in command for _, command in network.processes("beta"))
        elsewhere.submit(wait_until_lost, "beta").result()
    finally:
        network.up("launcher", "port1")
    assert launch(places) == at("10.77.0.1", "net0", "net1")  # by a new forkserver


def test_an_elastic_launch_goes_on_without_a_host_that_is_cut_off_and_takes_it_back(
    network, elsewhere, by_ssh, tmp_path
):
    options = {"hosts": ["alpha", "beta"], "handlers": [], "log_dir": None, **by_ssh}
    options.update(stop_timeout=1, min_hosts=1, rpc=True, timeout=80)
    future = elsewhere.submit(run_there, options, call_the_other, tmp_path)
    try:
        lost = world_of(tmp_path, 0, 2)[1]
        network.ip("launcher", "link", "set", "port1", "down")
        world_of(tmp_path, 1, 1)
        assert_gone(lost)  # since it does not hear of the launcher
        network.up("launcher", "port1")
        world_of(tmp_path, 2, 2)
        say(tmp_path / "end")
        assert future.result() == [(2, 0, 2), (2, 1, 2)]
    finally:
        network.up("launcher", "port1")


def call_the_other(folder):
    """In a world of two, rank 0 waits for a call that the other host serves."""

    def act(world, rank):
        todist.barrier()
        if world == 0 and rank == 0:
            todist.remote_sync_call(time.sleep, args=(100,), partitioner=1)

    return in_worlds(folder, act)


def wait_until_lost(name):
    """Both ends of a connection are patient, and one of them notices a little later than the other."""
    known = [task.result() for key, task in cluster._machines.items() if key[1] == name and task.done()]
    assert known
    wait_until(lambda: all(machine.why_lost() is not None for machine in known), tell=lambda: f"{known}")


def fails(launch, hosts, message, seconds, error=todist.errors.InitializationError, **options):
    start = time.monotonic()
    with pytest.raises(error, match=message):
        launch(places, hosts=hosts, **options)
    assert time.monotonic() - start < seconds


def test_hosts_without_a_route_to_each_other_are_named(launch):
    launch(places, hosts=("alpha", "gamma"))
    fails(launch, ("beta", "gamma"), r"gamma cannot reach beta, where rank 0 is, at .* 10\.77\.0\.2", 5)
    fails(launch, ("gamma", "alpha", "beta"), r"^beta cannot reach gamma, where .* 10\.78\.0\.2", 5)


def test_hosts_between_which_packets_are_dropped_are_named(network, launch):
    """As by a firewall: there is no answer, not even a refusal."""
    launch(places)
    try:
        for port in ("port0", "port1"):
            network.ip("launcher", "link", "set", port, "type", "bridge_slave", "isolated", "on")
        fails(launch, ("alpha", "beta"), r"beta cannot reach alpha, .* is there a firewall\?", 12)
    finally:
        for port in ("port0", "port1"):
            network.ip("launcher", "link", "set", port, "type", "bridge_slave", "isolated", "off")
    assert launch(places) == at("10.77.0.1", "net0", "net1")


def test_a_host_that_is_cut_off_before_the_launch_is_named(network, launch):
    launch(places)
    network.ip("launcher", "link", "set", "port1", "down")
    try:
        lost = "the agent on beta was lost: there was no sign of life for 3 s, before it started a worker"
        fails(launch, NAMES[:2], lost, 6, todist.errors.AgentFailedError)
        message = "beta cannot be reached by SSH: (there was no answer within 2 s|.*No route to host)"
        fails(launch, NAMES[:2], message, 5, start_timeout=2)
    finally:
        network.up("launcher", "port1")
    assert launch(places) == at("10.77.0.1", "net0", "net1")
