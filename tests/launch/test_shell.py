"""Hosts that are reached by a command in place of SSH: here by the command `env`, which runs what follows it."""

from __future__ import annotations

import os

import pytest

import torchopt_dist as todist
from tests.launch.families import assert_gone
from torchopt_dist.launching import Launcher
from torchopt_dist.launching import _cluster as cluster
from torchopt_dist.launching import _connections as connections
from torchopt_dist.launching import _machines as machines
from torchopt_dist.launching._settings import COPIED, matching

pytestmark = pytest.mark.timeout(120)
SHELL = "env POD={host} TODIST_ON_POD=1"


@pytest.fixture
def shell_launcher(warm_executable):
    made = []

    def make(hosts=("pod-0", "pod-1"), shell=SHELL, **options):
        options = {"handlers": [], "log_dir": None, "python": warm_executable, "nproc_per_host": 1, **options}
        made.extend(hosts)
        return Launcher(hosts=list(hosts), shell=shell, **options)

    yield make
    cluster.close_all(made)


def place():
    return os.environ["POD"], os.getpid(), todist.get_rank(), todist.get_world_size()


def test_workers_run_there_and_call_each_other(shell_launcher):
    launcher = shell_launcher(rpc=True)
    result = launcher.run(lambda: todist.remote_call(place, 1) if todist.get_rank() == 0 else place())
    assert {host: [value[0] for value in values] for host, values in result.results.items()} == {
        "pod-0": ["pod-1"],
        "pod-1": ["pod-1"],
    }
    assert result.rank(0) == result.rank(1)
    assert result.rank(0)[2:] == (1, 2)
    again = launcher.run(lambda: (os.getpid(), os.getppid()))  # the same forkservers
    assert len(again.results) == 2


def test_nothing_is_left_when_the_hosts_are_given_back(shell_launcher):
    def family():
        return os.getpid(), os.getppid()

    pids = shell_launcher().run(family).results.values()
    servers = [task.result()._process.pid for key, task in cluster._machines.items() if key[1] == "pod-0"]
    assert servers
    cluster.close_all(["pod-0", "pod-1"])
    assert_gone([pid for values in pids for value in values for pid in value] + servers, 20)


STUBBORN = """#!/bin/bash
trap '' TERM
"${@:2}"
sleep 1000
"""


@pytest.mark.nightly
def test_a_command_that_waits_for_a_host_that_is_down_is_killed(shell_launcher, tmp_path):
    """As `srun` waits."""
    command = tmp_path / "stubborn"
    command.write_text(STUBBORN)
    command.chmod(0o755)
    assert shell_launcher(["pod-0"], f"{command} {{host}}").run(os.getppid).results
    servers = [task.result()._process.pid for key, task in cluster._machines.items() if key[1] == "pod-0"]
    assert servers
    cluster.close_all(["pod-0"])
    assert_gone(servers, 20)


def test_exceptions_come_back(shell_launcher):
    with pytest.raises(KeyError, match="there"):
        shell_launcher(["pod-0"]).run({}.__getitem__, "there")


@pytest.mark.parametrize(
    ("shell", "rule"),
    [
        ("no-such-program {host}", r"`no-such-program pod-9` cannot be started here: No such file"),
        ("false {host}", r"did not start on pod-9 by `false pod-9`: its forkserver exited with code 1"),
        (
            "sh -c 'echo pods are closed >&2; exit 4' {host}",
            r"did not start on pod-9 by .*exited with code 4; it said:\n    pods are closed",
        ),
        ("env -u PATH no-shell-{host}", r"pod-9 has no .*code 127"),
    ],
)
def test_a_command_that_fails_is_told(shell_launcher, shell, rule):
    with pytest.raises(todist.errors.InitializationError, match=rule):
        shell_launcher(["pod-9"], shell, start_timeout=30).run(int)


def test_a_command_that_hangs_is_given_up(shell_launcher):
    with pytest.raises(
        todist.errors.InitializationError, match=r"did not start within `start_timeout`, 0\.5 s"
    ):
        shell_launcher(["pod-9"], "sh -c 'sleep 60' {host}", start_timeout=0.5).run(int)


@pytest.mark.parametrize(
    ("shell", "error", "rule"),
    [
        (
            "kubectl exec -i",
            ValueError,
            r"`shell` must be \"srun\", or a command .* got 'kubectl exec -i'",
        ),
        ("kubectl 'exec {host}", ValueError, r"`shell` must be a command, got .*No closing quotation"),
        ("", ValueError, r"`shell` must be a string or None, got an empty string"),
        (3, TypeError, r"`shell` must be a string or None, got int 3"),
    ],
)
def test_wrong_commands(shell, error, rule):
    with pytest.raises(error, match=rule):
        Launcher(shell=shell)


def test_in_a_job_without_ssh_srun_is_taken_and_that_is_told(monkeypatch, tmp_path, caplog, warm_executable):
    """A stand-in for `srun` runs what follows its options."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(
        '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do last=$1; shift; done\nexport POD="${last#--nodelist=}"\nexec "$@"\n'
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    for name, value in {
        "JOB_ID": "7",
        "JOB_NUM_NODES": "2",
        "JOB_NODELIST": "pod-[0-1]",
        "NTASKS": "2",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)

    async def refuse(name, *_):
        raise connections.UnreachedError(f"{name} cannot be reached by SSH: it refuses")

    monkeypatch.setattr(machines, "log_in", refuse)
    try:
        launcher = Launcher(handlers=[], log_dir=None, python=warm_executable, nproc_per_host=1)
        result = launcher.run(lambda: (os.environ["POD"], os.environ.get("SLURM_NTASKS")))
        assert result.results == {"pod-0": [("pod-0", None)], "pod-1": [("pod-1", None)]}
        assert (
            "pod-0 cannot be reached by SSH: it refuses; so srun starts what runs on the hosts" in caplog.text
        )
        caplog.clear()
        assert launcher.run(os.getenv, "POD").results == {"pod-0": ["pod-0"], "pod-1": ["pod-1"]}
        assert "SSH" not in caplog.text  # it is not tried again
        srun.unlink()
        cluster.close_all(["pod-0", "pod-1"])
        monkeypatch.setenv("PATH", str(srun.parent))
        with pytest.raises(todist.errors.InitializationError) as caught:
            launcher.run(int)
        assert "pod-1 cannot be reached by SSH: it refuses" in str(caught.value)
        assert "--nodelist=pod-1` cannot be started here: No such file" in str(caught.value)
        with pytest.raises(
            todist.errors.InitializationError, match="cannot be reached by SSH: it refuses"
        ):  # named by the user
            Launcher(hosts=["pod-0"], nproc_per_host=1, handlers=[], log_dir=None).run(int)
    finally:
        cluster.close_all(["pod-0", "pod-1"])


def test_visible_gpus_are_those_of_one_machine(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING")
    copied = matching(COPIED, os.environ)
    assert [copied.get(name) for name in names] == [None, "1"]
    assert matching(COPIED, {"CUDAHOSTCXX": "a", "CUDA_HOME": "b"}) == {"CUDAHOSTCXX": "a", "CUDA_HOME": "b"}
