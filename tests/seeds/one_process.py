"""A program's name, and a dtype → the losses and gradients it should find: one process, plain torch, whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

LR, EPOCHS, INNER_STEPS, SEED = 0.1, 2, 2, 0

Found = dict[str, Any]


def expected(program: str, dtype: torch.dtype) -> Found:
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(dtype)
        torch.manual_seed(SEED)
        try:
            return PROGRAMS[program]()
        finally:
            torch.set_default_dtype(before)


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 2)
    return net


def data(*shape: int, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, 5, dtype=torch.float64, generator=generator).to(torch.get_default_dtype())


def loss_of(net: Callable[[Tensor], Tensor], samples: Tensor) -> Tensor:
    return (net(samples[..., :4]) - samples[..., 4:]).square().mean()


def batches(*sizes: int) -> Iterable[Tensor]:
    return [data(size, seed=size) for size in sizes]


def rpc_autograd() -> Found:
    t1, t2, t4 = (torch.rand(3, 3) for _ in range(3))
    return {"loss": ((t1 + t2) * t4).sum(), "grads": [t4, t4, t1 + t2]}


def one_batch() -> Found:
    net = model()
    loss = loss_of(net, data(7))
    return {"loss": loss, "grads": torch.autograd.grad(loss, list(net.parameters()))}


def one_step() -> Found:
    net = model()
    found = one_batch()
    stepped = [p - LR * g for p, g in zip(net.parameters(), found["grads"], strict=True)]
    return {**found, "stepped": stepped}


def local_rank() -> Found:
    w = torch.arange(1.0, 4.0)
    return {"loss": (w**3).sum(), "grads": [3 * w**2]}


def rank_zero_only() -> Found:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        loss = loss_of(net, data(5, seed=epoch))
        loss.backward()
        optimizer.step()
    return {"loss": loss, "grads": [p.grad for p in net.parameters()]}


def remote_call() -> Found:
    x, y = torch.arange(1.0, 4.0), torch.tensor([3.0, 5.0, 7.0])
    return {"loss": 0.5 * (x * y).pow(3).sum(), "grads": [1.5 * (x * y) ** 2 * y, 1.5 * (x * y) ** 2 * x]}


def data_parallel() -> Found:
    net = model()
    for batch in batches(7, 5, 1):
        loss = loss_of(net, batch)
        loss.backward()
    return {"loss": loss, "grads": [p.grad for p in net.parameters()]}


def adapted_loss(net: nn.Module, task: Tensor) -> Tensor:
    parameters: dict[str, Tensor] = dict(net.named_parameters())

    def adapted(x: Tensor) -> Tensor:
        return functional_call(net, parameters, (x,))

    for _ in range(INNER_STEPS):
        grads = torch.autograd.grad(loss_of(adapted, task), list(parameters.values()), create_graph=True)
        parameters = {
            name: parameter - LR * grad
            for (name, parameter), grad in zip(parameters.items(), grads, strict=True)
        }
    return loss_of(adapted, task)


def maml(net: nn.Module, tasks: Tensor) -> Tensor:
    return torch.stack([adapted_loss(net, task) for task in tasks]).mean()


def maml_inner_loop() -> Found:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for tasks in (5, 4, 1):
        loss = maml(net, data(tasks, 6, seed=tasks))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"loss": loss, "grads": [p.grad for p in net.parameters()]}


def parallelize_wrappers() -> Found:
    net = model()
    for tasks in (5, 2):
        batch = data(tasks, 6, seed=tasks)
        loss = maml(net, batch)
        (loss + loss_of(net, batch.flatten(0, 1)[:11])).backward()
    return {"loss": loss, "grads": [p.grad for p in net.parameters()]}


def parameter_over_rpc() -> Found:
    param = torch.randn(2, 2)
    return {"loss": param.mean(), "grads": [torch.full((2, 2), 0.25)] * 2}


def module_over_rpc() -> Found:
    net = nn.Linear(2, 2)
    loss = net(data(7)[:, :2]).square().mean()
    return {"loss": loss, "grads": [*torch.autograd.grad(loss, list(net.parameters()))] * 2}


def full_example() -> Found:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    gradients: list[Tensor] = []
    for _ in range(EPOCHS):
        for batch in batches(7, 5, 1):
            loss = loss_of(net, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            gradients += [p.grad for p in net.parameters() if p.grad is not None]
    return {"loss": loss, "grads": gradients}


def first_order() -> Found:
    net = model()
    loss = loss_of(net, data(11))
    return {"loss": loss, "grads": torch.autograd.grad(loss, list(net.parameters()))}


def second_order() -> Found:
    net = model()
    parameters = list(net.parameters())
    loss = loss_of(net, data(11))
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    squares = torch.stack([grad.square().sum() for grad in first]).sum()
    return {"loss": loss, "grads": torch.autograd.grad(squares, parameters)}


PROGRAMS: dict[str, Callable[[], Found]] = {
    "rpc_autograd": rpc_autograd,
    "auto_init": one_batch,
    "local_rank": local_rank,
    "rank_zero_only": rank_zero_only,
    "remote_async_call": remote_call,
    "remote_sync_call": remote_call,
    "data_parallel": data_parallel,
    "maml_inner_loop": maml_inner_loop,
    "parallelize_wrappers": parallelize_wrappers,
    "autograd_grad": one_batch,
    "loss_backward": one_step,
    "dist_autograd_context": one_batch,
    "parameter_over_rpc": parameter_over_rpc,
    "module_over_rpc": module_over_rpc,
    "todist_grad": one_batch,
    "todist_backward": one_step,
    "full_example": full_example,
}
"""In the order of the document's programs."""

EVERY_WAY = {
    f"every_way-{way}-{sent}": second_order if way == "second_order" else first_order
    for way in ("backward", "grad", "context_backward", "context_grad", "second_order")
    for sent in ("plain", "clone")
}
DOCUMENTED = tuple(PROGRAMS)
PROGRAMS |= EVERY_WAY | {"census": one_batch}
