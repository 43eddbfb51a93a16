"""What does a call cost over a raw ``rpc_async`` of the same bytes? No-op, 1 KiB, 1 MiB, 64 MiB."""

from __future__ import annotations

import torch
from torch.distributed import rpc
from workers import interleaved, start_workers

import torchopt_dist as todist


def receive(x: torch.Tensor | None) -> None:
    del x


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    if todist.get_rank() != 0:
        return
    print(f"{'argument':>10} {'raw rpc_async':>15} {'ours':>12} {'ratio':>7}")
    for label, size, rounds in (
        ("none", 0, 400),
        ("1 KiB", 2**10, 400),
        ("1 MiB", 2**20, 200),
        ("64 MiB", 2**26, 15),
    ):
        x = torch.zeros(size // 4) if size else None
        seconds = interleaved(
            {
                "raw": lambda x=x: rpc.rpc_async("worker1", receive, (x,)).wait(),
                "ours": lambda x=x: todist.remote_sync_call(receive, args=(x,), partitioner=1),
            },
            rounds,
        )
        raw, mine = seconds["raw"], seconds["ours"]
        print(f"{label:>10} {raw * 1e6:12.0f} us {mine * 1e6:9.0f} us {mine / raw:7.2f}")


if __name__ == "__main__":
    start_workers(2)
    main()
