"""How much faster is a gradient of order zero on two workers? 256 samples of a rollout; the peer is one process.

The estimate is the same on both; only seeds and weights go out, and only numbers come back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from page import ratio, table
from torch import Tensor
from workers import interleaved, start_workers

import torchopt_dist as todist
from torchopt_dist.diff.zero_order import zero_order

SAMPLES, SIZE, STEPS = 256, 64, 1500


def rollout(weight: Tensor) -> Tensor:
    state = torch.linspace(-1, 1, SIZE)
    for _ in range(STEPS):
        state = torch.tanh(weight @ state)
    return state.square().sum()


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main() -> None:
    everywhere = todist.parallelize(todist.batch_partitioner, todist.concatenate_reducer)
    weight = (torch.randn(SIZE, SIZE) / SIZE**0.5).requires_grad_()
    settings = {"method": "naive", "num_samples": SAMPLES, "sigma": 0.1}
    here = zero_order(torch.randn, **settings)(rollout)
    spread = zero_order(torch.randn, parallel=everywhere, **settings)(rollout)

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(0)
        return torch.autograd.grad(function(weight), weight)[0]

    torch.testing.assert_close(gradient(here), gradient(spread))
    seconds = interleaved({"one": lambda: gradient(here), "two": lambda: gradient(spread)}, rounds=5)
    table(
        ["samples", "one process", "two workers"],
        [[f"{SAMPLES}", f"{seconds['one'] * 1e3:,.0f} ms", f"{seconds['two'] * 1e3:,.0f} ms"]],
    )
    faster = f"{seconds['one'] / seconds['two']:.2f} times as fast"
    ratio(f"evolution strategies, {SAMPLES} samples, two workers", "one process", faster)


if __name__ == "__main__":
    start_workers(2)
    main()
