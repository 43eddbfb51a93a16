"""`main` on actors of a Ray cluster → the values of the ranks, or the first error; all start again after one."""

import os
import socket

import ray
from train import main

import torchopt_dist as todist


@ray.remote(num_cpus=1)
class Worker:
    def place(self):
        with socket.socket() as probe:
            probe.bind(("", 0))
            return {"address": ray.util.get_node_ip_address(), "port": probe.getsockname()[1]}

    def run(self, func, rank, size, place, restarts):
        os.environ.update(todist.world_variables(rank, size, **place, restarts=restarts))
        return func()


def order(error):
    """A cause is before an actor that has died, and that before what follows from another rank's end."""
    cause = getattr(error, "cause", None)
    return 1 if cause is None else 2 * isinstance(cause, (todist.PeerFailedError, todist.WorkerLostError))


def error_of(call):
    try:
        ray.get(call)
    except ray.exceptions.RayError as error:
        return error


def launch(func, size, max_restarts=0):
    for restarts in range(max_restarts + 1):
        workers = [Worker.remote() for _ in range(size)]
        place = ray.get(workers[0].place.remote())
        calls = [worker.run.remote(func, rank, size, place, restarts) for rank, worker in enumerate(workers)]
        errors = [error for call in calls if (error := error_of(call))]
        if not errors:
            return ray.get(calls)
    raise min(errors, key=order)


if __name__ == "__main__":
    ray.init()
    print(launch(main, 2))
