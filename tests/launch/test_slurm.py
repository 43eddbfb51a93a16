"""The hosts of a SLURM job, told by its variables and by a stand-in for `scontrol`."""

from __future__ import annotations

import os
import time

import pytest

import torchopt_dist as todist
from tests.launch.sshd import NEEDS_SSHD, Sshd
from torchopt_dist.launch import Launcher
from torchopt_dist.launch import _cluster as cluster
from torchopt_dist.launch import _remote as remote
from torchopt_dist.launch import _slurm as slurm
from torchopt_dist.launch._machine import Machine

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)


@pytest.fixture
def scontrol(monkeypatch, tmp_path):
    """Makes a program of this name, which notes what it is asked in a file `asked` that it returns."""

    def make(then="printf 'node1\\nnode2\\n'"):
        program = tmp_path / "bin" / "scontrol"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{then}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return tmp_path / "asked"

    return make


@pytest.fixture
def job(monkeypatch):
    def set_variables(**more):
        for name, value in {**JOB, **more}.items():
            monkeypatch.setenv(name, value)

    return set_variables


# Which hosts.


@pytest.mark.parametrize("hosts", ["slurm", "auto"])
def test_the_job_s_hosts_are_taken(job, scontrol, hosts):
    job()
    asked = scontrol()
    assert cluster.name_hosts(hosts) == ["node1", "node2"]
    assert asked.read_text() == "show hostnames node[1-2]\n"


def test_without_a_job_auto_is_this_machine(scontrol):
    asked = scontrol()
    assert cluster.name_hosts("auto") == ["localhost"]
    assert not asked.exists()


@pytest.mark.parametrize("number", ["1", None])
def test_in_a_job_of_one_host_auto_is_this_machine(job, scontrol, monkeypatch, number):
    job(SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="node1")
    if number is None:
        monkeypatch.delenv("SLURM_JOB_NUM_NODES")
    asked = scontrol("echo node1")
    assert cluster.name_hosts("auto") == ["localhost"]
    assert not asked.exists()
    assert cluster.name_hosts("slurm") == ["node1"]


def test_hosts_that_are_named_are_taken_in_a_job_too(job, scontrol):
    job()
    asked = scontrol()
    assert cluster.name_hosts(["elsewhere"]) == ["elsewhere"]
    assert not asked.exists()


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST"])
def test_outside_a_job_slurm_is_an_error(job, scontrol, monkeypatch, missing):
    job()
    scontrol()
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=r'`hosts="slurm"` must be used in a SLURM job, got no SLURM_JOB_ID'):
        Launcher(hosts="slurm").run(print)


def test_several_tasks_of_srun_are_an_error(job, scontrol):
    """Each of them would be a launcher."""
    job(SLURM_STEP_NUM_TASKS="4")
    scontrol()
    with pytest.raises(ValueError, match=r"must run once in a SLURM job, got 4 tasks of srun: .* --ntasks=1"):
        Launcher().run(print)
    job(SLURM_STEP_NUM_TASKS="1")
    assert cluster.name_hosts("auto") == ["node1", "node2"]


def test_without_scontrol_the_hosts_cannot_be_told(job, monkeypatch, tmp_path):
    job()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"hosts of the SLURM job cannot be found out: .*No such file.*'scontrol'"
    ):
        Launcher().run(print)


def test_what_a_failing_scontrol_says_is_told(job, scontrol):
    job()
    scontrol("echo slurm_load: no controller >&2; exit 3")
    rule = r"cannot be found out: .*'scontrol'.* non-zero exit status 3\. slurm_load: no controller$"
    with pytest.raises(ValueError, match=rule):
        Launcher().run(print)


def test_a_scontrol_that_prints_nothing_is_an_error(job, scontrol):
    job()
    scontrol("exit 0")
    with pytest.raises(
        ValueError, match=r"cannot be found out: scontrol show hostnames node\[1-2\] printed nothing"
    ):
        Launcher().run(print)


def test_a_scontrol_that_does_not_answer_is_given_up(job, scontrol, monkeypatch):
    job()
    scontrol("exec sleep 60")
    monkeypatch.setattr(slurm, "SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"cannot be found out: .*timed out after 0\.3 seconds"):
        Launcher().run(print)
    assert time.monotonic() - start < 5


# How much of each.


class Big(Machine):
    """More than the job has."""

    here, cores, gpus = False, 64, 8

    def __init__(self, name):
        self.name = name

    def connect(self, env):
        raise NotImplementedError

    def kill(self, pid):
        raise NotImplementedError


def workers(nproc_per_host, hosts="slurm"):
    found = cluster.find_hosts(hosts, nproc_per_host, lambda names: {name: Big(name) for name in names})
    assert [host.first_rank for host in found] == [
        sum(host.workers for host in found[:index]) for index in range(len(found))
    ]
    return [host.workers for host in found]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("4(x2)", [4, 4]),
        ("4,2", [4, 2]),
        ("128(x2)", [64, 64]),  # threads of cores, perhaps; there are no more to have
        ("4", [64, 64]),  # not two numbers: it means something else
        ("4(x3)", [64, 64]),
        ("", [64, 64]),
        ("many", [64, 64]),
        ("0(x2)", [64, 64]),  # no core is no answer
        ("0,4", [64, 64]),
        (None, [64, 64]),
    ],
)
def test_cores_are_those_of_the_job(job, scontrol, variable, expected):
    job(**({} if variable is None else {"SLURM_JOB_CPUS_PER_NODE": variable}))
    scontrol()
    assert workers("cpu") == expected


def test_what_a_job_s_variables_say_is_nothing_outside_of_one(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "3")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "1")
    assert slurm.cpus_per_host(1) == slurm.gpus_per_host(1) == [None]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert (slurm.cpus_per_host(1), slurm.gpus_per_host(1)) == ([3], [1])
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "0")
    assert len(Launcher(nproc_per_host="cpu", handlers=[]).run(os.getpid).results["localhost"]) > 0


def test_cores_of_uneven_hosts(job, scontrol):
    job(SLURM_JOB_NUM_NODES="3", SLURM_JOB_CPUS_PER_NODE="8(x2),4")
    scontrol("printf 'a\\nb\\nc\\n'")
    assert workers("cpu") == [8, 8, 4]
    assert workers([1, "cpu", "cpu"]) == [1, 8, 4]
    assert workers("cpu", hosts=["a", "b", "c"]) == [64, 64, 64]  # which the user has named


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("2", 2), ("a100:4", 4), ("a100:2,v100:1", 3), ("16", 8), ("a100", 8), ("", 8), (None, 8), ("a100:", 8)],
)
def test_gpus_are_those_of_the_job(job, scontrol, variable, expected):
    job(**({} if variable is None else {"SLURM_GPUS_PER_NODE": variable}))
    scontrol()
    assert workers("gpu") == workers("auto") == [expected] * 2
    with pytest.raises(ValueError, match=rf"must not ask for more GPUs than there are, {expected} on node1"):
        workers(f"gpu:{expected + 1}")


def test_a_job_without_gpus_has_a_worker_a_core(job, scontrol):
    job(SLURM_GPUS_PER_NODE="0", SLURM_JOB_CPUS_PER_NODE="6(x2)")
    scontrol()
    assert workers("auto") == [6, 6]


# A launch.


@NEEDS_SSHD
@pytest.mark.timeout(120)
def test_a_job_runs_on_its_hosts(job, scontrol, warm_executable, tmp_path):
    job(SLURM_JOB_CPUS_PER_NODE="2,1")
    scontrol()
    server = Sshd(tmp_path / "sshd")
    try:
        by_ssh = {"ssh_config": server.config, "python": warm_executable}
        launcher = Launcher(nproc_per_host="cpu", handlers=[], log_dir=None, rpc=True, **by_ssh)
        result = launcher.run(lambda: (todist.get_rank(), todist.get_world_size(), os.getenv("GROUP_RANK")))
        cores = min(2, len(os.sched_getaffinity(0)))
        assert list(result.results) == ["node1", "node2"]
        assert len(result.results["node1"]) == cores
        assert result.results["node2"] == [(cores, cores + 1, "1")]
    finally:
        remote.close_all(["node1", "node2"])
        server.stop()
