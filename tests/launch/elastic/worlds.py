"""Elastic launches whose workers tell in which world they are, and what is done beside them."""

from __future__ import annotations

import json
import os
import signal
import threading

from tests.waits import say, watch
from torchopt_dist import Liveness
from torchopt_dist.launching import Launcher


def launch(
    func,
    *args,
    hosts=("localhost", "localhost"),
    nproc=1,
    min_hosts=1,
    max_hosts=2,
    max_restarts=0,
    rpc=False,
    handlers=(),
    ssh_config=None,
    python=None,
    timeout=40.0,
    start_timeout=20.0,
    stop_timeout=1.0,
    exit_timeout=10.0,
    patience=5.0,
    port=0,
):
    launcher = Launcher(
        hosts=hosts,
        nproc_per_host=nproc,
        min_hosts=min_hosts,
        max_hosts=max_hosts,
        max_restarts=max_restarts,
        rpc=rpc,
        handlers=handlers,
        log_dir=None,
        ssh_config=ssh_config,
        python=python,
        timeout=timeout,
        start_timeout=start_timeout,
        stop_timeout=stop_timeout,
        exit_timeout=exit_timeout,
        master_port=port,
        liveness=Liveness(patience=patience),
    )
    return launcher.run(func, *args).results


def place():
    """This worker, and its agent."""
    return os.getpid(), os.getppid()


def in_worlds(folder, act=None):
    """A file for each rank of each world; on until there is a file ``end``."""
    world = os.environ["TORCHELASTIC_RESTART_COUNT"]
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    say(folder / f"world{world}.rank{rank}", json.dumps({"size": int(size), "place": place()}))
    if act is not None:
        act(int(world), int(rank))
    assert watch(folder / "end", 30.0)
    return int(world), int(rank), int(size)


def world_of(folder, world, size):
    """The places of its ranks."""
    told = []
    for rank in range(size):
        path = folder / f"world{world}.rank{rank}"
        assert watch(path, 20.0), (
            f"{path.name} has not come; there are {sorted(p.name for p in folder.iterdir())}"
        )
        told.append(json.loads(path.read_text()))
        assert told[-1]["size"] == size
    return [tuple(each["place"]) for each in told]


def kill_agent(places, rank):
    """As if the host of a rank had failed."""
    os.kill(places[rank][1], signal.SIGKILL)


class Aside:
    """What is done beside a launch, in a thread; its error is raised at the end."""

    def __init__(self, function):
        self._function, self._error = function, None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            self._function()
        except BaseException as error:
            self._error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace):
        self._thread.join()
        if self._error is not None:
            raise self._error
