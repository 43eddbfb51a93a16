"""``compile=True`` and ``"reduce-overhead"`` on the device → the numbers without; memory budgets → kept.

Without a GPU programs are traced only, and those that would be CUDA graphs use the same memory at each run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist
from tests.cuda_graphs import emulate_graphs
from tests.gpu.device import DEVICE, GPU, assert_near, needs_gpu, on_device, peak
from torchopt_dist.core import programs

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings(
        "ignore:The CUDA Graph is empty"
    ),  # a part of a program that computes on the CPU
    # torch 2.11 at the second run of a captured program, beside a graph that was made before
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]
MODES: list[Any] = [True, "reduce-overhead"]
ADJOINTS = {
    "recorded": todist.Recorded(),
    "replayed": todist.Replayed(),
    "truncated": todist.Truncated(2),
    "first order": todist.FirstOrder(),
}


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That a program is not made is an error; without a GPU it is traced, since kernels take minutes there."""
    if not GPU:
        emulate_graphs(monkeypatch)
    programs.programs_of.cache_clear()
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compile=")
        yield


def network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return on_device(
        nn.Sequential(nn.Linear(3, 16, device="cpu"), *more, nn.Tanh(), nn.Linear(16, 2, device="cpu"))
    )


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    x = torch.linspace(-1, 1, count * 8 * 3).reshape(count, 8, 3).sin()
    y = torch.linspace(-2, 3, count * 8 * 2).reshape(count, 8, 2).cos()
    return [(one.to(DEVICE), other.to(DEVICE)) for one, other in zip(x, y, strict=True)]


def loop(net: nn.Module, adjoint: Any, **options: Any) -> list[Tensor]:
    """Losses, last parameters, and gradients of weights, a rate and the first parameters."""
    weights = torch.linspace(-1, 1, 8).to(DEVICE).requires_grad_()
    lr = torch.tensor(0.05, device=DEVICE, requires_grad=True)

    def loss(net: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return (torch.sigmoid(weights) * ((net(x) - y) ** 2).mean(1)).mean()

    made = todist.inner_loop(
        loss, todist.adam(lr=lr, eps=1e-3), net, batches(), meta=weights, adjoint=adjoint, seed=1, **options
    )
    last = list(made.params.parameters())
    outer = sum((p * p.detach().cos()).sum() for p in last)
    given = [weights, lr, *net.parameters()]
    grads = torch.autograd.grad(outer, given, allow_unused=True)
    return [
        made.losses,
        *last,
        *(torch.zeros_like(x) if g is None else g for x, g in zip(given, grads, strict=True)),
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ADJOINTS)
def test_a_compiled_loop_is_the_plain_one(name: str, mode: Any) -> None:
    nets = [network(), network(nn.Dropout(0.3))] if name == "replayed" else [network()]
    for net in nets:
        expected = loop(net, ADJOINTS[name])
        first = loop(net, ADJOINTS[name], compile=mode)
        kept = [x.detach().clone() for x in first]
        again = loop(net, ADJOINTS[name], compile=mode)
        assert_near(first, expected, 1e-4)
        assert_near(again, expected, 1e-4)
        for one, other in zip(first, kept, strict=True):
            assert torch.equal(one, other)  # a later run has not written into it


def adapted_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    net = todist.module_clone(net)
    inner = todist.MetaSGD(net, lr=0.1)
    for _ in range(3):
        inner.step(F.mse_loss(net(x[:4]), y[:4]))
    return F.mse_loss(net(x[4:]), y[4:])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vectorize", [False, True])
def test_a_compiled_task_is_the_plain_one(vectorize: bool, mode: Any) -> None:
    def body() -> None:
        net = network()
        x, y = (torch.stack(part) for part in zip(*batches(3), strict=True))

        def found(**options: Any) -> list[Tensor]:
            spread = todist.parallelize(todist.tasks, todist.mean_reducer, device="auto", **options)
            value = spread(adapted_loss)(net, x, y)
            return [value, *torch.autograd.grad(value, list(net.parameters()))]

        expected = found()
        first = found(compile=mode, vectorize=vectorize)
        kept = [one.detach().clone() for one in first]
        again = found(compile=mode, vectorize=vectorize)
        assert_near(first, expected, 1e-4)
        assert_near(again, expected, 1e-4)
        for one, other in zip(first, kept, strict=True):
            assert torch.equal(one, other)

    todist.auto_init_rpc()(body)()


def test_every_optimizer_function_compiles_by_hand() -> None:
    net = network()
    params = {name: p.detach() for name, p in net.named_parameters()}
    (x, y), *_ = batches(1)

    def loss(params: Any) -> Tensor:
        return F.mse_loss(torch.func.functional_call(net, params, (x,)), y)

    def adapted(params: Any, make: Any) -> Tensor:
        optimizer = make()
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(
                torch.func.grad(loss)(params), state, params=params, inplace=False
            )
            params = todist.apply_updates(params, updates, inplace=False)
        return loss(params)

    makes = (
        lambda: todist.sgd(lr=0.1, momentum=0.9),
        lambda: todist.adam(lr=0.05),
        lambda: todist.rmsprop(lr=0.01),
    )
    for make in makes if GPU else makes[:1]:
        whole = torch.func.grad_and_value(lambda params, make=make: adapted(params, make))
        compiled = torch.compile(whole, fullgraph=True, **({} if GPU else {"backend": "eager"}))
        grads, value = compiled(params)
        expected, plain = whole(params)
        assert_near([value, *grads.values()], [plain, *expected.values()], 1e-4)


@needs_gpu
@pytest.mark.parametrize(
    "options", [{"memory": "96MiB"}, {"memory": "64MiB", "store": "cpu"}, {"snapshots": 2}], ids=str
)
def test_a_memory_budget_is_kept_on_the_gpu(options: dict[str, Any]) -> None:
    width, steps = 512, 24
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width, device=DEVICE) for _ in range(4)))
    x = torch.randn(64, width, device=DEVICE)
    weights = torch.ones(64, device=DEVICE, requires_grad=True)
    numel = sum(p.numel() for p in net.parameters())

    def gradient(adjoint: Any) -> Tensor:
        made = todist.inner_loop(
            lambda net: (weights * (net(x) - x).square().mean(1)).mean(),
            todist.adam(lr=1e-3),
            net,
            steps,
            meta=weights,
            adjoint=adjoint,
        )
        return torch.autograd.grad((made.params(x) - x).square().mean(), weights)[0]

    # What libraries allocate at their first use is not counted.
    assert_near([gradient(todist.Replayed(**options))], [gradient(todist.Recorded())], 1e-3)
    recorded, replayed = (
        peak(partial(gradient, adjoint)) for adjoint in (todist.Recorded(), todist.Replayed(**options))
    )
    assert replayed < recorded
    carry = 3 * 4 * numel / 2**20  # parameters and Adam's averages, in MiB
    if "memory" in options:
        budget = float(options["memory"].removesuffix("MiB"))
        # Beside the snapshots: the result, a step that runs again, and its gradients.
        assert replayed <= budget + 8 * carry, (
            f"{replayed:.0f} MiB, of a budget of {budget:.0f}, a carry {carry:.0f}"
        )
