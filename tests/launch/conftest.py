from __future__ import annotations

import pytest

from tests.launch.slurm_cluster import Cluster
from tests.launch.sshd import Sshd
from tests.warm_python import warm_python
from torchopt_dist.launching import Launcher
from torchopt_dist.launching import _cluster as cluster


@pytest.fixture(scope="session")
def sshd(tmp_path_factory):
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    cluster.close_all()
    server.stop()


@pytest.fixture(scope="session")
def warm_executable(tmp_path_factory):
    """An interpreter for other hosts: forkservers there are forks of a process that has imported torch."""
    return str(warm_python().executable(tmp_path_factory.mktemp("bin") / "python"))


@pytest.fixture
def launcher(sshd, warm_executable):
    """Launches by SSH, on hosts with a warm interpreter; ``python=sys.executable`` is a cold one."""

    def make(hosts=("node1",), nproc_per_host=1, **options):
        options = {"ssh_config": sshd.config, "handlers": [], "python": warm_executable, **options}
        return Launcher(hosts=list(hosts), nproc_per_host=nproc_per_host, **options)

    return make


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A SLURM cluster of four nodes."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), 4)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()
