"""Many gradients at a time, by ``is_grads_batched=True``, are those that are asked for one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.test_accumulate import ROWS, Numbered, example, outer, weighted
from tests.rows import each_row
from torchopt_dist.core.rows import in_rows, of_rows, rows_of

DOUBLE: Any = {"dtype": torch.float64}


def compare(values: Tensor, inputs: list[Tensor]) -> None:
    """Rows of a Jacobian, together and one by one."""
    alone = [torch.autograd.grad(x, inputs, retain_graph=True, allow_unused=True) for x in values]
    rows = torch.eye(len(values), dtype=values.dtype)
    together = torch.autograd.grad(
        values, inputs, rows, is_grads_batched=True, retain_graph=True, allow_unused=True
    )
    for found, *each in zip(together, *alone, strict=True):
        some = next((one for one in [found, *each] if one is not None), None)
        if some is None:
            continue
        zero = torch.zeros_like(each[0] if each[0] is not None else some)
        expected = torch.stack([zero if one is None else one for one in each])
        torch.testing.assert_close(
            torch.zeros_like(expected) if found is None else found, expected, rtol=1e-10, atol=1e-12
        )


@pytest.mark.filterwarnings("ignore:`Implicit:UserWarning")
@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("name", ROWS)
def test_every_adjoint_answers_many_questions_at_once(name: str, count: int | None) -> None:
    problem = Numbered("module", "clipped adam")
    adjoint = todist.Replayed(blocks=problem.net) if "blocks" in name else ROWS[name]
    made = problem.run(adjoint, accumulate=count)
    values = torch.stack([(p**2).sum() for p in made.params.parameters()])
    compare(values, list(problem.tensors().values()))


@each_row("count", [None, 2])
@each_row("adjoint", [todist.Replayed(), todist.Replayed(snapshots=2)], ids=["all", "two"])
def test_steps_that_run_again_may_draw_random_numbers(adjoint: Any, count: int | None) -> None:
    model, weights, batches = example(nn.Dropout(0.5))
    made = todist.inner_loop(
        weighted(weights),
        todist.adam(lr=0.1, eps=1e-3),
        model,
        batches,
        meta=weights,
        adjoint=adjoint,
        accumulate=count,
    )
    compare(torch.stack([(p**2).sum() for p in made.params.parameters()]), [weights])


def test_the_gradients_of_many_gradients() -> None:
    model, weights, batches = example()
    jacobians = []
    for adjoint in (todist.Recorded(), todist.Replayed()):
        made = todist.inner_loop(
            weighted(weights), todist.sgd(lr=0.1), model, batches, meta=weights, adjoint=adjoint
        )
        (grad,) = torch.autograd.grad(outer(made.params), weights, create_graph=True)
        compare(grad, [weights])
        jacobians.append(torch.autograd.grad(grad, weights, torch.eye(7, **DOUBLE), is_grads_batched=True)[0])
    torch.testing.assert_close(*jacobians, rtol=1e-10, atol=1e-12)


def test_solvers_roots_and_estimates() -> None:
    a = torch.tensor([[3.0, 1.0], [1.0, 2.0]], **DOUBLE, requires_grad=True)
    b = torch.tensor([1.0, -1.0], **DOUBLE, requires_grad=True)
    compare(todist.linear_solve.solve_cg(rtol=1e-12)(lambda v: a @ v, b), [a, b])

    @todist.diff.implicit.custom_root(lambda x, a, b: a @ x + x**3 - b, argnums=(1, 2))
    def root(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        for _ in range(100):
            x = x - 0.1 * (a @ x + x**3 - b)
        return x

    compare(root(torch.zeros(2, **DOUBLE), a, b), [a, b])
    torch.manual_seed(0)

    @todist.diff.zero_order.zero_order(lambda shape: torch.randn(shape, **DOUBLE), num_samples=4)
    def estimate(b: Tensor) -> Tensor:
        return (b**2).sum()

    compare(torch.stack([estimate(b)]), [b])


def test_a_thread_of_the_engine_tells_the_gradients_apart() -> None:
    """As for tensors on a GPU: there a backward runs in a thread that the engine has started."""
    counts = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, bar: Tensor) -> Tensor:
            return ThreadPoolExecutor(1).submit(doubled, ctx, bar).result()

    @in_rows
    def doubled(ctx: Any, bar: Tensor) -> Tensor:
        rows, many = rows_of(bar)
        counts.append(len(rows) if many else 0)
        return of_rows(2 * rows, many)

    x = torch.ones(3, **DOUBLE, requires_grad=True)
    rows = torch.arange(12, **DOUBLE).reshape(4, 3)
    (found,) = torch.autograd.grad(Doubled.apply(x), x, rows, is_grads_batched=True)
    torch.testing.assert_close(found, 2 * rows)
    assert counts == [4]
