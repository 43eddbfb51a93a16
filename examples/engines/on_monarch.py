"""`main` on actors of Monarch → the values of the ranks."""

import os
import random
import socket
from typing import Any

from monarch.actor import Actor, current_rank, endpoint, this_host
from train import main

import torchopt_dist as todist


class Worker(Actor):
    @endpoint
    def run(self, func: Any, size: int, place: dict[str, Any]) -> Any:
        os.environ.update(todist.launching.world_variables(current_rank().rank, size, **place))
        return func()


def launch(func: Any, size: int) -> list[Any]:
    place = {"address": socket.gethostname(), "port": random.randrange(20_000, 30_000)}
    workers = this_host().spawn_procs(per_host={"workers": size}).spawn("workers", Worker)
    return [value for _, value in workers.run.call(func, size, place).get().items()]


if __name__ == "__main__":
    print(launch(main, 2))
