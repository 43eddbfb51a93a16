"""A program for any launcher: rank 0 calls all workers, and every rank returns its place."""

import torch

import torchopt_dist as todist


def where(x: torch.Tensor) -> str:
    return f"rank {todist.get_rank()} has {x.tolist()}"


@todist.auto_init_rpc()
def main() -> str:
    if todist.get_rank() == 0:
        print(todist.remote_sync_call(where, args=(torch.arange(4.0),)), flush=True)
    world = todist.get_world_info()
    return f"{world.rank} of {world.world_size}, {world.local_rank} of {world.local_world_size} here"


if __name__ == "__main__":
    print(main(), flush=True)
