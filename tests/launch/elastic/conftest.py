from __future__ import annotations

import pytest

import torchopt_dist as todist
from torchopt_dist.launch.elastic import host_job, members


@pytest.fixture(autouse=True)
def soon_again(monkeypatch):
    """Lost hosts are tried again sooner."""
    monkeypatch.setattr(members, "RETRY_SECONDS", 0.5)


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """A file; while it exists, hosts of which it has the names cannot be reached."""
    path = tmp_path / "unreachable"
    run = host_job.HostJob.run

    def run_if_reachable(job):
        if path.exists() and job._plan.hosts[0].name in path.read_text().split():
            raise todist.errors.AgentFailedError("no route")
        return run(job)

    monkeypatch.setattr(host_job.HostJob, "run", run_if_reachable)
    return path
