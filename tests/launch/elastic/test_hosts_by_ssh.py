"""A host that is reached by SSH is lost, comes back, or comes later."""

from __future__ import annotations

import contextlib
import logging
import os

import psutil
import pytest

import torchopt_dist as todist
from tests.distributed.bare import say
from tests.launch.elastic.worlds import Aside, another_comes, in_worlds, launch, world_of
from tests.launch.sshd import NEEDS_SSHD, Sshd
from torchopt_dist.launch import remote

pytestmark = [pytest.mark.timeout(60), NEEDS_SSHD]


@pytest.fixture
def sshd(tmp_path):
    """Starts and stops an SSH server that knows `node1`."""

    class Switch:
        config = tmp_path / "sshd" / "config"
        server = None

        def on(self):
            self.server = Sshd(tmp_path / "sshd")
            return self

        def off(self):
            """As a machine that fails: connections end, and there are no new ones."""
            sessions = psutil.Process(self.server.process.pid).children(recursive=True)
            self.server.stop()
            for process in sessions:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.name().startswith("sshd"):
                        process.kill()
            self.server = None

    switch = Switch().on()
    yield switch
    for machine in list(remote._machines.values()):
        machine.close()
    remote._machines.clear()
    if switch.server is not None:
        switch.server.stop()


def test_a_host_by_ssh_is_lost_and_comes_back(tmp_path, sshd, caplog):
    def switch():
        world_of(tmp_path, 0, 2)
        sshd.off()
        ((worker, *_),) = world_of(tmp_path, 1, 1)
        assert psutil.Process(worker).is_running()
        sshd.on()
        world_of(tmp_path, 2, 2)
        say(tmp_path / "end")

    with Aside(switch), caplog.at_level(logging.WARNING, "torchopt_dist.launch"):
        results = launch(
            in_worlds, tmp_path, hosts=["localhost", "node1"], ssh_config=sshd.config, timeout=50.0
        )
    assert sorted(results) == ["localhost", "node1"]
    assert list(results.values()) == [[(2, 0, 2)], [(2, 1, 2)]]
    said = [record.getMessage() for record in caplog.records if record.name == "torchopt_dist.launch"]
    assert said[0].startswith("node1 is lost; hosts that are left: localhost; the reason: ")


def test_a_host_by_ssh_that_is_not_there_at_the_start_comes_later(tmp_path, sshd):
    sshd.off()
    with another_comes(tmp_path, sshd.on):
        results = launch(
            in_worlds, tmp_path, hosts=["localhost", "node1"], ssh_config=sshd.config, timeout=50.0
        )
    assert list(results.values()) == [[(1, 0, 2)], [(1, 1, 2)]]


def test_how_many_workers_a_host_has_that_is_not_there_must_be_said(sshd):
    sshd.off()
    with pytest.raises(
        todist.InitializationError, match=r"`nproc_per_host` must be a number for hosts .*node1"
    ):
        launch(os.getpid, hosts=["localhost", "node1"], nproc="cpu", ssh_config=sshd.config)
