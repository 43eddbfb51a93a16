"""`main` on workers of a Dask cluster → the values of the ranks, or the first error."""

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

from dask.distributed import Client, LocalCluster, wait
from train import main

import torchopt_dist as todist


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def run(func: Callable[[], Any], rank: int, size: int, place: dict[str, Any]) -> Any:
    os.environ.update(todist.launching.world_variables(rank, size, **place))
    return func()


def is_echo(error: Exception) -> bool:
    return isinstance(error, (todist.PeerFailedError, todist.WorkerLostError))


def errors_of(calls: list[Any]) -> list[Exception]:
    """The errors of the calls, as soon as there is one; a worker that has ended gives no answer."""
    left = calls
    while left and not any(call.status == "error" for call in calls):
        left = list(wait(left, return_when="FIRST_COMPLETED").not_done)
    if left:
        with contextlib.suppress(TimeoutError):
            wait(left, timeout=2)
    return [call.exception() for call in calls if call.status == "error"]


def launch(client: Client, func: Callable[[], Any], size: int) -> list[Any]:
    workers = list(client.scheduler_info(n_workers=-1)["workers"])[:size]
    port = client.submit(free_port, workers=workers[:1], pure=False).result()
    place = {"address": workers[0].partition("//")[2].rpartition(":")[0], "port": port}
    calls = [
        client.submit(run, func, rank, size, place, workers=[worker], pure=False)
        for rank, worker in enumerate(workers)
    ]
    if errors := errors_of(calls):
        raise min(errors, key=is_echo)
    return list(client.gather(calls))


if __name__ == "__main__":
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        print(launch(client, main, 2))
