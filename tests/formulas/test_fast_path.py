"""Attention in ``eval()``: tasks in one ``vmap`` have the values and the gradients of tasks in a loop."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.backends import mha

import torchopt_dist as todist
from torchopt_dist.formulas.attention import without_fast_path

TASKS = 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


LAYERS = {
    "layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1),
    "attention": Attention,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("way", ["Recorded", "Replayed", "SAMA", "MetaSGD"])
@pytest.mark.parametrize("layer", LAYERS)
def test_vectorized_tasks_of_a_transformer_in_eval_have_the_gradients_of_tasks_in_a_loop(layer, way):
    torch.manual_seed(0)
    net = nn.Sequential(LAYERS[layer](), nn.Linear(4, 1)).double().eval()
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    xs = torch.randn(TASKS, 2, 3, 4, dtype=torch.float64)

    def task(net: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
        def loss(net: nn.Module, x: Tensor) -> Tensor:
            return (weight * net(x) - x.sum(-1, keepdim=True)).square().mean()

        if way != "MetaSGD":
            adjoint = {"Recorded": todist.Recorded(), "Replayed": todist.Replayed(), "SAMA": todist.SAMA()}[
                way
            ]
            adapted = todist.inner_loop(
                loss, todist.sgd(lr=0.1), net, [x, x], meta=weight, adjoint=adjoint
            ).params
            return loss(adapted, x)
        own = todist.module_clone(net)
        todist.MetaSGD(own, lr=0.1).step(lambda: loss(own, x))
        return loss(own, x)

    def gradient(vectorize: bool) -> tuple[Tensor, ...]:
        many = todist.parallelize(todist.tasks, todist.sum_reducer, vectorize=vectorize)(task)
        wanted = [weight] if way == "SAMA" else [weight, *net.parameters()]
        with torch.no_grad():
            value = many(net, todist.replicated(weight), xs)
        return value, *torch.autograd.grad(many(net, todist.replicated(weight), xs), wanted)

    todist.auto_init_rpc()(
        lambda: torch.testing.assert_close(gradient(vectorize=True), gradient(vectorize=False))
    )()


def test_only_this_thread_s_transforms_go_without_it():
    seen: dict[str, bool] = {}

    def look(name: str) -> None:
        seen[name] = mha.get_fastpath_enabled()

    def inside(x: Tensor) -> Tensor:
        look("a transform")
        thread = threading.Thread(target=look, args=("another thread",))
        thread.start()
        thread.join(60)
        return x

    with without_fast_path():
        look("outside")
        torch.vmap(inside)(torch.ones(2))
    look("later")
    assert seen == {"a transform": False, "another thread": True, "outside": True, "later": True}
