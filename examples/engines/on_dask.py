"""`main` on workers of a Dask cluster → the values of the ranks, or the cause of an error."""

import contextlib
import os
import random
from typing import Any
from urllib.parse import urlsplit

from dask.distributed import Client, as_completed, wait
from train import main

import torchopt_dist as todist

FOLLOW = (todist.PeerFailedError, todist.WorkerLostError)


def run(func: Any, variables: dict[str, str]) -> Any:
    os.environ.update(variables)
    return func()


def launch(client: Client, func: Any, size: int) -> list[Any]:
    workers = list(client.scheduler_info(n_workers=-1)["workers"])[:size]
    place = {"address": urlsplit(workers[0]).hostname, "port": random.randrange(20_000, 30_000)}
    made = [todist.launching.world_variables(rank, size, **place) for rank in range(size)]
    calls = [client.submit(run, func, made[i], workers=[workers[i]], pure=False) for i in range(size)]
    if any(call.status == "error" for call in as_completed(calls)):
        with contextlib.suppress(TimeoutError):  # a worker that has ended gives no answer
            wait(calls, timeout=2)
        failed = [call.exception() for call in calls if call.status == "error"]
        raise min(failed, key=lambda error: isinstance(error, FOLLOW))
    return list(client.gather(calls))


if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        print(launch(client, main, 2))
