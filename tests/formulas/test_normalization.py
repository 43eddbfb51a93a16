"""Normalization with a weight that an inner step moves: tasks in ``vmap`` have the gradients of tasks in a loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.formulas import formulas_in_transforms

D = torch.float64
TASKS = 3

NORMALIZATIONS = {
    "layer_norm": lambda x, weight, bias: F.layer_norm(x, (4,), weight, bias),
    "torch.layer_norm": lambda x, weight, bias: torch.layer_norm(x, [4], weight, bias),
    "layer_norm without bias": lambda x, weight, bias: F.layer_norm(x, (4,), weight) - bias,
    "batch_norm": lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, training=True),
    "batch_norm of images": lambda x, *affine: F.batch_norm(
        x.reshape(2, 4, 3, 1), None, None, *affine, training=True, eps=0.1
    ),
    "instance_norm": lambda x, weight, bias: F.instance_norm(x.mT[None], weight=weight, bias=bias),
}


@each_row("name", NORMALIZATIONS)
def test_a_step_of_torch_func_grad_has_the_gradient_of_a_loop(name):
    torch.manual_seed(0)
    params = [torch.randn(5, 4, dtype=D), torch.rand(4, dtype=D) + 0.5, torch.rand(4, dtype=D)]
    params = [p.requires_grad_() for p in params]
    xs, signs = torch.randn(TASKS, 6, 5, dtype=D), torch.randn(24, dtype=D)

    def loss(params: list[Tensor], x: Tensor) -> Tensor:
        weight, *affine = params
        made = NORMALIZATIONS[name]((x @ weight).tanh(), *affine)
        return (made.flatten().sin() * signs).sum()

    def task(x: Tensor) -> Tensor:
        grads = torch.func.grad(loss)(params, x)
        return loss([p - 0.1 * grad for p, grad in zip(params, grads, strict=True)], x)

    one_by_one = torch.stack([task(x) for x in xs])
    with formulas_in_transforms():
        at_once = torch.vmap(task)(xs)
    torch.testing.assert_close(at_once, one_by_one)
    expected = torch.autograd.grad(one_by_one.sum(), params)
    found = torch.autograd.grad(at_once.sum(), params)
    torch.testing.assert_close(found, expected)

    if torch.__version__.startswith(
        "2.13."
    ):  # if a later one is right, `torchopt_dist/formulas/normalization.py` can go
        by_torch = torch.autograd.grad(torch.vmap(task)(xs).sum(), params)
        assert not torch.allclose(by_torch[0], expected[0])


def test_evaluation_and_types_are_as_torch_has_them():
    x, affine = torch.randn(3, 4), [torch.rand(4), torch.rand(4)]
    mean, variance = torch.rand(4), torch.rand(4)
    expected = F.batch_norm(x, mean, variance, *affine)
    with formulas_in_transforms():
        torch.testing.assert_close(
            torch.vmap(lambda x: F.batch_norm(x, mean, variance, *affine))(x[None])[0], expected
        )
        half = torch.vmap(lambda x: F.layer_norm(x, (4,), *(a.bfloat16() for a in affine)))(x.bfloat16())
        assert half.dtype == torch.bfloat16
        assert F.layer_norm(x.requires_grad_(), (4,), *affine).grad_fn.name() == "NativeLayerNormBackward0"


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False)], ids=["layer_norm", "batch_norm"]
)
@pytest.mark.parametrize("way", ["inner_loop", "MetaSGD", "torch.func.grad"])
def test_vectorized_tasks_have_the_gradients_of_tasks_in_a_loop(way, norm):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 1)).to(D)
    xs = torch.randn(TASKS, 6, 3, dtype=D)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return (net(x) - x.sum(-1, keepdim=True)).square().mean()

    def task(net: nn.Module, x: Tensor) -> Tensor:
        if way == "inner_loop":
            return loss(todist.inner_loop(loss, todist.sgd(lr=0.1), net, [x, x]).params, x)
        if way == "MetaSGD":
            own = todist.module_clone(net)
            todist.MetaSGD(own, lr=0.1).step(loss(own, x))
            return loss(own, x)
        params = dict(net.named_parameters())

        def functional(params: dict[str, Tensor]) -> Tensor:
            made = torch.func.functional_call(net, params, (x,))
            return (made - x.sum(-1, keepdim=True)).square().mean()

        grads = torch.func.grad(functional)(params)
        return functional({name: p - 0.1 * grads[name] for name, p in params.items()})

    def gradient(vectorize: bool) -> tuple[Tensor, ...]:
        many = todist.parallelize(todist.tasks, todist.sum_reducer, vectorize=vectorize)(task)
        return torch.autograd.grad(many(net, xs), list(net.parameters()))

    todist.auto_init_rpc()(
        lambda: torch.testing.assert_close(gradient(vectorize=True), gradient(vectorize=False))
    )()
