"""`main` on workers of a Dask cluster → the values of the ranks, or the first error; all start again after one."""

import os
import socket

from dask.distributed import Client, LocalCluster
from train import main

import torchopt_dist as todist


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def run(func, rank, size, place, restarts):
    os.environ.update(todist.world_variables(rank, size, **place, restarts=restarts))
    return func()


def is_echo(error):
    return isinstance(error, (todist.PeerFailedError, todist.WorkerLostError))


def launch(client, func, size, max_restarts=0):
    workers = list(client.scheduler_info(n_workers=-1)["workers"])[:size]
    for restarts in range(max_restarts + 1):
        port = client.submit(free_port, workers=workers[:1], pure=False).result()
        place = {"address": workers[0].partition("//")[2].rpartition(":")[0], "port": port}
        calls = [
            client.submit(run, func, rank, size, place, restarts, workers=[worker], pure=False)
            for rank, worker in enumerate(workers)
        ]
        errors = [error for call in calls if (error := call.exception())]
        if not errors:
            return client.gather(calls)
    raise min(errors, key=is_echo)


if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        print(launch(client, main, 2))
