"""Every adjoint with every optimizer on the device → the gradients that the CPU has in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.adjoint_table import ALL as OF_TABLE
from tests.diff.adjoint_table import EXACT, OPTIMIZERS, Problem, gradients
from tests.gpu.device import DEVICE, GPU, assert_near, on_device

# Away from a minimum no conjugate gradients are found.
INV = todist.Implicit(todist.linear_solve.solve_inv(), not_converged="ignore")
ALL: dict[str, Any] = {**OF_TABLE, "implicit": INV}
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}
ROUGH = ("finite difference", "SAMA")
"""A difference of two float32 numbers has half their digits."""
DRAWN = [name for name in ALL if "evolution" in name]
"""Those that draw numbers for their gradient, which no two kinds of devices draw alike."""


def problem(kind: str, optimizer: str, device: torch.device, dtype: torch.dtype) -> Problem:
    """The table's problem, made on the CPU and brought to a device."""
    with torch.device("cpu"):
        made = Problem(kind, optimizer)
    if device.type == "cpu" and dtype == torch.float64:
        return made
    moved = copy.copy(made)
    moved.net, moved.head = on_device(made.net, dtype), on_device(made.head, dtype)
    moved.params = moved.net if kind == "module" else dict(moved.net.named_parameters())
    moved.weights, moved.lr = on_device(made.weights, dtype), on_device(made.lr, dtype)
    moved.xs, moved.state = on_device(made.xs, dtype), on_device(made.state, dtype)
    return moved


def found_by(problem: Problem, name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and last parameters, and gradients."""
    torch.manual_seed(5)
    made = problem.run(ALL[name], seed=1)
    given = gradients(problem.outer(made.params), problem.tensors())
    params = made.params
    last = list(params.parameters()) if isinstance(params, nn.Module) else list(params.values())
    return [made.losses, *last], {what: gradient for what, gradient in given.items() if gradient is not None}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore:.Implicit.* gives no gradient")
@pytest.mark.filterwarnings("ignore:DirectSolver stopped")  # float32, away from a minimum
def test_gradients_are_those_on_the_cpu(name: str, optimizer: str, dtype: torch.dtype) -> None:
    values, grads = found_by(problem("module", optimizer, torch.device("cpu"), torch.float64), name)
    there = problem("module", optimizer, DEVICE, dtype)
    found, of_it = found_by(there, name)
    assert {x.device.type for x in (*found, *of_it.values())} == {DEVICE.type}
    assert_near(found, values, TOLERANCES[dtype])
    if name == "implicit" and dtype == torch.float32:
        return  # far from a minimum the equation that it solves has no solution, and rounding decides
    assert of_it.keys() == grads.keys()
    if name in DRAWN:
        assert_near(of_it.values(), found_by(there, name)[1].values(), TOLERANCES[dtype])
    else:
        assert_near(of_it.values(), grads.values(), 0.05 if name in ROUGH else 10 * TOLERANCES[dtype])


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        made = nn.Sequential(nn.Linear(4, 8), *layers, nn.Tanh(), nn.Linear(8, 1))
    return on_device(made)


def weights_through(
    net: nn.Module, adjoint: Any, loss: Callable[[nn.Module, Tensor, Tensor], Tensor], steps: int = 4
) -> list[Tensor]:
    """The losses, and the gradient of weights of examples through steps of Adam."""
    x = on_device(torch.linspace(-1, 1, 12 * 4, device="cpu").reshape(12, 4).sin())
    weights = torch.ones(12, device=DEVICE, requires_grad=True)
    torch.manual_seed(5)
    made = todist.inner_loop(
        lambda net: loss(net, x, weights),
        todist.adam(lr=0.05, eps=1e-3),
        net,
        steps,
        meta=weights,
        adjoint=adjoint,
        seed=3,
    )
    outer = sum((p**2).sum() for p in made.params.parameters())
    return [made.losses, torch.autograd.grad(outer, weights)[0]]


@pytest.mark.parametrize("name", [*EXACT[1:], "SAMA", "persistent evolution strategies"])
def test_steps_run_again_draw_the_numbers_of_the_device_again(name: str) -> None:
    net = network(nn.Dropout(0.3), nn.BatchNorm1d(8))

    def loss(net: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
        noise = torch.randn(12, device=DEVICE)
        return (weights * (net(x)[:, 0] - x.sum(1) + 0.1 * noise) ** 2).mean()

    expected = weights_through(net, todist.Recorded(), loss)
    if name in EXACT:
        assert_near(weights_through(net, ALL[name], loss), expected, 1e-4)
    else:
        first, again = (weights_through(net, ALL[name], loss) for _ in range(2))
        assert_near(first[:1], expected[:1], 1e-5)
        assert_near(first, again, 1e-6)


def test_a_seed_fixes_what_the_device_draws_and_the_generator_is_given_back() -> None:
    net = network(nn.Dropout(0.5))
    torch.manual_seed(7)
    before = torch.rand(3, device=DEVICE)
    torch.manual_seed(7)
    made = [
        todist.inner_loop(
            lambda net: net(torch.ones(5, 4, device=DEVICE)).square().mean(),
            todist.sgd(lr=0.1),
            net,
            3,
            seed=11,
        ).losses
        for _ in range(2)
    ]
    assert torch.equal(*made)
    assert len(set(made[0].tolist())) == 3
    assert torch.equal(torch.rand(3, device=DEVICE), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", EXACT[1:])
def test_autocast_is_that_of_the_loop_also_when_steps_run_again(name: str, dtype: torch.dtype) -> None:
    net = network()

    def loss(net: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
        seen.add(net(x).dtype)
        return (weights * (net(x).float()[:, 0] - x.sum(1)) ** 2).mean()

    found, seen = [], set[torch.dtype]()
    for adjoint in (todist.Recorded(), ALL[name]):
        with torch.autocast(DEVICE.type, dtype=dtype):
            found.append(weights_through(net, adjoint, loss))
    assert seen == {dtype}
    assert {x.dtype for x in found[0]} == {torch.float32}
    assert_near(found[1], found[0], 2e-2)
    assert_near(found[0], weights_through(net, todist.Recorded(), loss), 0.2)


@pytest.mark.parametrize("adjoint", [todist.Recorded(), todist.Replayed()], ids=repr)
def test_vmap_over_tasks_is_a_loop_over_them(adjoint: Any) -> None:
    net = network()
    params = {name: p.detach() for name, p in net.named_parameters()}
    xs = on_device(torch.linspace(-1, 1, 3 * 6 * 4, device="cpu").reshape(3, 6, 4).sin())

    def adapted(params: Any, x: Tensor) -> Tensor:
        def loss(params: Any) -> Tensor:
            return (torch.func.functional_call(net, params, (x,))[:, 0] - x.sum(1)).square().mean()

        last = todist.inner_loop(loss, todist.adam(lr=0.05), params, 3, adjoint=adjoint).params
        return loss(last)

    found = []
    for together in (True, False):
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        losses = (
            torch.func.vmap(adapted, (None, 0))(leaves, xs)
            if together
            else torch.stack([adapted(leaves, x) for x in xs])
        )
        found.append([losses, *torch.autograd.grad(losses.mean(), list(leaves.values()))])
    assert_near(found[0], found[1], 1e-4)


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_a_learned_rate_may_be_a_number_on_the_cpu(place: str) -> None:
    net = network().double()
    lr = torch.tensor(
        0.05, dtype=torch.float64, device="cpu" if place == "cpu" else DEVICE, requires_grad=True
    )
    x = torch.ones(5, 4, dtype=torch.float64, device=DEVICE)
    step = 1e-5
    for make in (todist.sgd, todist.adam, todist.adamw, todist.rmsprop):

        def loss_after(rate: Any, make: Any = make) -> Tensor:
            adapted = todist.inner_loop(lambda net: net(x).square().mean(), make(lr=rate), net, 3).params
            return adapted(x).square().mean()

        (grad,) = torch.autograd.grad(loss_after(lr), lr)
        assert grad.device == lr.device
        difference = (loss_after(0.05 + step) - loss_after(0.05 - step)).item() / (2 * step)
        assert grad.item() == pytest.approx(difference, rel=1e-3, abs=1e-5)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_solvers_stay_on_the_gpu() -> None:
    A = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64, device=DEVICE, requires_grad=True)
    b = torch.tensor([1.0, -1.0], dtype=torch.float64, device=DEVICE, requires_grad=True)
    for solve in (
        todist.linear_solve.solve_cg(rtol=1e-12),
        todist.linear_solve.solve_gmres(rtol=1e-12),
        todist.linear_solve.solve_bicgstab(rtol=1e-12),
        todist.linear_solve.solve_inv(),
    ):
        x = solve(lambda v: A @ v, b)
        grads = torch.autograd.grad(x.square().sum(), (A, b))
        direct = torch.autograd.grad(torch.linalg.solve(A, b).square().sum(), (A, b))
        assert_near([x, *grads], [torch.linalg.solve(A, b), *direct], 1e-8)
