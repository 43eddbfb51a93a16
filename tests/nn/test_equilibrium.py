"""A layer that is a fixed point: gradients against unrolling and finite differences, and what both solvers tell."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.linear_solve import solve_gmres, solve_neumann
from torchopt_dist.nn import Equilibrium
from torchopt_dist.nonlinear_solve import anderson, broyden, fixed_point_iteration, newton

EXACT: Any = {"rtol": 1e-13, "atol": 1e-13, "maxiter": 500}
WIDTH = 3


class Cell(nn.Module):
    """A contraction, since the weight's norm is below 1."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64))
        self.inject = nn.Parameter(torch.randn(WIDTH, 2, generator=draw, dtype=torch.float64))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.weight.T + x @ self.inject.T)


def zeros(x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], WIDTH)


def layer(solver: Any = None, backward: Any = None) -> Equilibrium:
    return Equilibrium(Cell(), solver or anderson(**EXACT), backward or solve_gmres(rtol=1e-13), init=zeros)


def unrolled(cell: Cell, x: Tensor) -> Tensor:
    z = zeros(x)
    for _ in range(200):
        z = cell(z, x)
    return z


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def derivatives(module: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The first derivatives of a loss, and the gradient of their squares: of order two."""
    x = inputs(4).requires_grad_()
    wanted = [x, *module.parameters()]
    first = torch.autograd.grad(run(x).pow(3).sum(), wanted, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
    return [*first, *second]


@each_row("solver", [anderson, fixed_point_iteration, newton, broyden])
def test_derivatives_of_orders_one_and_two_are_those_of_unrolling_to_convergence(solver: Any) -> None:
    module = layer(solver(**EXACT))
    x = inputs(4)
    torch.testing.assert_close(module(x), unrolled(module.cell, x), rtol=1e-10, atol=1e-11)
    expected = derivatives(module, lambda x: unrolled(module.cell, x))
    for got, want in zip(derivatives(module, module), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


def test_finite_differences_to_order_two() -> None:
    module, x = layer(), inputs(2).requires_grad_()
    weights = tuple(weight.detach().requires_grad_() for weight in module.parameters())
    names = [name for name, _ in module.named_parameters()]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), x)

    assert gradcheck(run, (x, *weights))
    assert gradgradcheck(run, (x, *weights))


def test_info_has_the_residuals_of_both_solvers() -> None:
    module = layer(anderson(rtol=1e-6, atol=0), solve_neumann(rtol=1e-3, maxiter=50))
    x = inputs(4)
    z, info = module.with_info(x)
    assert info.residual <= 1e-6 * z.norm()
    torch.testing.assert_close(info.residual, (module.cell(z, x) - z).norm().detach(), rtol=1e-6, atol=1e-12)
    assert info.converged
    assert info.backward == []
    z.sum().backward()
    (told,) = info.backward
    assert told.converged
    assert 0 < told.residual < 1e-2


def test_each_solver_that_does_not_converge_warns() -> None:
    x = inputs(4)
    with pytest.warns(UserWarning, match="Anderson stopped after 1 iterations with a residual"):
        layer(anderson(maxiter=1, rtol=1e-12))(x)
    z, info = layer(None, solve_gmres(rtol=1e-13, maxiter=1)).with_info(x)
    with pytest.warns(UserWarning, match="GMRES"):
        z.sum().backward()
    assert not info.backward[0].converged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z, info = layer(anderson(maxiter=1, rtol=1e-12, not_converged="ignore")).with_info(x)
    assert not info.converged
    with pytest.raises(torch.linalg.LinAlgError, match="stopped after 1 iterations"):
        layer(anderson(maxiter=1, rtol=1e-12, not_converged="raise"))(x)


def test_a_warm_start_saves_iterations_and_changes_nothing_else() -> None:
    module, x = layer(fixed_point_iteration(**EXACT)), inputs(4)
    cold, first = module.with_info(x)
    warm, second = module.with_info(x, start=cold)
    assert first.iterations > 3 > second.iterations
    torch.testing.assert_close(warm, cold, rtol=1e-11, atol=1e-12)
    assert torch.equal(module(x, start=cold), warm)
    gradients = [
        torch.autograd.grad(z.sum(), module.cell.weight)[0] for z in (cold, warm)
    ]  # none of the start's
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


def test_a_layer_unrolls_if_its_solver_does() -> None:
    module = Equilibrium(Cell(), fixed_point_iteration(unroll=True, **EXACT), init=zeros)
    implicit = layer()
    for got, want in zip(derivatives(module, module), derivatives(implicit, implicit), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


def test_trees_functions_and_zeros_like_the_argument() -> None:
    scale = torch.tensor(0.5, requires_grad=True)
    plain = Equilibrium(lambda z, x, shift: scale * torch.cos(z) + x + shift)
    z = plain(torch.tensor([0.1, 0.2]), 0.3)
    torch.testing.assert_close(z, (scale * torch.cos(z) + torch.tensor([0.4, 0.5])), rtol=1e-4, atol=1e-4)
    z.sum().backward()
    expected = (torch.cos(z) / (1 + scale * torch.sin(z))).sum()
    torch.testing.assert_close(scale.grad, expected.detach(), rtol=1e-3, atol=1e-3)
    tree = Equilibrium(lambda z, x: {"a": 0.5 * z["b"] + x["a"], "b": 0.5 * z["a"] + x["b"]})
    found = tree({"a": torch.ones(2), "b": torch.zeros(3 - 1)})
    torch.testing.assert_close(found["a"], torch.full((2,), 4 / 3), rtol=1e-4, atol=1e-4)
    alone = Equilibrium(torch.cos, init=lambda: torch.ones(()))
    torch.testing.assert_close(alone(), torch.tensor(0.739085), rtol=1e-4, atol=1e-4)


def adapt(model: nn.Module, x: Tensor) -> Tensor:
    model = todist.module_clone(model)
    inner = todist.MetaSGD(model, lr=0.1)
    for _ in range(2):
        inner.step(model(x[:3]).square().mean())
    return model(x[3:]).square().mean()


def test_tasks_adapt_it_on_workers_one_by_one_and_vectorized(world: Any) -> None:
    model = nn.Sequential(layer(anderson(rtol=1e-12, maxiter=40)), nn.Linear(WIDTH, 1, dtype=torch.float64))
    x = inputs(4, 6)
    loss = torch.stack([adapt(model, task) for task in x]).mean()
    expected = torch.autograd.grad(loss, [*model.parameters()])
    for found in world(2).run(gradients, model, x)[0]:
        for here, there in zip(found, expected, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-8, atol=1e-9)


@todist.rank_zero_only
def gradients(model: nn.Module, x: Tensor) -> list[Any]:
    calls = [todist.parallelize(todist.tasks, todist.mean_reducer, vectorize=v)(adapt) for v in (False, True)]
    return [torch.autograd.grad(call(model, x), [*model.parameters()]) for call in calls]


@each_row("adjoint", [todist.Recorded(), todist.Replayed(), todist.Truncated(3)])
def test_a_whole_loop_trains_it(adjoint: Any) -> None:
    model, x = layer(), inputs(5)
    target = torch.zeros(5, WIDTH, dtype=torch.float64, requires_grad=True)

    def loss(model: nn.Module) -> Tensor:
        return F.mse_loss(model(x), target)

    result = todist.inner_loop(loss, todist.sgd(lr=0.2), model, 3, meta=target, adjoint=adjoint)
    (got,) = torch.autograd.grad(result.params(x).square().sum(), target)
    by_hand = todist.module_clone(layer())
    inner = todist.MetaSGD(by_hand, lr=0.2)
    for _ in range(3):
        inner.step(F.mse_loss(unrolled(by_hand.cell, x), target))
    (want,) = torch.autograd.grad(unrolled(by_hand.cell, x).square().sum(), target)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


def test_copies_keep_solvers_and_cells() -> None:
    module, x = layer(), inputs(3)
    for other in (copy.deepcopy(module), todist.module_clone(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
        assert other.solver == module.solver
    assert "Anderson" in repr(module)
    fresh = layer()
    fresh.load_state_dict(module.state_dict())
    assert list(module.state_dict()) == ["cell.weight", "cell.inject"]


@each_row(
    ("arguments", "error", "text"),
    [
        ({"cell": 3}, TypeError, "`cell` must be a module or a function, got int"),
        (
            {"init": torch.zeros(3)},
            TypeError,
            "`init` must be a function of the layer's arguments, got Tensor",
        ),
        ({"solver": solve_gmres()}, TypeError, "`solver` must be one of todist.nonlinear_solve"),
        ({"solver": anderson(unroll=True), "backward": solve_gmres()}, ValueError, "has unroll=True"),
        ({"solver": anderson(solve=solve_gmres()), "backward": solve_gmres()}, ValueError, "has a `solve`"),
        ({"backward": 3}, TypeError, "`solve`"),
        ({"sover": anderson()}, TypeError, "did you mean `solver`"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Equilibrium(**{"cell": torch.cos, **arguments})


def test_a_start_is_asked_for_where_none_is_known() -> None:
    with pytest.raises(TypeError, match="`init=`, or `start=`"):
        Equilibrium(torch.cos)()
    assert Equilibrium(torch.cos)(start=torch.ones(())) == pytest.approx(0.739085, abs=1e-4)
