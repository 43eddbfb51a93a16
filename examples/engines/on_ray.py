"""`main` on actors of a Ray cluster → the values of the ranks, or the first error; all start again after one."""

import os
import socket
from collections.abc import Callable
from typing import Any

import ray
from train import main

import torchopt_dist as todist


class Worker:
    def place(self) -> dict[str, Any]:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return {"address": ray.util.get_node_ip_address(), "port": probe.getsockname()[1]}

    def run(self, func: Callable[[], Any], rank: int, size: int, place: dict[str, Any], restarts: int) -> Any:
        os.environ.update(todist.launching.world_variables(rank, size, **place, restarts=restarts))
        return func()


def order(error: Exception) -> int:
    """A cause is before an actor that has died, and that before what follows from another rank's end."""
    cause = getattr(error, "cause", None)
    return 1 if cause is None else 2 * isinstance(cause, (todist.PeerFailedError, todist.WorkerLostError))


def error_of(call: Any) -> Exception | None:
    try:
        ray.get(call)
    except ray.exceptions.RayError as error:
        return error
    return None


def launch(func: Callable[[], Any], size: int, max_restarts: int = 0) -> list[Any]:
    for restarts in range(max_restarts + 1):
        workers = [ray.remote(Worker).remote() for _ in range(size)]
        place = ray.get(workers[0].place.remote())
        calls = [worker.run.remote(func, rank, size, place, restarts) for rank, worker in enumerate(workers)]
        errors = [error for call in calls if (error := error_of(call))]
        if not errors:
            return list(ray.get(calls))
    raise min(errors, key=order)


if __name__ == "__main__":
    ray.init()
    print(launch(main, 2))
