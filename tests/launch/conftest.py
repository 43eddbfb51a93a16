from __future__ import annotations

import pytest

from tests.launch.ferries import Ferries
from tests.launch.sshd import Sshd
from torchopt_dist.launch import Launcher, remote


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


@pytest.fixture
def ferries():
    made = []

    def make(*args, **kwargs):
        made.append(Ferries(*args, **kwargs))
        return made[-1]

    yield make
    for both in made:
        both.close()


@pytest.fixture
def channel(ferries):
    return ferries().channel()
