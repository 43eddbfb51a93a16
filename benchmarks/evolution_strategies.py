"""How much faster is a gradient of order zero on two workers? 256 samples of a rollout; the peer is one process.

The estimate is the same on both; only seeds and weights go out, and only numbers come back. Beside that, antithetic
pairs in one ``vmap`` in one process, against EvoTorch's estimator of PGPE where it is installed (``pip install
evotorch``); on the same noise both must give the same estimate.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable

import torch
from page import ratio, table
from torch import Tensor
from torch.func import vmap
from workers import interleaved, start_workers

import torchopt_dist as todist
from torchopt_dist.diff.zero_order import zero_order

SAMPLES, SIZE, STEPS = 256, 64, 1500
PAIRS, SIGMA, SHORT = 128, 0.1, 50


def rollout(weight: Tensor, steps: int = STEPS) -> Tensor:
    state = torch.linspace(-1, 1, SIZE)
    for _ in range(steps):
        state = torch.tanh(weight @ state)
    return state.square().sum()


def against_evotorch() -> None:
    try:
        from evotorch.distributions import SymmetricSeparableGaussian, make_functional_grad_estimator
    except ImportError as error:
        print(f"EvoTorch is not compared: {error}", file=sys.stderr)
        return
    torch.manual_seed(0)
    weight = torch.randn(SIZE, SIZE) / SIZE**0.5

    def loss(weight: Tensor) -> Tensor:
        return rollout(weight.view(SIZE, SIZE), SHORT)

    sigma = torch.full((SIZE * SIZE,), SIGMA)
    evotorch = make_functional_grad_estimator(
        SymmetricSeparableGaussian,
        function=vmap(loss),
        objective_sense="max",
        required_parameters=["mu", "sigma"],
        return_samples=True,
    )

    def theirs() -> tuple[Tensor, Tensor]:
        found = evotorch(2 * PAIRS, weight.flatten(), sigma)
        return found.grads["mu"] / (PAIRS * SIGMA**2), found.samples

    def ours(draw: Callable[[tuple[int, ...]], Tensor] = torch.randn) -> Tensor:
        at = weight.flatten().requires_grad_()
        settings = {"method": "antithetic", "num_samples": PAIRS, "sigma": SIGMA, "vectorize": True}
        return torch.autograd.grad(zero_order(draw, **settings)(loss)(at), at)[0]

    estimate, samples = theirs()
    noise = itertools.cycle((samples[::2] - weight.flatten()) / SIGMA)  # drawn again for the gradient
    torch.testing.assert_close(ours(lambda shape: next(noise)), estimate, rtol=1e-3, atol=1e-3)
    seconds = interleaved({"ours": ours, "EvoTorch": theirs}, rounds=9)
    table(
        ["antithetic pairs, in one `vmap`", "ours", "EvoTorch"],
        [[f"{PAIRS}", *(f"{seconds[name] * 1e3:,.0f} ms" for name in ("ours", "EvoTorch"))]],
    )
    part = f"{seconds['ours'] / seconds['EvoTorch']:.2f}"
    ratio(f"evolution strategies, {PAIRS} antithetic pairs in `vmap`", "EvoTorch", part)


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
    part = f"{seconds['two'] / seconds['one']:.2f}"
    ratio(f"evolution strategies, {SAMPLES} samples, two workers", "one process", part)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        torch.set_num_threads(1)
        against_evotorch()
    start_workers(2)
    main()
