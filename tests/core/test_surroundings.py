"""A backward pass in another thread, as on a GPU → functions run again as where they were called.

The default device of the calling thread is ``meta`` here, which no other thread has, and nothing makes a tensor there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.adjoint_table import ALL
from tests.rows import each_row

DOUBLE: Any = {"dtype": torch.float64, "device": "cpu"}
Devices = set[torch.device]


def in_another_thread(value: Tensor, inputs: list[Tensor]) -> tuple[Any, ...]:
    """The gradients, by a backward pass that is no part of this thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.autograd.grad, value, inputs, allow_unused=True).result()


def there(run: Callable[[], tuple[Tensor, list[Tensor]]]) -> tuple[Any, ...]:
    """The gradients of what is computed where the default device is another one."""
    with torch.device("meta"):
        value, inputs = run()
        return in_another_thread(value, inputs)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


BLOCKS = {"replayed by blocks": todist.Replayed(blocks="auto")}


@pytest.mark.filterwarnings("ignore:.Implicit.* gives no gradient")
@each_row("accumulate", [None, 2])
@each_row("name", [*ALL, *BLOCKS])
def test_steps_of_a_loop(name: str, accumulate: int | None) -> None:
    net, seen = network(), Devices()
    x, weights = (
        torch.linspace(-1, 1, 12, **DOUBLE).reshape(4, 3),
        torch.ones(4, 1, **DOUBLE).requires_grad_(),
    )

    def loss(net: Any, batch: Any) -> Tensor:
        seen.add(torch.get_default_device())
        return (batch[1] * net(batch[0]) ** 2).mean() + 0.1 * sum((p**2).sum() for p in net.parameters())

    def run() -> tuple[Tensor, list[Tensor]]:
        adjoint = {**ALL, **BLOCKS}[name]
        options: dict[str, Any] = {"adjoint": adjoint, "meta": weights, "seed": 1, "accumulate": accumulate}
        if name == "implicit":
            options["adjoint"] = todist.Implicit(todist.linear_solve.solve_inv(), not_converged="ignore")
        if accumulate and not isinstance(adjoint, (todist.Recorded, todist.Replayed)):
            options["accumulate"] = None
        made = todist.inner_loop(loss, todist.sgd(lr=0.1), net, [(x, weights)] * 3, **options)
        return made.params(x).square().mean(), [weights]

    there(run)
    assert seen == {torch.device("meta")}


def of_remat(function: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    return todist.remat(function)(b, a).sum()


def of_a_root(function: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    found: Any = todist.nonlinear_solve.newton(rtol=1e-12)(lambda x: function(x, a) - b, torch.zeros_like(b))
    return found.sum()


def of_a_custom_root(function: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    @todist.diff.implicit.custom_root(lambda x, a, b: function(x, a) - b, argnums=(1, 2))
    def solve(start: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.solve(a.detach(), b.detach())

    found: Tensor = solve(torch.zeros_like(b), a, b)
    return found.sum()


def of_a_solve(function: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    found: Any = todist.linear_solve.solve_cg(rtol=1e-12)(lambda x: function(x, a), b)
    return found.sum()


def of_an_equilibrium(function: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    def cell(z: Tensor, b: Tensor) -> Tensor:
        return z - 0.3 * (function(z, a) - b)

    found: Tensor = todist.nn.Equilibrium(cell, todist.nonlinear_solve.anderson(rtol=1e-10))(b)
    return found.sum()


@each_row("way", [of_remat, of_a_root, of_a_custom_root, of_a_solve, of_an_equilibrium])
def test_functions_that_a_backward_calls(way: Callable[..., Tensor]) -> None:
    seen = Devices()
    a = torch.tensor([[2.0, 0.5], [0.5, 1.0]], **DOUBLE).requires_grad_()
    b = torch.tensor([1.0, -1.0], **DOUBLE).requires_grad_()

    def function(x: Tensor, a: Tensor) -> Tensor:
        seen.add(torch.get_default_device())
        return a @ x

    there(lambda: (way(function, a, b), [a, b]))
    assert seen == {torch.device("meta")}
