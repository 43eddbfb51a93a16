"""Adjoints that give no gradient to what the inner loss uses: a backward pass says so, and accuses nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.rows import each_row

ADJOINTS = {"FirstOrder": todist.FirstOrder(), "Reptile": todist.Reptile()}


class Program:
    """A loop with a tensor `w`, or what was made from it, in `meta`; the outer loss is the sum of what follows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)
        self.w = torch.full((3,), 2.0, requires_grad=True)
        self.made = self.w * 1
        self.x = torch.randn(4, 3)

    def adapted(self, adjoint, inner, optimizer=None):
        return todist.inner_loop(
            lambda net: net(self.x * inner).square().mean(),
            optimizer or todist.sgd(lr=0.1),
            self.net,
            2,
            meta=(self.net, self.w, self.made),
            adjoint=adjoint,
        ).params


SILENT = {
    "a leaf": lambda p: p.w,
    "what was made from one": lambda p: p.made,
}


@each_row("adjoint", ADJOINTS)
@each_row("inner", SILENT)
def test_what_only_the_inner_loss_uses_is_an_error_that_names_the_adjoints_with_a_gradient(adjoint, inner):
    program = Program()
    outer = program.adapted(ADJOINTS[adjoint], SILENT[inner](program))(program.x).sum()
    with pytest.raises(
        ValueError, match=rf"of shape \(3,\) would get no gradient: `{adjoint}\(\)` .* Recorded\(\), .*SAMA"
    ):
        outer.backward()
    with pytest.raises(RuntimeError, match="not have been used"):  # torch's own
        torch.autograd.grad(program.adapted(ADJOINTS[adjoint], program.w)(program.x).sum(), program.w)


@pytest.mark.parametrize("optimizer", [todist.sgd, todist.adam])
def test_reptile_gives_none_to_hyperparameters_either(optimizer):
    program, lr = Program(), torch.tensor(0.1, requires_grad=True)
    outer = program.adapted(ADJOINTS["Reptile"], 1.0, optimizer(lr=lr))(program.x).sum()
    with pytest.raises(ValueError, match=r"of shape \(\) would get no gradient: `Reptile\(\)`"):
        outer.backward()
    program.adapted(ADJOINTS["FirstOrder"], 1.0, optimizer(lr=lr))(program.x).sum().backward()
    assert lr.grad is not None


FINE = {
    "unused": lambda p, net: net(p.x).sum(),
    "used by the outer loss, too": lambda p, net: net(p.x * p.w).sum(),
    "used by the outer loss, by another way": lambda p, net: net(p.x).sum() + p.made.sum(),
}


@each_row("adjoint", ADJOINTS)
@each_row("outer", FINE)
def test_nothing_else_is_accused(adjoint, outer):
    program = Program()
    inner = 1.0 if outer == "unused" else program.w
    FINE[outer](program, program.adapted(ADJOINTS[adjoint], inner)).backward()
    assert (program.w.grad is None) == (outer == "unused")
    assert program.net.weight.grad is not None
    first = list(program.net.parameters())
    adapted = program.adapted(ADJOINTS[adjoint], program.w)
    torch.autograd.grad(adapted(program.x).sum(), first)  # which asks for no other
    with torch.no_grad():
        adapted.weight.add_(1)


def near_the_first(program, net):
    return sum(
        (a - b).square().sum() for a, b in zip(net.parameters(), program.net.parameters(), strict=True)
    )


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_the_first_parameters_may_be_in_the_loss_and_in_meta(adjoint):
    program = Program()
    adapted = todist.inner_loop(
        lambda net: net(program.x).sum() + near_the_first(program, net),
        todist.sgd(lr=0.1),
        program.net,
        2,
        meta=program.net,
        adjoint=ADJOINTS[adjoint],
    )
    adapted.params(program.x).sum().backward()
    assert program.net.weight.grad is not None
