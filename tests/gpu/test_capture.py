"""What a CUDA graph cannot capture is in no compiled step, and no step waits for the device without need."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import torchopt_dist as todist
from tests.diff.adjoint_table import ALL, Problem
from tests.gpu.device import DEVICE, needs_gpu, on_device
from tests.gpu.record import told
from tests.gpu.syncs import waits
from torchopt_dist.core import programs

COMPILED = ("recorded", "replayed", "truncated", "first order", "finite difference", "SAMA")
FORBIDDEN = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Ops whose results or shapes depend on values: a graph would have to wait for these."""


def forbidden_in(graph: GraphModule, inputs: list[Any]) -> list[str]:
    """The ops of a graph that a capture forbids: such as read values, and copies between devices."""
    devices = {x.device for x in inputs if isinstance(x, Tensor)}
    found = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        made = node.meta.get("val")
        moves = isinstance(made, Tensor) and bool(devices) and made.device not in devices
        if moves or any(tag in getattr(node.target, "tags", ()) for tag in FORBIDDEN):
            found.append(str(node.target))
    return found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is forbidden in each graph of torch's ops that is made from now on."""
    found: list[list[str]] = []

    def looked_through(_captured: bool, graph: GraphModule, inputs: list[Any]) -> GraphModule:
        found.append(forbidden_in(graph, inputs))
        return graph

    monkeypatch.setattr(programs, "kernels", looked_through)
    programs.programs_of.cache_clear()
    return found


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("error:.*compile=True")
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "clipped adam", "schedule", "rmsprop"])
def test_compiled_steps_have_nothing_that_a_capture_forbids(optimizer: str, graphs: list[list[str]]) -> None:
    for name in COMPILED if optimizer == "adam" else COMPILED[:2]:
        problem = Problem("module", optimizer)
        made = problem.run(ALL[name], seed=1, compile=True)
        torch.autograd.grad(problem.outer(made.params), problem.weights, allow_unused=True)
    assert len(graphs) > 1
    assert not [op for found in graphs for op in found]


def test_what_is_forbidden_is_found() -> None:
    graph = make_fx(lambda x: x[x > 0].sum() + x.to("meta").sum().new_zeros((), device=x.device))(
        torch.ones(3)
    )
    found = forbidden_in(graph, [torch.ones(3)])
    assert "aten.nonzero.default" in found or "aten.index.Tensor" in found
    assert "aten._to_copy.default" in found


def waits_of_a_step(name: str, optimizer: Any) -> tuple[float, float]:
    """How often the host waits in one step more of a loop, forward and in the backward pass."""
    net = on_device(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    x, weights = torch.ones(5, 3, device=DEVICE), torch.ones(5, 1, device=DEVICE, requires_grad=True)

    def loop(steps: int) -> list[int]:
        made: list[Tensor] = []

        def forward() -> None:
            adapted = todist.inner_loop(
                lambda net: (weights * net(x) ** 2).mean(),
                optimizer,
                net,
                steps,
                meta=weights,
                adjoint=ALL[name],
                seed=1,
            )
            made.append(adapted.params(x).square().mean())

        return [waits(forward), waits(lambda: torch.autograd.grad(made[0], weights, allow_unused=True))]

    loop(4)
    forward, backward = ((many - few) / 8 for many, few in zip(loop(12), loop(4), strict=True))
    return forward, backward


NO_WAITS = ("recorded", "replayed", "replayed from snapshots", "truncated", "first order", "reptile", "SAMA")


@needs_gpu
@pytest.mark.parametrize("name", NO_WAITS)
@pytest.mark.filterwarnings("ignore:nothing gets a gradient")
def test_no_step_of_an_adjoint_waits_for_the_device(name: str) -> None:
    found = {}
    for make in (todist.sgd, todist.adam, todist.rmsprop):
        found[make.__name__] = waits_of_a_step(name, make(lr=0.1))
    told(
        "Waits for the GPU in one step, forward and backward",
        adjoint=name,
        **{k: f"{v[0]:g}, {v[1]:g}" for k, v in found.items()},
    )
    assert set(found.values()) == {(0.0, 0.0)}


@needs_gpu
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop"])
def test_no_step_of_an_optimizer_waits_for_the_device(name: str) -> None:
    params = [torch.ones(3, device=DEVICE, requires_grad=True) for _ in range(3)]
    optimizer = getattr(todist, name)(params, lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        sum((p**2).sum() for p in params).backward()
        optimizer.step()

    step()
    assert waits(step) == 0
