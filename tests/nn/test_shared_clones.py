"""An optimizer that steps in place, a clone that shares its module's parameters → a warning."""

import pytest
import torch

import torchopt_dist as todist
from tests.rows import each_row

MADE = [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS, todist.SGD, todist.AdamW]


@each_row("made", MADE)
def test_a_step_in_place_of_a_clone_is_told(made):
    module = torch.nn.Linear(2, 1)
    before = module.weight.detach().clone()
    clone = todist.module_clone(module)
    optimizer = made(clone.parameters(), lr=0.1)
    closure = []
    if made is torch.optim.LBFGS:
        closure.append(lambda: clone(torch.ones(1, 2)).sum())
    else:
        clone(torch.ones(1, 2)).sum().backward()
    home = "todist" if made.__module__.startswith("torchopt_dist") else r"torch\.optim"
    told = rf"{home}\.{made.__name__} moves .*a Linear, and so the module"
    with pytest.raises(RuntimeWarning, match=told):  # as warnings are errors here
        optimizer.step(*closure)
    assert torch.equal(module.weight, before)


@each_row("case", ["deepcopy", "moved", "partly moved", "gone", "module gone", "known", "frozen"])
def test_steps_that_are_meant_are_not_told(case):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    x = torch.ones(1, 2)
    outer = torch.optim.SGD(module.parameters(), lr=0.1)
    if case == "known":
        module(x).sum().backward()
        todist.module_clone(torch.nn.Linear(1, 1))  # from the first clone on, steps are noted
        outer.step()
    clone = todist.module_clone(module, by="deepcopy" if case == "deepcopy" else "reference")
    if case in ("moved", "partly moved"):
        todist.MetaSGD(clone if case == "moved" else clone[1], lr=0.1).step(clone(x).sum())
    if case in ("deepcopy", "module gone"):
        del module
        outer = torch.optim.SGD(clone.parameters(), lr=0.1)
    before = [p.detach().clone() for group in outer.param_groups for p in group["params"]]
    if case == "gone":
        del clone
        module(x).sum().backward()
    else:
        clone(x).sum().backward()
    if case == "frozen":
        outer.zero_grad()
    outer.step()
    now = [p for group in outer.param_groups for p in group["params"]]
    assert all(torch.equal(*pair) for pair in zip(before, now, strict=True)) == (case == "frozen")
