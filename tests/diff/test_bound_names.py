"""Several tasks in a ``for``, one backward at the end → the gradients of one backward after each task.

The names that a task's functions read are bound anew for the next one. The programs are text, since a linter warns of
just that.
"""

from __future__ import annotations

import textwrap
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.adjoint_table import ALL, EXACT, SAMPLED
from tests.rows import each_row

AGAIN = [name for name, adjoint in ALL.items() if adjoint.runs_again]

SETUP = """
import torch
from torch import nn
import torchopt_dist as todist
w = torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)
xs = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
sgd = todist.sgd(lr=0.2)
def outer(result, x): return ((result.params - 1.5 * x) ** 2).sum()
"""

PROGRAMS = {
    "a variable of a loop": """
        def tasks(loop):
            for x in xs:
                yield outer(loop(lambda p: (w * (p - x) ** 2).sum(), sgd), x)
    """,
    "global names": """
        def distance(p): return (p - x) ** 2 * factors[i]
        def loss(p): return (w * distance(p)).sum()
        def tasks(loop):
            global x, i, factors
            for i, x in enumerate(xs):
                factors = [1.0 + i, 2.0, 0.5]
                yield outer(loop(loss, sgd), x)
    """,
    "attributes": """
        class Trainer:
            def loss(self, p): return self.weighted((p - self.x) ** 2)
            def weighted(self, p): return (self.weights * p).sum()
            def tasks(self, loop):
                self.weights = w
                for self.x in xs:
                    yield outer(loop(self.loss, sgd), self.x)
        def tasks(loop): return Trainer().tasks(loop)
    """,
    "batches and a schedule": """
        def batch(number): return x * (1 + 0.1 * number)
        def rate(step): return 0.2 / (1 + 0.1 * x * step)
        def loss(p, y): return (w * (p - y) ** 2).sum()
        def tasks(loop):
            global x
            for x in xs:
                yield outer(loop(loss, todist.sgd(lr=rate, momentum=0.5), batch), x)
    """,
    "a schedule of a part": """
        def rate(step): return 0.2 / (1 + 0.1 * x * step)
        def label(tree): return "own"
        def loss(p): return (w * (p - 1) ** 2).sum()
        def tasks(loop):
            global x
            for x in xs:
                parts = todist.transform.partition({"own": todist.sgd(lr=rate)}, label)
                yield outer(loop(loss, todist.chain(todist.transform.scale(1.0), parts)), x)
    """,
    "a list of batches": """
        def loss(p, y): return (w * (p - y) ** 2).sum()
        def tasks(loop):
            batches = []
            for x in xs:
                batches[:] = [x, x + 0.1, x + 0.2]
                yield outer(loop(loss, sgd, batches), x)
    """,
    "parameters of a module": """
        head = nn.Linear(2, 2).double()
        for p in head.parameters(): p.requires_grad_(False)
        def loss(p): return (w * head(p) ** 2).sum() + (p ** 2).sum()
        def tasks(loop):
            for x in xs:
                head.weight = nn.Parameter(torch.eye(2, dtype=torch.float64) * x, requires_grad=False)
                yield outer(loop(loss, sgd), x)
    """,
}


def derivatives(text: str, adjoint: Any, late: bool, order: int = 1) -> list[Tensor]:
    """The sum of the tasks' gradients, or the gradient of a number made of these."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP + textwrap.dedent(text), names)
    w = names["w"]
    given = {"meta": w, "adjoint": adjoint, "seed": 1}

    def loop(loss: Any, optimizer: Any, batches: Any = 3) -> Any:
        first = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        steps = 3 if callable(batches) else None
        return todist.inner_loop(loss, optimizer, first, batches, steps=steps, **given)

    def seeded() -> Any:
        for number, value in enumerate(names["tasks"](loop)):
            torch.manual_seed(number)  # from which evolution strategies have drawn their seeds
            yield value

    values = iter(list(seeded()) if late else seeded())
    found = []
    for value in values:
        (gradient,) = torch.autograd.grad(value, w, create_graph=order == 2)
        found.append(torch.autograd.grad(gradient.sin().sum(), w)[0] if order == 2 else gradient)
    return found


@each_row("text", PROGRAMS.values(), ids=PROGRAMS)
@each_row("name", AGAIN)
def test_a_backward_at_the_end_is_that_after_each_task(name, text):
    adjoint = ALL[name]
    late = derivatives(text, adjoint, True)
    torch.testing.assert_close(late, derivatives(text, adjoint, False))
    assert not torch.allclose(late[0], late[1])
    if name in EXACT:
        torch.testing.assert_close(late, derivatives(text, todist.Recorded(), False))


@each_row("text", PROGRAMS.values(), ids=PROGRAMS)
@each_row("name", ["replayed", "replayed from snapshots", "implicit"])
def test_second_derivatives(name, text):
    late = derivatives(text, ALL[name], True, 2)
    same = todist.Recorded() if name in EXACT else ALL[name]
    torch.testing.assert_close(late, derivatives(text, same, False, 2))


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """A weight, a target and the first parameters."""
    w, x, first = torch.tensor([[0.7, 1.3], [1.0, 2.0], [0.0, 0.0]], dtype=torch.float64).unbind()
    return w.clone().requires_grad_(), x.clone(), first.clone().requires_grad_()


@each_row("name", AGAIN)
def test_a_tensor_that_was_changed_in_place_is_an_error(name):
    """As with a recorded loop, whose graph has saved it."""
    w, x, first = tensors()

    def total(adjoint: Any) -> Tensor:
        result = todist.inner_loop(
            lambda p: (w * x * (p - x) ** 2).sum(), todist.sgd(lr=0.2), first, 3, meta=w, adjoint=adjoint
        )
        value = result.params.sum()
        x.add_(1)
        return torch.autograd.grad(value, w)[0]

    for adjoint in (todist.Recorded(), ALL[name]):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total(adjoint)


@each_row("name", AGAIN)
def test_a_batch_that_was_changed_in_place_is_an_error(name):
    w, x, first = tensors()
    loop = partial(todist.inner_loop, lambda p, y: (w * (p - y) ** 2).sum(), todist.sgd(lr=0.2), first)
    value = loop([x, x, x], meta=w, adjoint=ALL[name]).params.sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, w)


@each_row("name", AGAIN)
def test_a_tensor_that_was_changed_before_the_call_is_as_it_was(name):
    """Also where others stand in its place while the loss runs again, whose versions are others."""
    w = torch.tensor([0.2, 0.8], dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        w.add_(0.5)
    first = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loop = partial(todist.inner_loop, lambda p: (w * (p - 1) ** 2).sum(), todist.sgd(lr=0.2), first, 2)
    (found,) = torch.autograd.grad(loop(meta=w, adjoint=ALL[name]).params.sum(), w)
    assert found.shape == w.shape


def test_the_samples_of_a_vmap():
    """Of which each has a name's value of its own."""
    w = torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)

    def total(adjoint: Any, late: bool) -> Tensor:
        scale = 1.0

        def task(x: Tensor) -> Tensor:
            y = x * scale
            first = torch.zeros(2, dtype=torch.float64, requires_grad=True)
            given = {"meta": w, "adjoint": adjoint}
            result = todist.inner_loop(
                lambda p: (w * scale * (p - y) ** 2).sum(), todist.sgd(lr=0.2), first, 3, **given
            )
            return (result.params - 1.5 * x).square().sum()

        value = torch.vmap(task)(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)).sum()
        scale = 3.0 if late else scale
        return torch.autograd.grad(value, w)[0]

    torch.testing.assert_close(total(todist.Replayed(), True), total(todist.Recorded(), False))


class Recurrent(nn.Module):
    """A cell that keeps what it has last computed: not at all, to be looked at, as a buffer, or in an attribute."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.cell, self.kept, self.last = nn.RNNCell(2, 2).double(), kept, None
        self.register_buffer("state", torch.zeros(3, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        before = self.state if self.kept == "a buffer" or self.last is None else self.last
        out = self.cell(x, self.state if self.kept == "to be looked at" else before)
        if self.kept == "a buffer":
            self.state = out.detach()
        elif self.kept != "not at all":
            self.last = out.detach()
        return out


@each_row("kept", ["not at all", "to be looked at", "a buffer", "in an attribute"])
@each_row("name", AGAIN)
def test_state_in_an_attribute_is_an_error(name, kept):
    """A step that runs again would find what the last one has left; buffers go from step to step."""

    def gradient(adjoint: Any) -> Tensor:
        torch.manual_seed(0)
        net, w = Recurrent(kept), torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)
        x = torch.randn(3, 2, dtype=torch.float64)
        given = {"meta": w, "adjoint": adjoint, "seed": 1}
        made = todist.inner_loop(lambda m: (w * (m(x) - x) ** 2).mean(), todist.sgd(lr=0.5), net, 3, **given)
        return torch.autograd.grad(made.params.cell.weight_ih.sin().sum(), w)[0]

    adjoint = ALL[name]
    if name == "implicit":  # far from a minimum
        solver = todist.linear_solve.solve_normal_cg(ridge=0.1, not_converged="ignore")
        adjoint = todist.Implicit(solver, not_converged="ignore")
    if kept == "in an attribute":
        with pytest.raises(
            ValueError, match=r"state in attributes .* has set `Recurrent.last`. Make it a buffer"
        ):
            gradient(adjoint)
    else:
        found = gradient(adjoint)
        if name in EXACT:
            torch.testing.assert_close(found, gradient(todist.Recorded()))


def test_sampled_adjoints_are_among_those():
    assert set(SAMPLED) < set(AGAIN)
