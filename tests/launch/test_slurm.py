"""The hosts of a SLURM job, told by its variables; `test_slurm_cluster.py` has the real ones."""

from __future__ import annotations

import os

import pytest

import torchopt_dist as todist
from tests.launch.sshd import NEEDS_SSHD, Sshd
from torchopt_dist.launching import Launcher
from torchopt_dist.launching import _cluster as cluster
from torchopt_dist.launching._machines import Machine
from torchopt_dist.process import slurm

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)


@pytest.fixture
def job(monkeypatch):
    def set_variables(**more):
        for name, value in {**JOB, **more}.items():
            monkeypatch.setenv(name, value)

    return set_variables


# Which hosts.


@pytest.mark.parametrize("hosts", ["slurm", "auto"])
def test_the_job_s_hosts_are_taken(job, hosts):
    job()
    assert cluster.name_hosts(hosts) == ["node1", "node2"]


def test_without_a_job_auto_is_this_machine():
    assert cluster.name_hosts("auto") == ["localhost"]


@pytest.mark.parametrize("number", ["1", None])
def test_in_a_job_of_one_host_auto_is_this_machine(job, monkeypatch, number):
    job(SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="node1")
    if number is None:
        monkeypatch.delenv("SLURM_JOB_NUM_NODES")
    assert cluster.name_hosts("auto") == ["localhost"]
    assert cluster.name_hosts("slurm") == ["node1"]


def test_hosts_that_are_named_are_taken_in_a_job_too(job):
    job()
    assert cluster.name_hosts(["elsewhere"]) == ["elsewhere"]


def test_the_groups_of_a_heterogeneous_job_are_one(job):
    """As SLURM 22.05 tells them: the other variables are those of the first group."""
    job(
        SLURM_HET_SIZE="2",
        SLURM_JOB_NUM_NODES="1",
        SLURM_JOB_NODELIST="n1",
        SLURM_JOB_CPUS_PER_NODE="1",
        SLURM_GPUS_ON_NODE="1",
        SLURM_JOB_NODELIST_HET_GROUP_0="n1",
        SLURM_JOB_NODELIST_HET_GROUP_1="n[2-3]",
        SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0="1",
        SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1="2(x2)",
    )
    assert cluster.name_hosts("auto") == ["n1", "n2", "n3"]
    assert workers("cpu") == [1, 2, 2]
    assert workers("gpu") == [8, 8, 8]
    assert [slurm.step(name)[1:3] for name in ("n1", "n3")] == [
        ["--jobid=7", "--het-group=0"],
        ["--jobid=7", "--het-group=1"],
    ]


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST"])
def test_outside_a_job_slurm_is_an_error(job, monkeypatch, missing):
    job()
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=r'`hosts="slurm"` must be used in a SLURM job, got no SLURM_JOB_ID'):
        Launcher(hosts="slurm").run(print)
    with pytest.raises(ValueError, match=r'`shell="srun"` must be used in a SLURM job, got no SLURM_JOB_ID'):
        Launcher(hosts=["elsewhere"], shell="srun").run(print)


@pytest.mark.parametrize("hosts", ["1", "2"])
@pytest.mark.parametrize(
    "task",
    [
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    ],
)
def test_several_tasks_are_an_error(job, monkeypatch, hosts, task):
    """Each of them would be a launcher; on one host, too."""
    job(SLURM_JOB_NUM_NODES=hosts)
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"a launcher must run once, got 4 tasks of (srun|Open MPI): "):
        Launcher().run(print)
    monkeypatch.setenv(next(name for name in task if name.endswith(("TASKS", "SIZE"))), "1")
    monkeypatch.setenv(next(name for name in task if name.endswith(("PROCID", "RANK"))), "0")
    assert cluster.name_hosts("slurm") == ["node1", "node2"]


def test_a_list_that_cannot_be_read_is_told(job):
    job(SLURM_JOB_NODELIST="node[1-")
    with pytest.raises(ValueError, match=r"hosts of the SLURM job cannot be found out: .*form n\[1-3,5\],m2"):
        Launcher().run(print)


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
def test_cores_are_those_of_the_job(job, variable, expected):
    job(**({} if variable is None else {"SLURM_JOB_CPUS_PER_NODE": variable}))
    assert workers("cpu") == expected


def test_what_a_job_s_variables_say_is_nothing_outside_of_one(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "3")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "1")
    assert slurm.cpus_per_host(1) == slurm.gpus_per_host(1) == [None]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert (slurm.cpus_per_host(1), slurm.gpus_per_host(1)) == ([3], [1])
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "0")
    assert len(Launcher(nproc_per_host="cpu", handlers=[]).run(os.getpid).results["localhost"]) > 0


def test_cores_of_uneven_hosts(job):
    job(SLURM_JOB_NUM_NODES="3", SLURM_JOB_NODELIST="n[1-3]", SLURM_JOB_CPUS_PER_NODE="8(x2),4")
    assert workers("cpu") == [8, 8, 4]
    assert workers([1, "cpu", "cpu"]) == [1, 8, 4]
    assert workers("cpu", hosts=["a", "b", "c"]) == [64, 64, 64]  # which the user has named


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("2", 2), ("a100:4", 4), ("a100:2,v100:1", 3), ("16", 8), ("a100", 8), ("", 8), (None, 8), ("a100:", 8)],
)
def test_gpus_are_those_of_the_job(job, variable, expected):
    job(**({} if variable is None else {"SLURM_GPUS_PER_NODE": variable}))
    assert workers("gpu") == workers("auto") == [expected] * 2
    with pytest.raises(ValueError, match=rf"must not ask for more GPUs than there are, {expected} on node1"):
        workers(f"gpu:{expected + 1}")


@pytest.mark.parametrize("of_node", [None, ""])
def test_a_job_that_asked_for_gpus_in_another_way_tells_those_of_this_node(job, of_node):
    """With `--gres=gpu:2`, `--gpus=4` or `--gpus-per-task=1` there is no SLURM_GPUS_PER_NODE."""
    job(SLURM_GPUS_ON_NODE="2", **({} if of_node is None else {"SLURM_GPUS_PER_NODE": of_node}))
    assert workers("gpu") == [2, 2]
    assert "--gpus=2" in slurm.step("node2")


def test_a_step_takes_nothing_from_what_the_job_was_submitted_with():
    env = {"SLURM_GPUS": "4", "SBATCH_QOS": "q", "SRUN_DEBUG": "3"}
    kept = {"SLURM_CONF": "/a", "SLURM_JOB_ID": "7", "HOME": "/h"}
    assert slurm.own_environment({**env, **kept}) == {**kept, "SLURM_UNBUFFEREDIO": "1"}


def test_a_job_without_gpus_has_a_worker_a_core(job):
    job(SLURM_GPUS_PER_NODE="0", SLURM_JOB_CPUS_PER_NODE="6(x2)")
    assert workers("auto") == [6, 6]


# A launch.


@NEEDS_SSHD
@pytest.mark.timeout(120)
def test_a_job_runs_on_its_hosts_and_says_how_it_reaches_them(job, warm_executable, tmp_path, caplog):
    job(SLURM_JOB_CPUS_PER_NODE="2,1")
    caplog.set_level("INFO")
    server = Sshd(tmp_path / "sshd")
    try:
        by_ssh = {"ssh_config": server.config, "python": warm_executable}
        launcher = Launcher(nproc_per_host="cpu", handlers=[], log_dir=None, rpc=True, **by_ssh)
        result = launcher.run(lambda: (todist.get_rank(), todist.get_world_size(), os.getenv("GROUP_RANK")))
        cores = min(2, len(os.sched_getaffinity(0)))
        assert list(result.results) == ["node1", "node2"]
        assert "the hosts of the job are reached by SSH" in caplog.text
        assert len(result.results["node1"]) == cores
        assert result.results["node2"] == [(cores, cores + 1, "1")]
    finally:
        cluster.close_all(["node1", "node2"])
        server.stop()
