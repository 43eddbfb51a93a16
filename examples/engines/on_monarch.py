"""`main` on actors of Monarch → the values of the ranks."""

import os
import socket
from collections.abc import Callable
from typing import Any

from monarch.actor import Actor, current_rank, endpoint, this_host
from train import main

import torchopt_dist as todist


class Worker(Actor):
    @endpoint
    def run(self, func: Callable[[], Any], size: int, place: dict[str, Any]) -> Any:
        os.environ.update(todist.launching.world_variables(current_rank().rank, size, **place))
        return func()


def launch(func: Callable[[], Any], size: int) -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        place = {"address": socket.gethostname(), "port": probe.getsockname()[1]}
    workers = this_host().spawn_procs(per_host={"workers": size}).spawn("workers", Worker)
    return [value for _, value in workers.run.call(func, size, place).get().items()]


if __name__ == "__main__":
    print(launch(main, 2))
