"""Functionals of ``torch.nn`` by the formulas of vectorized tasks have the gradients of tasks in a loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.formulas import formulas_in_transforms
from torchopt_dist.transform._gradients import recorded_gradients

D = torch.float64
TORCH: Any = torch
F: Any = nn.functional
TASKS = 3


def words(*shape: int) -> Tensor:
    return torch.arange(TASKS * torch.Size(shape).numel()).mul(7).add(2).remainder(5).reshape(TASKS, *shape)


NONE = words(1)
CLASSES = {"ignore_index": 1}
Case = tuple[Callable[..., Any], list[tuple[int, ...]], Tensor]
CASES: dict[str, Case] = {
    "embedding": (lambda i, w: F.embedding(i, w), [(5, 3)], words(6)),
    "embedding padding_idx": (lambda i, w: F.embedding(i, w, padding_idx=1), [(5, 3)], words(6)),
    "embedding padding_idx from the end": (
        lambda i, w: F.embedding(i, w, padding_idx=-1),
        [(5, 3)],
        words(2, 3),
    ),
    "embedding of one word": (lambda i, w: F.embedding(i[0], w, padding_idx=2), [(5, 3)], words(6)),
    "embedding scale_grad_by_freq": (
        lambda i, w: F.embedding(i, w, padding_idx=1, scale_grad_by_freq=True),
        [(5, 3)],
        words(6),
    ),
    "embedding max_norm": (lambda i, w: F.embedding(i, w * 1, max_norm=0.5), [(5, 3)], words(6)),
    "torch.embedding": (lambda i, w: TORCH.embedding(w, i, 1), [(5, 3)], words(6)),
    **{
        f"embedding_bag {mode}": (
            lambda i, w, mode=mode: F.embedding_bag(i, w, mode=mode, padding_idx=1),
            [(5, 3)],
            words(4, 6),
        )
        for mode in ("sum", "mean", "max")
    },
    "embedding_bag per_sample_weights": (
        lambda i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s, padding_idx=1),
        [(5, 3), (4, 6)],
        words(4, 6),
    ),
    "embedding_bag scale_grad_by_freq": (
        lambda i, w: F.embedding_bag(i, w, scale_grad_by_freq=True),
        [(5, 3)],
        words(4, 6),
    ),
    **{
        f"cross_entropy {how}": (
            lambda i, x, how=how: F.cross_entropy(x, i, label_smoothing=0.1, reduction=how, **CLASSES),
            [(6, 5)],
            words(6),
        )
        for how in ("mean", "sum", "none")
    },
    "nll_loss of images": (lambda i, x: F.nll_loss(x, i, **CLASSES), [(2, 5, 3, 2)], words(2, 3, 2)),
    "multi_margin_loss": (
        lambda i, x: F.multi_margin_loss(x, i, p=2, margin=0.7),
        [(6, 5)],
        words(6),
    ),
    "ctc_loss zero_infinity": (
        lambda i, x: F.ctc_loss(
            x.log_softmax(-1), i % 4 + 1, torch.tensor([8, 8]), torch.tensor([3, 2]), zero_infinity=True
        ),
        [(8, 2, 5)],
        words(2, 3),
    ),
    "cosine_embedding_loss": (
        lambda i, x, y: F.cosine_embedding_loss(x, y, (i > 2) * 2 - 1, margin=0.3),
        [(6, 5), (6, 5)],
        words(6),
    ),
    "torch.native_layer_norm, its statistics": (
        lambda _, x, *affine: math.prod(TORCH.native_layer_norm(x, [5], *affine, 0.1)),
        [(4, 5), (5,), (5,)],
        NONE,
    ),
    "torch.native_batch_norm, its statistics": (
        lambda _, x, *affine: math.prod(TORCH.native_batch_norm(x, *affine, None, None, True, 0.1, 0.1)),
        [(4, 5), (5,), (5,)],
        NONE,
    ),
    "torch.native_layer_norm": (
        lambda _, x, *affine: TORCH.native_layer_norm(x, [5], *affine, 0.1)[0],
        [(3, 4, 5), (5,), (5,)],
        NONE,
    ),
    "torch.native_batch_norm": (
        lambda _, x, *affine: TORCH.native_batch_norm(x, *affine, None, None, True, 0.1, 0.1)[0],
        [(3, 4, 5), (4,), (4,)],
        NONE,
    ),
    "group_norm": (lambda _, x, *affine: F.group_norm(x, 2, *affine, 0.1), [(3, 4, 5), (4,), (4,)], NONE),
    "rms_norm": (lambda _, x, w: F.rms_norm(x, [5], w, 0.1), [(3, 4, 5), (5,)], NONE),
    "local_response_norm": (lambda _, x: F.local_response_norm(x, 2), [(3, 4, 5)], NONE),
    **{
        f"weight_norm {dim}": (
            lambda _, v, g, dim=dim: TORCH._weight_norm(v, g, dim),
            [(4, 5), {0: (4, 1), 1: (1, 5), -1: ()}[dim]],
            NONE,
        )
        for dim in (0, 1, -1)
    },
    "max_pool2d": (lambda _, x: F.max_pool2d(x, 2, 1, 1, ceil_mode=True), [(1, 2, 5, 5)], NONE),
    "avg_pool2d": (
        lambda _, x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        [(1, 2, 5, 5)],
        NONE,
    ),
    "grid_sample": (
        lambda _, x, grid: F.grid_sample(x, grid.tanh(), "bilinear", "border", align_corners=True),
        [(1, 2, 5, 5), (1, 3, 3, 2)],
        NONE,
    ),
    "conv2d": (lambda _, x, w, b: F.conv2d(x, w, b, 2, 1, 2, 2), [(2, 4, 6, 6), (4, 2, 2, 2), (4,)], NONE),
    "cdist": (lambda _, x, y: torch.cdist(x, y, 1.5), [(3, 4), (2, 4)], NONE),
}


FIRST_ORDER = ("embedding_bag", "multi_margin", "ctc", "cdist")
"""Of these torch has no second derivative."""


def problem(name: str) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
    """A loss of words and of one sample's tensors; these of all samples; and all samples' words."""
    torch.manual_seed(0)
    function, shapes, seen = CASES[name]

    def loss(seen: Tensor, *params: Tensor) -> Tensor:
        made = function(seen, *params).flatten()
        return (made.sin() * torch.arange(1, len(made) + 1, dtype=D).cos()).sum()

    return loss, [torch.randn(TASKS, *shape, dtype=D) for shape in shapes], seen


def derivatives(losses: Tensor, params: list[Tensor], *, order: int) -> list[Tensor]:
    first = torch.autograd.grad(losses.sum(), params, create_graph=order == 2)
    if order == 1:
        return list(first)
    whole = torch.stack([grad.sin().sum() for grad in first]).sum()
    second = torch.autograd.grad(whole, params, allow_unused=True, materialize_grads=True)
    return [*first, *second]


# where torch has no rule, it goes through the samples one by one
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@each_row("name", [name for name in CASES if not name.startswith("weight_norm")])
def test_autograd_outside_of_vmap_has_the_derivatives_of_a_loop(name: str) -> None:
    loss, values, seen = problem(name)
    params = [value.clone().requires_grad_() for value in values]
    order = 1 if name.startswith(FIRST_ORDER) else 2
    one_by_one = torch.stack([loss(*one) for one in zip(seen, *params, strict=True)])
    expected = derivatives(one_by_one, params, order=order)
    with formulas_in_transforms():
        found = derivatives(torch.vmap(loss)(seen, *params), params, order=order)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@each_row("name", [name for name in CASES if not name.startswith(FIRST_ORDER)])
def test_a_step_of_torch_func_grad_inside_vmap_has_the_gradient_of_torch_func(name: str) -> None:
    loss, values, seen = problem(name)
    places = tuple(range(1, len(values) + 1))

    def after_a_step(seen: Tensor, *params: Tensor) -> Tensor:
        grads = torch.func.grad(loss, argnums=places)(seen, *params)
        return loss(seen, *[p - 0.1 * grad for p, grad in zip(params, grads, strict=True)])

    params = [value.clone().requires_grad_() for value in values]
    with formulas_in_transforms():
        found = torch.autograd.grad(torch.vmap(after_a_step)(seen, *params).sum(), params)
    pieces = [[value[n].clone().requires_grad_() for value in values] for n in range(TASKS)]
    expected = []
    for one, piece in zip(seen, pieces, strict=True):
        grads = recorded_gradients(loss(one, *piece), piece)
        moved = [p - 0.1 * grad for p, grad in zip(piece, grads, strict=True) if grad is not None]
        expected.append(torch.autograd.grad(loss(one, *moved), piece))
    torch.testing.assert_close(
        list(found), [torch.stack(grads) for grads in zip(*expected, strict=True)], rtol=1e-9, atol=1e-11
    )


class Words(nn.Module):
    """A table with a row of padding, as a layer or by a call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, padding_idx=1)
        self.out = nn.Linear(3, 1)

    def forward(self, seen: Tensor) -> Tensor:
        return self.out(self.table(seen).tanh()).sum(-2)


@pytest.mark.parametrize("way", ["MetaSGD", "Recorded", "Replayed"])
@pytest.mark.parametrize("vectorize", [True, False], ids=["parallelize", "vmap"])
def test_the_row_of_the_padding_rests_in_every_sample(way: str, vectorize: bool) -> None:
    torch.manual_seed(0)
    net, seen = Words().to(D), words(4, 6)
    with torch.no_grad():
        net.table.weight[1] = 0.5
    adjoints: dict[str, Any] = {"Recorded": todist.Recorded(), "Replayed": todist.Replayed()}
    scale = torch.tensor(1.3, dtype=D, requires_grad=True)

    def loss(net: nn.Module, seen: Tensor) -> Tensor:
        return (net(seen) - seen.sum(-1, keepdim=True)).square().mean() * scale

    def task(net: nn.Module, seen: Tensor) -> Tensor:
        if way in adjoints:
            own = todist.inner_loop(
                partial(loss, seen=seen), todist.sgd(lr=0.5), net, 2, meta=scale, adjoint=adjoints[way]
            ).params
        else:
            own = todist.module_clone(net)
            optimizer = todist.MetaSGD(own, lr=0.5)
            for _ in range(2):
                optimizer.step(loss(own, seen))
        return torch.cat([loss(own, seen).reshape(1), own.table.weight[1]])

    params = [*net.parameters(), scale]
    expected = torch.stack([task(net, one) for one in seen])

    def compared() -> None:
        if vectorize:
            found = todist.parallelize(todist.tasks, todist.stack_reducer, vectorize=True)(task)(net, seen)
        else:
            found = torch.vmap(partial(task, net))(seen)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found[:, 0].sum(), params), torch.autograd.grad(expected[:, 0].sum(), params)
        )

    todist.auto_init_rpc()(compared)()
    assert expected[:, 1:].eq(0.5).all()
