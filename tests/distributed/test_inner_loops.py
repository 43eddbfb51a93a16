"""Inner loops as tasks of calls have the gradients of one process: each adjoint, vectorized or not, loops in loops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from torchopt_dist import linear_solve

BY_TASK = todist.dim_partitioner(exclusive=True, keepdim=False)
ADJOINTS = {
    "recorded": todist.Recorded(),
    "replayed": todist.Replayed(snapshots=2),
    "truncated": todist.Truncated(2),
    "first order": todist.FirstOrder(),
    "reptile": todist.Reptile(),
}


def task(model, weight, lr, x, *, adjoint):
    def loss(model):
        return (weight * model(x[:3]) ** 2).mean()

    adapted = todist.inner_loop(loss, todist.adam(lr=lr, eps=1e-3), model, 3, meta=weight, adjoint=adjoint)
    return adapted.params(x[3:]).square().mean()


def setting():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 1)).double().eval()
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    return model, weight, lr, torch.randn(4, 6, 2, dtype=torch.float64)


def compare_tasks(adjoint, rtol):
    """On rank 0: tasks on the workers, in a loop and vectorized, have the gradients that they have here: these."""
    model, weight, lr, xs = setting()
    ins = [*model.parameters(), weight, lr]

    def one(model, x):
        return task(model, weight, lr, x, adjoint=adjoint)

    want = torch.stack([one(model, x) for x in xs]).mean()
    expected = torch.autograd.grad(want, ins, allow_unused=True)
    assert any(gradient is not None and gradient.any() for gradient in expected)
    for vectorize in (False, True):
        spread = todist.parallelize(BY_TASK, todist.sum_reducer, vectorize=vectorize)(one)
        loss = spread(model, xs) / len(xs)
        found = torch.autograd.grad(loss, ins, allow_unused=True)
        torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
        for gradient, other in zip(found, expected, strict=True):
            if gradient is None or other is None:
                assert gradient is None or not gradient.any()
                assert other is None or not other.any()
            else:
                torch.testing.assert_close(gradient, other, rtol=rtol, atol=1e-12)
    return expected


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tasks_have_the_gradients_of_one_process(world, size):
    def body():
        for adjoint in ADJOINTS.values() if size == 2 else [ADJOINTS["replayed"]]:
            compare_tasks(adjoint, rtol=1e-10)

    world(size).on_zero(body)


def test_tasks_with_estimated_gradients_have_those_of_one_process(world):
    def body():
        for adjoint in (
            todist.FiniteDifference(),
            todist.SAMA(),
            todist.Implicit(linear_solve.solve_cg(ridge=1.0), not_converged="ignore"),
        ):
            *_, of_weight, _of_lr = compare_tasks(adjoint, rtol=1e-7)
            assert of_weight.any()

    world(2).on_zero(body)


def test_a_loss_on_workers_is_replayed(world):
    def body():
        model, weight, lr, xs = setting()
        on_workers = todist.parallelize(BY_TASK, todist.mean_reducer)(
            lambda m, x: (weight * m(x)).square().mean()
        )
        ins = [*model.parameters(), weight, lr]
        made = []
        for adjoint in (todist.Recorded(), todist.Replayed()):
            adapted = todist.inner_loop(
                on_workers, todist.sgd(lr=lr), model, [xs, xs], meta=weight, adjoint=adjoint
            )
            made.append(torch.autograd.grad(adapted.params(xs).square().mean(), ins))
        for gradient, other in zip(*made, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-12)

    world(2).on_zero(body)
