"""How many files of the package a step, a call and a backward go through: who raises a number says in the commit why.

What all rooms use (``core``, ``process``, ``pytree``, ``arguments``, ``torch_private``) is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.programs import mse
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.payload import ExecutionOptions, Payload
from torchopt_dist.distributed.messages.requests import Call
from torchopt_dist.distributed.serialization.pickling import pack
from torchopt_dist.distributed.worker.handler import handle_request

PACKAGE = Path(todist.__file__).parent
USED_BY_ALL = {"core", "process", "pytree", "arguments", "torch_private"}
AT_MOST = {"a step in place": 11, "a differentiable step": 14, "a step of a loop": 20}
AT_MOST_OF_CALLS = {"a call": 20, "a request": 15, "a backward": 20}


def entered(function: Callable[[], Any]) -> set[str]:
    """The files of which a function calls a Python function in this thread; the fewest of three times."""
    walks: list[set[str]] = []

    def note(frame: Any, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            name = path.relative_to(PACKAGE)
            if name.parts[0] not in USED_BY_ALL:
                walks[-1].add(str(name))

    for _ in range(3):
        walks.append(set())
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
    return min(walks, key=len)


def too_long(walks: dict[str, set[str]], at_most: dict[str, int]) -> dict[str, set[str]]:
    """Of some walks those that are longer than they may be; each has been made."""
    assert all(walks[name] for name in at_most)
    return {name: files for name, files in walks.items() if len(files) > at_most[name]}


def steps() -> dict[str, set[str]]:
    net, other, x = nn.Linear(3, 2), nn.Linear(3, 2), torch.ones(3)
    plain = todist.Adam(other.parameters(), lr=0.1)
    other(x).sum().backward()
    meta = todist.MetaAdam(net, lr=0.1)
    impl = todist.adam(lr=0.1)
    weights, first = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)

    def loop() -> None:
        todist.inner_loop(lambda w: (w * weights).sum(), impl, first, 2, meta=weights)

    return {
        "a step in place": entered(plain.step),
        "a differentiable step": entered(lambda: meta.step(net(x).sum())),
        "a step of a loop": entered(loop),
    }


def test_steps_go_through_few_files(world: Any) -> None:
    """In a process of their own, where no test has left a clone that a step would look at."""
    assert too_long(world(1, rpc=False).run(steps)[0], AT_MOST) == {}


def same(x: Any) -> Any:
    return x


def handled() -> set[str]:
    payload = Payload(same, (((2,), {}),), (0,), CallerState.capture(), ExecutionOptions())
    request = pack(Call(payload, (0, 1), True), main_by_name=True)
    group = current_group()
    return entered(lambda: handle_request(request, group.kept_graphs, group.recorder))


def on_two_workers() -> dict[str, set[str]]:
    net, x = nn.Linear(3, 1), torch.ones(4, 3)
    loss = todist.parallelize(todist.batch_partitioner, todist.mean_reducer)(mse)
    losses = [loss(net, x, torch.ones(4, 1)) for _ in range(3)]
    return {
        "a call": entered(lambda: todist.remote_sync_call(same, args=(2,), partitioner=1)),
        "a request": todist.remote_call(handled, 1),
        "a backward": entered(lambda: losses.pop().backward()),
    }


@pytest.mark.torch_rpc
def test_calls_go_through_few_files(world: Any) -> None:
    assert too_long(world(2).on_zero(on_two_workers), AT_MOST_OF_CALLS) == {}
