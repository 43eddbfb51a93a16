"""Where a launch listens, as ``docs/transports.md`` says: at one address, and for the forkserver at no port."""

from __future__ import annotations

import os

import psutil
import pytest

import torchopt_dist as todist
from tests.waits import say, watch
from torchopt_dist.launching import Launcher


def listening(launcher_pid):
    """Rank 0: the addresses at which processes of the launch listen, by their place in it."""
    agent = psutil.Process(os.getppid())
    places = {
        "launcher": [psutil.Process(launcher_pid)],
        "forkserver": [agent.parent()],
        "agent": [agent],
        "workers": agent.children(recursive=True),
    }
    return {
        place: [
            (connection.laddr.ip, connection.laddr.port)
            for process in processes
            for connection in process.net_connections("inet")
            if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
        ]
        for place, processes in places.items()
    }


@pytest.mark.parametrize("rpc", [False, True])
def test_a_launch_here_listens_at_the_loopback_address_only(tmp_path, rpc):
    def work(launcher_pid):
        store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        found = None
        if os.environ["RANK"] == "0":
            found = listening(launcher_pid)
            say(tmp_path / "looked")
        assert watch(tmp_path / "looked")  # until then all processes are there
        if rpc:
            todist.barrier()
        return found, store

    found, store = Launcher(nproc_per_host=2, rpc=rpc, handlers=[]).run(work, os.getpid()).rank(0)
    assert found["launcher"] == found["forkserver"] == []
    assert found["agent"] == [store]
    assert store[0] == "127.0.0.1"
    assert {address for address, _ in found["workers"]} == ({"127.0.0.1"} if rpc else set())
