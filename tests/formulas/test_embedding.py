"""Embeddings with a row for padding inside of transforms: the numbers of a loop over the tasks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist
from tests.cuda_graphs import emulate_graphs
from tests.rows import each_row
from torchopt_dist.formulas import formulas_in_transforms

D = torch.float64
INDICES = torch.tensor([[0, 1, 1, 4], [2, 1, 3, 1], [4, 4, 0, 2]])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 1},
    "padding from the end": {"padding_idx": -1},
}


@each_row("batched", [False, True])
@each_row("name", OPTIONS)
def test_derivatives_outside_and_inside_of_vmap_are_those_of_a_loop(name: str, batched: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn((3, 5, 2) if batched else (5, 2), dtype=D)

    def value(weight: Tensor, indices: Tensor) -> Tensor:
        return F.embedding(indices, weight, **OPTIONS[name]).pow(3).sum()

    def found(at_once: bool) -> list[Tensor]:
        leaf = weight.clone().requires_grad_()
        rows = leaf if batched else [leaf] * 3
        if at_once:
            with formulas_in_transforms():
                values = torch.vmap(value, (0 if batched else None, 0))(leaf, INDICES)
        else:
            values = torch.stack([value(*one) for one in zip(rows, INDICES, strict=True)])
        (first,) = torch.autograd.grad(values.square().sum(), leaf, create_graph=True)
        return [values, first, torch.autograd.grad(first.square().sum(), leaf)[0]]

    torch.testing.assert_close(found(True), found(False), rtol=1e-12, atol=1e-12)


class Words(nn.Module):
    """Sentences of words, some of which are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = (
            nn.Embedding(7, 3, padding_idx=0, dtype=D),
            nn.Linear(12, 2, dtype=D),
        )

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(torch.tanh(self.words(x).flatten(1)))
        return made


def adapted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model = todist.module_clone(model)
    inner = todist.MetaSGD(model, lr=0.5)
    for _ in range(2):
        inner.step(F.mse_loss(model(x), y))
    return F.mse_loss(model(x), y)


def by_inner_loop(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    last = todist.inner_loop(lambda net: F.mse_loss(net(x), y), todist.sgd(lr=0.5), model, 2).params
    return sum((p**3).sum() for p in last.parameters())


@pytest.mark.parametrize("task", [adapted, by_inner_loop], ids=["MetaSGD", "inner_loop"])
@pytest.mark.parametrize("way", ["vectorize", "vmap", "compile"])
def test_tasks_at_once_leave_the_padding_alone(way: str, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if (way == "vmap") is (task is adapted):
        return  # outside of our calls the model runs by torch's rule; `inner_loop` is not compiled in a task
    emulate_graphs(monkeypatch)
    torch.manual_seed(0)
    model, x = Words(), torch.randint(0, 7, (4, 5, 4))
    y = torch.randn(4, 5, 2, dtype=D)

    def body() -> None:
        def found(**options: Any) -> list[Tensor]:
            if options == {"vmap": True}:
                losses = torch.vmap(lambda x, y: task(model, x, y))(x, y)
            else:
                losses = todist.parallelize(todist.tasks, todist.stack_reducer, **options)(task)(model, x, y)
            return [losses, *torch.autograd.grad(losses.mean(), list(model.parameters()))]

        options = {
            "vectorize": {"vectorize": True},
            "vmap": {"vmap": True},
            "compile": {"vectorize": True, "compile": True},
        }[way]
        expected = found()
        if task is adapted:
            assert not expected[1][0].any()  # nothing comes back to the row of the padding
        torch.testing.assert_close(found(**options), expected, rtol=1e-9, atol=1e-11)

    todist.auto_init_rpc()(body)()
