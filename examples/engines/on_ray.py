"""`main` on actors of a Ray cluster → the values of the ranks, or the cause of an error; all start again after one."""

import os
import random
from typing import Any

import ray
from train import main

import torchopt_dist as todist

FOLLOW = (ray.exceptions.ActorDiedError, todist.PeerFailedError, todist.WorkerLostError)


class Worker:
    def address(self) -> str:
        return ray.util.get_node_ip_address()

    def run(self, func: Any, variables: dict[str, str]) -> Any:
        os.environ.update(variables)
        return func()


def launch(func: Any, size: int, max_restarts: int = 0) -> list[Any]:
    for restarts in range(max_restarts + 1):
        workers = [ray.remote(Worker).remote() for _ in range(size)]
        place = {"address": ray.get(workers[0].address.remote()), "port": random.randrange(20_000, 30_000)}
        made = [
            todist.launching.world_variables(rank, size, **place, restarts=restarts) for rank in range(size)
        ]
        calls = [worker.run.remote(func, variables) for worker, variables in zip(workers, made, strict=True)]
        errors = [error for call in calls if (error := call.future().exception())]
        if not errors:
            return list(ray.get(calls))
    raise min(errors, key=lambda error: isinstance(error, FOLLOW))


if __name__ == "__main__":
    ray.init()
    print(launch(main, 2))
