from __future__ import annotations

import pytest

from tests.launch.sshd import Sshd
from torchopt_dist.launch import Launcher
from torchopt_dist.launch import _remote as remote


@pytest.fixture(scope="session")
def sshd(tmp_path_factory):
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    remote.close_all()
    server.stop()


@pytest.fixture
def launcher(sshd):
    def make(hosts=("node1",), nproc_per_host=1, **options):
        options = {"ssh_config": sshd.config, "handlers": [], **options}
        return Launcher(hosts=list(hosts), nproc_per_host=nproc_per_host, **options)

    return make
