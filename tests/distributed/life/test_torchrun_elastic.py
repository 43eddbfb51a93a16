"""torchrun's own restarts and changes of size, with ``auto_init_rpc`` in the program: every world is a whole one."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import psutil
import pytest

from tests.launch.families import assert_gone
from tests.processes import ROOT, finish, free_port, start_torchrun, torchrun
from tests.waits import watch

PROGRAM = ROOT / "tests/distributed/elastic_program.py"
GRADIENT = [3.0 * i * i for i in range(12)]
SECONDS = 120.0
SOON = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,read_timeout=20"
"""Else torchrun takes a node for lost after 15 s, and waits for others for 30 s."""


def world(folder, number):
    """The places of the workers of a world, when it has formed."""
    path = folder / f"world.{number}"
    assert watch(path, SECONDS), f"no world {number}"
    told = json.loads(path.read_text())
    assert told["gradient"] == GRADIENT
    return told["places"]


class Jobs:
    """Agents of one elastic job on this machine; those that are left at the end are killed."""

    def __init__(self, folder):
        self._folder, self._port, self._jobs = folder, free_port(), []

    def start(self, address, **env):
        """An agent; the first one holds the rendezvous when this returns."""
        job = start_torchrun(
            *(
                "--nnodes=1:2",
                "--nproc-per-node=1",
                "--max-restarts=3",
                "--rdzv-backend=c10d",
                "--rdzv-id=job",
            ),
            *(f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-conf={SOON}", f"--local-addr={address}"),
            *(PROGRAM, self._folder),
            **{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **env},
        )
        self._jobs.append(job)
        deadline = time.monotonic() + SECONDS
        while not self._listens():
            assert time.monotonic() < deadline
            assert job.poll() is None
            time.sleep(0.01)
        return job

    def _listens(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for job in self._jobs:
            kill_all_of(job)


def kill_all_of(job):
    """Kill an agent and its workers, as a machine that fails does."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(job.pid)
        family = [root, *root.children(recursive=True)]
        for process in family:
            process.suspend()  # so that none sees another one's end
        for process in family:
            process.kill()
    job.close()
    assert_gone([process.pid for process in family])


def result_of(folder):
    result = json.loads((folder / "result").read_text())
    assert result["gradient"] == GRADIENT
    return result["places"]


def test_ranks_that_are_killed_are_restarted_up_to_three_times(tmp_path):
    (tmp_path / "end").touch()
    torchrun(*("--standalone", "--nproc-per-node=2", "--max-restarts=3"), *(PROGRAM, tmp_path, 1, 0, 1))
    pids = [pid for number in range(4) for pid, _ in world(tmp_path, number)]
    assert len(set(pids)) == 8
    assert len(result_of(tmp_path)) == 2
    assert not (tmp_path / "world.4").exists()


def world_of(nodes, folder, first):
    """The places of a world of so many nodes, and its number: the first such one from world ``first`` on.

    A node that is slow misses the survivor's last call, a second long, so there may be a world without it before.
    """
    number = first
    while len(places := world(folder, number)) != nodes:
        number += 1
    return places, number


@pytest.mark.parametrize(
    ("first", "second"),
    [("127.0.0.1", "127.0.0.2"), pytest.param("127.0.0.2", "127.0.0.1", marks=pytest.mark.nightly)],
)
def test_a_node_that_comes_later_makes_the_world_larger_and_its_loss_makes_it_smaller(
    tmp_path, first, second
):
    """The node that is lost has rank 1, and then rank 0: nodes are ranked by their addresses."""
    with Jobs(tmp_path) as jobs:
        survivor = jobs.start(first)
        assert len(world(tmp_path, 0)) == 1
        lost = jobs.start(second)
        larger, number = world_of(2, tmp_path, 1)
        assert [group for _, group in larger] == [0, 1]
        kill_all_of(lost)
        smaller, number = world_of(1, tmp_path, number + 1)
        (tmp_path / "end").touch()
        finish(survivor)
    assert result_of(tmp_path) == smaller
    assert len({pid for pid, _ in (*larger, *smaller)}) == 3  # all workers are new ones
    assert not (tmp_path / f"world.{number + 1}").exists()
