"""A host that is reached by SSH comes late, is lost, and comes back."""

from __future__ import annotations

import contextlib
import logging
import os

import psutil
import pytest

import torchopt_dist as todist
from tests.launch.elastic.worlds import Aside, in_worlds, launch, world_of
from tests.launch.sshd import NEEDS_SSHD, Sshd
from tests.waits import say
from torchopt_dist.launching import _cluster as cluster

pytestmark = [pytest.mark.timeout(60), NEEDS_SSHD]


class Switch:
    """An SSH server that is started and stopped. Its names are `node1`, `node2` and `node3`."""

    def __init__(self, folder):
        self._folder, self.config = folder, folder / "config"
        self._server = Sshd(folder)

    def on(self):
        self._server = Sshd(self._folder)

    def off(self):
        """As a machine that fails: connections end, and there are no new ones."""
        if self._server is None:
            return
        sessions = psutil.Process(self._server.process.pid).children(recursive=True)
        self._server.stop()
        for process in sessions:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("sshd"):
                    process.kill()
        self._server = None


@pytest.fixture
def sshd(tmp_path):
    switch = Switch(tmp_path / "sshd")
    switch.off()
    yield switch
    cluster.close_all()
    switch.off()


@pytest.mark.nightly
def test_a_host_by_ssh_comes_late_is_lost_and_comes_back(tmp_path, sshd, warm_executable, caplog):
    def switch():
        world_of(tmp_path, 0, 1)
        sshd.on()
        world_of(tmp_path, 1, 2)
        sshd.off()
        ((worker, _),) = world_of(tmp_path, 2, 1)
        assert psutil.Process(worker).is_running()
        sshd.on()
        world_of(tmp_path, 3, 2)
        say(tmp_path / "end")

    with Aside(switch), caplog.at_level(logging.WARNING, "torchopt_dist.launching"):
        results = launch(
            in_worlds,
            tmp_path,
            hosts=["node1", "localhost"],
            ssh_config=sshd.config,
            python=warm_executable,
            timeout=50.0,
        )
    assert list(results.items()) == [("node1", [(3, 0, 2)]), ("localhost", [(3, 1, 2)])]
    said = [record.getMessage() for record in caplog.records if record.name == "torchopt_dist.launching"]
    assert len(said) == 2
    assert all(
        line.startswith("node1 is lost; hosts that are left: localhost; the reason: ") for line in said
    )


def test_hosts_that_never_come_are_named(sshd, reachability):
    reachability.times["start_timeout"] = 0.5
    with pytest.raises(
        todist.errors.AgentFailedError,
        match=r"(?s)^there are 0 hosts.*`start_timeout`\):\nnode1: node1 .*\nnode2: node2 ",
    ):
        launch(os.getpid, hosts=["node1", "node2"], ssh_config=sshd.config)


def test_how_many_workers_a_host_has_that_is_not_there_must_be_said(sshd):
    with pytest.raises(
        todist.errors.InitializationError, match=r"`nproc_per_host` must be a number for hosts .*node1"
    ):
        launch(os.getpid, hosts=["localhost", "node1"], nproc="cpu", ssh_config=sshd.config)
