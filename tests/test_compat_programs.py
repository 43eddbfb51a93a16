"""Programs that use TorchOpt's API widely, run by compat → the numbers of plain torch and of the native names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import torchopt_dist as todist
from tests.processes import PROGRAMS, ROOT, python, torchrun
from tests.seeds.one_process import data, loss_of, model
from tests.seeds.programs import digits

EPOCHS, INNER_STEPS, LR = 2, 2, 0.1
Impl = todist.GradientTransformation
BETAS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.99), "eps": 1e-6}

OPTIMIZERS: dict[str, tuple[Callable[..., Impl], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (
        todist.sgd,
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1},
    ),
    "Adam": (todist.adam, torch.optim.Adam, {**BETAS, "weight_decay": 0.01}),
    "AdamW": (todist.adamw, torch.optim.AdamW, {**BETAS, "weight_decay": 0.1}),
    "AdaDelta": (
        todist.adadelta,
        torch.optim.Adadelta,
        {"lr": 1.0, "rho": 0.8, "eps": 1e-4, "weight_decay": 0.01},
    ),
    "AdaGrad": (
        todist.adagrad,
        torch.optim.Adagrad,
        {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.2, "eps": 1e-8},
    ),
    "AdaMax": (todist.adamax, torch.optim.Adamax, {**BETAS, "weight_decay": 0.01}),
    "RAdam": (todist.radam, torch.optim.RAdam, {**BETAS, "weight_decay": 0.01}),
    "RMSProp": (
        todist.rmsprop,
        torch.optim.RMSprop,
        {"lr": 0.05, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.01, "momentum": 0.5, "centered": True},
    ),
}


def chained() -> Impl:
    return todist.chain(
        todist.clip_grad_norm(max_norm=0.5),
        todist.register_hook(todist.zero_nan_hook),
        todist.transform.add_decayed_weights(weight_decay=0.01),
        todist.sgd(lr=todist.schedule.linear_schedule(0.2, 0.02, transition_steps=4), momentum=0.9),
    )


def adapted_loss(net: nn.Module, task: Tensor, impl: Impl) -> Tensor:
    """The loss after some steps on the task, all functional."""
    params = dict(net.named_parameters())
    state = impl.init(params)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return loss_of(lambda x: functional_call(net, params, (x,)), task)

    for _ in range(INNER_STEPS):
        grads = torch.autograd.grad(loss(params), list(params.values()), create_graph=True)
        updates, state = impl.update(
            dict(zip(params, grads, strict=True)), state, params=params, inplace=False
        )
        params = todist.apply_updates(params, updates, inplace=False)
    return loss(params)


def train(net: nn.Module, impl: Impl, outer: torch.optim.Optimizer, tasks: Callable[[int], Tensor]) -> Tensor:
    for epoch in range(EPOCHS):
        loss = torch.stack([adapted_loss(net, task, impl) for task in tasks(epoch)]).mean()
        outer.zero_grad()
        loss.backward()
        outer.step()
    return loss.detach()


def check(path: Path, loss: Tensor, net: nn.Module) -> None:
    found = json.loads(path.read_text())
    torch.testing.assert_close(torch.tensor(found["loss"]), loss, rtol=1e-9, atol=1e-9)
    for got, parameter in zip(found["parameters"], net.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(got), parameter.detach(), rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of what the program without workers found."""
    out = tmp_path_factory.mktemp("found")
    program = PROGRAMS / "maml_every_optimizer.py"
    options = ("--out", out, "--dtype", "float64")
    ended = python("-W", "error", "-m", "torchopt_dist.compat", program, *options, cwd=ROOT, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return out


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_maml_with_every_optimizer(found: Path, name: str) -> None:
    function, outer, options = OPTIMIZERS[name]
    net = model()
    loss = train(
        net, function(**options), outer(net.parameters(), **options), lambda epoch: data(2, 6, seed=epoch)
    )
    check(found / f"maml_every_optimizer-{name}-float64-0.json", loss, net)


@pytest.mark.usefixtures("double")
def test_maml_with_a_chain(found: Path) -> None:
    net = model()
    outer = torch.optim.Adam(net.parameters(), lr=0.05)
    loss = train(net, chained(), outer, lambda epoch: data(2, 6, seed=epoch))
    check(found / "maml_every_optimizer-chained-float64-0.json", loss, net)


@pytest.mark.usefixtures("double")
def test_functional_steps_are_the_formula_s(found: Path) -> None:
    net = model()
    params = list(net.parameters())
    momenta = [torch.zeros_like(p) for p in params]
    for step in range(3):
        grads = torch.autograd.grad(loss_of(net, data(6)), params)
        shorter = min(1.0, 0.5 / float(torch.cat([g.flatten() for g in grads]).norm()))
        with torch.no_grad():
            for parameter, momentum, grad in zip(params, momenta, grads, strict=True):
                momentum.mul_(0.9).add_(shorter * grad + 0.01 * parameter)
                parameter.sub_((0.2 - 0.18 * step / 4) * momentum)
    path = found / "maml_every_optimizer-functional-float64-0.json"
    numbers = json.loads(path.read_text())["parameters"]
    for got, parameter in zip(numbers, params, strict=True):
        torch.testing.assert_close(torch.tensor(got), parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("double")
def test_maml_over_workers(tmp_path: Path) -> None:
    torchrun(
        *("--standalone", "--nproc_per_node=2"),
        ROOT / "torchopt_dist" / "compat" / "__main__.py",  # what `-m torchopt_dist.compat` runs
        PROGRAMS / "maml_distributed.py",
        *("--out", tmp_path, "--dtype", "float64"),
    )
    net = model()
    outer = torch.optim.Adam(net.parameters(), lr=LR)
    loss = train(net, todist.sgd(lr=LR, momentum=0.9), outer, lambda _: data(5, 6))
    for call in ("by_mean", "by_future", "by_list", "by_remote_call"):
        check(tmp_path / f"maml_distributed-{call}-float64-0.json", loss, net)
    assert json.loads((tmp_path / "maml_distributed-ranks-float64-0.json").read_text())["ranks"] == [0, 1]
    for rank, counts in enumerate(([1, 0], [0, 1])):
        path = tmp_path / f"maml_distributed-counts-float64-{rank}.json"
        assert json.loads(path.read_text())["counts"] == counts


@pytest.mark.usefixtures("double")
def test_few_shot_learning_of_a_network_that_is_sent_by_reference(tmp_path: Path) -> None:
    """As TorchOpt's own distributed programs do it, with tasks that are split, or loaded on the workers."""
    torchrun(
        *("--standalone", "--nproc_per_node=2"),
        ROOT / "torchopt_dist" / "compat" / "__main__.py",
        PROGRAMS / "few_shot_by_rref.py",
        *("--out", tmp_path, "--dtype", "float64"),
    )
    net = digits.build_net()
    outer = torch.optim.Adam(net.parameters(), lr=LR)
    for epoch in range(EPOCHS):
        losses = []
        for number in range(6 * epoch, 6 * epoch + 6):
            x, y, x_query, y_query = digits.task(number)
            inner = todist.module_clone(net)
            steps = todist.MetaSGD(inner, lr=LR)
            for _ in range(INNER_STEPS):
                steps.step(F.cross_entropy(inner(x), y))
            losses.append(F.cross_entropy(inner(x_query), y_query))
        loss = torch.stack(losses).mean()
        outer.zero_grad()
        loss.backward()
        outer.step()
    for tasks in ("split", "loaded"):
        check(tmp_path / f"few_shot_by_rref-{tasks}-float64-0.json", loss.detach(), net)
