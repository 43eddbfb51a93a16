"""How long does a MAML gradient take in one process, against the libraries that a user would pick instead?

Four inner steps of SGD on an MLP, 8 tasks, one thread. By hand with ``torch.func`` in ``vmap`` and in a loop; with
TorchOpt, higher and learn2learn where they are installed (``pip install --no-deps torchopt higher learn2learn``). All
must give the gradient that is written by hand.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from page import ratio, table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from workers import interleaved

import torchopt_dist as todist

TASKS, STEPS, LR, WIDTH = 8, 4, 0.05, 64
Task = tuple[Tensor, Tensor]


def inner_loss(net: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net(x[:20]), y[:20])


def outer_loss(net: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net(x[20:]), y[20:])


def meta_optimizer(library: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Ours and TorchOpt's, which have the same names."""
    adapted = library.module_clone(model, by="reference", detach_buffers=True)
    inner = library.MetaSGD(adapted, lr=LR)
    for _ in range(STEPS):
        inner.step(inner_loss(adapted, x, y))
    return outer_loss(adapted, x, y)


def by_hand(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    for _ in range(STEPS):
        gradients = grad(lambda now: inner_loss(lambda x: functional_call(model, now, (x,)), x, y))(params)
        params = {name: p - LR * gradients[name] for name, p in params.items()}
    return outer_loss(lambda x: functional_call(model, params, (x,)), x, y)


def with_higher(higher: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with higher.innerloop_ctx(model, optimizer, copy_initial_weights=False) as (adapted, inner):
        for _ in range(STEPS):
            inner.step(inner_loss(adapted, x, y))
        return outer_loss(adapted, x, y)


def with_learn2learn(algorithms: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    learner = algorithms.MAML(model, lr=LR).clone()
    for _ in range(STEPS):
        learner.adapt(inner_loss(learner, x, y))
    return outer_loss(learner, x, y)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )
    x, y = torch.rand(TASKS, 40, 16), torch.rand(TASKS, 40, 1)
    params = dict(model.named_parameters())

    def in_a_loop(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: torch.stack([loss(*task) for task in zip(x, y, strict=True)]).mean()

    ways: dict[str, Callable[[], Tensor]] = {
        "by hand, torch.func": in_a_loop(lambda x, y: by_hand(model, params, x, y)),
        "ours": in_a_loop(lambda x, y: meta_optimizer(todist, model, x, y)),
        "by hand, vmap": lambda: vmap(lambda x, y: by_hand(model, params, x, y))(x, y).mean(),
        "ours, vectorize=True": lambda: vmap(lambda x, y: meta_optimizer(todist, model, x, y))(x, y).mean(),
    }
    peers: dict[str, tuple[str, Callable[..., Tensor]]] = {
        "TorchOpt": ("torchopt", meta_optimizer),
        "higher": ("higher", with_higher),
        "learn2learn": ("learn2learn.algorithms.maml", with_learn2learn),
    }
    for name, (module, loss) in peers.items():
        try:
            library = importlib.import_module(module)
        except ImportError as error:
            print(f"{name} is not compared: {error}", file=sys.stderr)
        else:
            ways[name] = in_a_loop(lambda x, y, loss=loss, library=library: loss(library, model, x, y))

    def gradient(loss: Callable[[], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(loss(), list(model.parameters())))

    right = gradient(ways["by hand, torch.func"])
    for name, way in ways.items():
        for one, other in zip(gradient(way), right, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-3, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )
    seconds = interleaved({name: lambda way=way: gradient(way) for name, way in ways.items()}, rounds=15)
    batched = ("by hand, vmap", "ours, vectorize=True")
    rows = []
    for name, value in seconds.items():
        ours = seconds["ours, vectorize=True" if name in batched else "ours"]
        rows.append([name, f"{value * 1e3:.1f} ms", f"{ours / value:.2f}"])
        if not name.startswith("ours"):
            kind = (
                "a MAML gradient in one process, `vmap`"
                if name in batched
                else "a MAML gradient in one process"
            )
            ratio(kind, name, f"{ours / value:.2f}")
    table(["", "a gradient", "ours, or ours in `vmap`, of its time"], rows)


if __name__ == "__main__":
    main()
