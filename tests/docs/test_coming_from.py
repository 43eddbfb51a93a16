"""``docs/coming_from.md``: what is said to stand here for another library's → it does that, cell by cell."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist import linear_solve

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
X, Y = torch.linspace(-1, 1, 24).view(6, 4).double(), torch.arange(6) % 3


def new() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X), Y)


def deepcopied() -> None:
    model = new()
    fmodel = todist.module_clone(model, by="deepcopy")
    todist.MetaSGD(fmodel, lr=0.1).step(loss_of(fmodel))
    loss_of(fmodel).backward()
    assert model.weight.grad is None


def of_a_tensor() -> None:
    fmodel, lr = todist.module_clone(new()), torch.tensor(0.1, requires_grad=True)
    todist.MetaSGD(fmodel, lr=lr).step(loss_of(fmodel))
    assert torch.autograd.grad(loss_of(fmodel), lr)[0] != 0


def without_a_graph() -> None:
    model, twin = new(), new()
    with torch.no_grad():
        fmodel = todist.module_clone(model)
        diffopt = todist.MetaSGD(fmodel, lr=0.1)
        for _ in range(5):
            diffopt.step(lambda: loss_of(fmodel))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(twin).backward()
        optimizer.step()
    torch.testing.assert_close(fmodel.weight, twin.weight.detach())
    assert fmodel.weight.grad_fn is None


def first_order() -> None:
    model = new()
    learner = todist.module_clone(model)
    todist.MetaSGD(learner, lr=0.1).step(loss_of(learner), first_order=True)
    (found,) = torch.autograd.grad(loss_of(learner), model.weight)
    moved = learner.weight.detach().requires_grad_()
    loss = F.cross_entropy(F.linear(X, moved, learner.bias.detach()), Y)
    torch.testing.assert_close(found, torch.autograd.grad(loss, moved)[0])


def of_torch() -> None:
    fmodel = todist.module_clone(new())
    todist.differentiable(torch.optim.NAdam, fmodel, lr=0.1).step(loss_of(fmodel))
    assert fmodel.weight.grad_fn is not None


def state_before() -> None:
    model = new()
    fmodel = todist.module_clone(model)
    first = todist.extract_state_dict(fmodel)
    todist.MetaSGD(fmodel, lr=0.1).step(loss_of(fmodel))
    assert fmodel.weight is not model.weight
    todist.recover_state_dict(fmodel, first)
    assert fmodel.weight is model.weight


def eps() -> None:
    """Of one step from a gradient g: g / (|g| + eps), and by higher's g / (|g| + eps / sqrt(1 - b2))."""
    w, g = torch.zeros(1).double(), torch.full((1,), 1e-6).double()
    update, _ = todist.adam(lr=1.0, eps=1e-6).update(g, todist.adam(lr=1.0, eps=1e-6).init(w), params=w)
    torch.testing.assert_close(update, torch.full((1,), -0.5).double())


def running_state() -> None:
    model = new()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    inner = todist.MetaAdam(todist.module_clone(model), lr=0.1)
    inner.load_state_dict(optimizer.state_dict())
    (state,) = inner.get_states()
    result = todist.inner_loop(loss_of, todist.adam(lr=0.1), model, 2, state=state)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    torch.testing.assert_close(result.params.weight, model.weight)


def rates_by_entry() -> None:
    learner = todist.module_clone(new())
    rates = {name: torch.full_like(p, 0.1, requires_grad=True) for name, p in learner.named_parameters()}
    todist.MetaSGD(learner, lr=rates).step(loss_of(learner))
    assert torch.autograd.grad(loss_of(learner), rates["weight"])[0].any()


def unused() -> None:
    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.never = nn.Parameter(torch.ones(1))

    learner = todist.module_clone(Net().double())
    before = learner.never
    todist.MetaSGD(learner, lr=0.1).step(loss_of(learner))
    assert learner.never is before


def by(adjoint: todist.Adjoint, *, rtol: float = 0.3) -> Callable[[], None]:
    def check() -> None:
        decay = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

        def loss(model: nn.Module) -> Tensor:
            return loss_of(model) + decay * sum((p**2).sum() for p in model.parameters())

        adapted = todist.inner_loop(loss, todist.sgd(lr=0.5), new(), 30, meta=decay, adjoint=adjoint)
        (found,) = torch.autograd.grad(loss_of(adapted.params), decay)
        exact = todist.inner_loop(loss, todist.sgd(lr=0.5), new(), 30, meta=decay)
        (want,) = torch.autograd.grad(loss_of(exact.params), decay)
        torch.testing.assert_close(found, want, rtol=rtol, atol=1e-3)

    return check


def unrolled() -> None:
    adapted = todist.inner_loop(loss_of, todist.sgd(lr=0.1), new(), 5)
    assert len(adapted.losses) == 5


def implicit() -> None:
    for solver in (linear_solve.solve_neumann, linear_solve.solve_cg):
        by(todist.Implicit(solver(maxiter=50)))()


CELLS: dict[str, Callable[[], None]] = {
    '`module_clone(model, by="deepcopy")`': deepcopied,
    "`MetaSGD(fmodel, lr=lr)` with a tensor `lr`": of_a_tensor,
    "`step(lambda: loss)` under `torch.no_grad()`, with the loss computed in the function": without_a_graph,
    "`todist.differentiable(torch.optim.NAdam, fmodel, lr=0.1)`": of_torch,
    "`extract_state_dict(fmodel)` before the steps": state_before,
    "as torch's, which adds `eps` after the bias correction": eps,
    "`inner.load_state_dict(opt.state_dict())`, then `inner.get_states()[0]`, which `inner_loop` takes as `state=`": (
        running_state
    ),
    "`inner.step(loss, first_order=True)`": first_order,
    "`todist.MetaSGD(learner, lr={name: a tensor of the parameter's shape})`": rates_by_entry,
    "not needed: a parameter without a gradient stays as it is": unused,
    "`adjoint=todist.FiniteDifference()`": by(todist.FiniteDifference()),
    "`adjoint=todist.SAMA()`": by(todist.SAMA(), rtol=1.0),  # of the right sign, at most twice as large
    "`adjoint=todist.Implicit(solver)` with one of the [linear solvers](implicit.md#linear-solvers)": implicit,
    "the number of steps of `inner_loop`": unrolled,
}
ELSEWHERE = {
    "no context: a clone and an optimizer",  # the program above the table
    "your own [gradient transformation](transformations.md)",
    "none; use any data set",
    "your own loop",
    "`parallelize` around the inner loss, or around a whole inner loop",  # run by tests of calls
}


def test_every_cell_is_run() -> None:
    text, _, _ = PAGE.read_text("utf-8").partition("\n## torchrunx\n")  # whose cells name tests
    rows = re.findall(r"^\|(.*)\|(.*)\|$", text, re.MULTILINE)
    cells = {right.strip() for _, right in rows} - {"here", "---"}
    assert cells == CELLS.keys() | ELSEWHERE


@each_row("cell", CELLS)
def test_a_cell_does_what_it_stands_for(cell: str) -> None:
    CELLS[cell]()
