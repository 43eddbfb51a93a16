"""What teams compute, and the same in one process; and what goes wrong on one member of a team."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist.collectives import watched_group
from torchopt_dist.distributed import _process_groups as teams
from torchopt_dist.distributed.calls.futures import GRACE_SECONDS

TASKS, EXAMPLES = 3, 8
REPLAYED = todist.Replayed(sharded=True)
Params = dict[str, Tensor]


def error_of(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Of each example."""
    return (torch.tanh(x @ params["a"]) @ params["b"] - y).square().sum(1)


def mine(*tensors: Tensor) -> list[Tensor]:
    """This member's part of the examples."""
    team = todist.team()
    return [tensor[team.rank :: team.size] for tensor in tensors]


def adapted(params: Params, weights: Tensor, lr: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """All that the caller gives is the same on all members; the loss uses each one's weights."""
    team = todist.team()
    xs, ys = mine(x, y)

    def loss(params: Params) -> Tensor:
        return (mine(weights)[0].exp() * error_of(params, xs, ys)).mean()

    found = todist.inner_loop(
        loss, todist.adam(lr=lr), params, 4, meta=(weights, lr), parallel=todist.DataParallel(team)
    ).params
    return todist.mean_over(error_of(found, xs, ys).mean() * lr + found["a"].sum(), team)


def own_weights(params: Params, weights: Tensor, lr: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Each member's weights are its own, and histories are spread."""
    team = todist.team()
    xs, ys, own = mine(x, y, weights)

    def loss(params: Params) -> Tensor:  # runs again in the backward pass, which is one of the team, too
        return (own.exp() * error_of(params, *mine(x, y))).mean()

    found = todist.inner_loop(
        loss,
        todist.sgd(lr=lr, momentum=0.9),
        params,
        5,
        meta=(own, lr),
        parallel=todist.DataParallel(team, own=own),
        adjoint=REPLAYED,
    ).params
    return todist.mean_over(error_of(found, xs, ys).mean(), team)


def no_loop(params: Params, weights: Tensor, lr: Tensor, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Two values of a tree, of which each member computes its part."""
    xs, ys, own = mine(x, y, weights)
    errors = error_of(params, xs, ys)
    value = todist.mean_over({"a": (own * errors).mean() * lr, "b": errors.square().mean()}, todist.team())
    return {**value, "n": torch.tensor(3.0)}


FUNCTIONS: dict[str, Callable[..., Any]] = {"adapted": adapted, "own": own_weights, "no loop": no_loop}


def inputs() -> list[Tensor]:
    """Two parameters, weights of examples, a rate; and examples of tasks."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = [drawn(3, 5), drawn(5, 2), drawn(EXAMPLES), torch.tensor(0.05, dtype=torch.float64)]
    return [*(leaf.requires_grad_() for leaf in leaves), drawn(TASKS, EXAMPLES, 3), drawn(TASKS, EXAMPLES, 2)]


def total(value: Any) -> Tensor:
    """A number of all tensors of a value."""
    return value if isinstance(value, Tensor) else value["a"].exp() + value["b"].sin()


def numbers(call: Callable[..., Any], *, second: bool) -> list[Tensor]:
    """A value, its gradients, perhaps the second ones, the gradients through two calls, and the value by itself."""
    a, b, weights, lr, x, y = inputs()
    leaves = [a, b, weights, lr]
    same = [todist.replicated(each) for each in ({"a": a, "b": b}, weights, lr)]
    value = total(call(*same, x, y))
    found = [value, *torch.autograd.grad(value, leaves, create_graph=second)]
    if second:
        of_grads = value.square() + sum(grad.square().sum() for grad in found[1:])
        found += torch.autograd.grad(of_grads, leaves)
    one, other = call(*same, x, y), call(*same, 2 * x, y)
    found += torch.autograd.grad(total(one).sin() + total(other), leaves)
    with torch.no_grad():
        found.append(total(call(*same, x, y)))
    return [each.detach() for each in found]


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The mean over tasks in this process, without any calls."""

    def call(*args: Any) -> Any:
        same, (x, y) = [each.value for each in args[:-2]], args[-2:]
        values = [function(*same, *one) for one in zip(x, y, strict=True)]
        return todist.mean_reducer(values)

    return call


def scaled(w: Tensor, x: Tensor, how: str = "", rank: int = -1) -> Tensor:
    """A mean over the team; one member may do something else."""
    if todist.get_rank() == rank:
        if how == "raise":
            raise KeyError("on one member")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "return":
            return torch.tensor(3.0)
    value = todist.mean_over((w * mine(x)[0]).square().mean(), todist.team())
    if how == "backward" and todist.get_rank() == rank:
        value.register_hook(_refuse)
    return value + (todist.get_rank() if how == "differ" else 0)


def _refuse(grad: Tensor) -> None:
    raise KeyError("in backward")


def in_itself(w: Tensor, x: Tensor) -> Any:
    """A call of a team in a team."""
    return todist.parallelize(0, team=2)(scaled)(w, x)


def drawn(x: Tensor) -> Tensor:
    """Random numbers of a task."""
    return torch.randn(3) + 0 * x.sum()


def place(x: Tensor) -> tuple[int, int, float]:
    """The team's size, this process's rank in the first of two halves, and what was given."""
    return todist.team().size, todist.get_rank() // 2, float(x.sum())


def whole(x: Tensor) -> torch.nn.Module:
    """What a team cannot have as a value."""
    return torch.nn.Linear(1, 1)


def message(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error that a call ends with."""
    try:
        return str(call(*args, **kwargs))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def late(enter: Callable[..., object]) -> Callable[..., object]:
    """A member that takes longer than the others to enter a process group."""

    def entered(*args: Any) -> None:
        time.sleep(5 * GRACE_SECONDS)
        enter(*args)

    return entered


def on_four() -> dict[str, Any] | None:
    """All cases, on four workers."""
    torch.set_num_threads(1)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tasks", "data"))
    if todist.get_rank() == 3:
        teams._enter_team = late(teams._enter_team)
    teams.LEFT_SECONDS = watched_group.LEFT_SECONDS = 0.5
    todist.barrier()
    return _cases(mesh) if todist.get_rank() == 0 else None


def _cases(mesh: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in (2, 4):
        for name, function in FUNCTIONS.items():
            call = todist.parallelize(todist.tasks, todist.mean_reducer, team=size)(function)
            found[f"{name} {size}"] = numbers(call, second=name != "own")
    x = torch.arange(8.0).reshape(2, 4)
    w = torch.tensor(2.0, requires_grad=True)
    spread = todist.parallelize(todist.tasks, todist.mean_reducer, team=2)
    found["map"] = todist.map(place, [x[:1], x[:1, :3], x[1:, :1]], team=2)
    found["batch"] = todist.parallelize(team=2)(place)(torch.ones(5))
    found["rank"] = todist.remote_sync_call(place, args=(x,), partitioner=3, team=2)
    found["put"] = todist.remote_sync_call(place, args=(todist.put(x),), partitioner="worker2", team=2)
    found["mesh"] = todist.parallelize(todist.tasks, team=mesh)(place)(x)
    found["alone"] = todist.parallelize(todist.tasks, team=1)(place)(x)
    for name, call in (("drawn", spread), ("drawn plainly", todist.parallelize(reducer=todist.mean_reducer))):
        torch.manual_seed(0)
        partitioned = (
            call(drawn) if name == "drawn" else todist.parallelize(todist.tasks, todist.mean_reducer)(drawn)
        )
        found[name] = partitioned(x)
    begun = todist.parallelize_async(todist.tasks, todist.mean_reducer, team=2)(scaled)
    futures = [begun(todist.replicated(w), number * x) for number in range(5)]
    sums = sum(future.wait() for future in futures)
    found["at once"] = [sums.detach(), *torch.autograd.grad(sums, w)]
    for how, rank in (("raise", 1), ("raise", 2), ("differ", 0), ("return", 3), ("", 0)):
        found[f"{how} {rank}"] = message(spread(scaled), todist.replicated(w), x, how, rank)
    value = spread(scaled)(todist.replicated(w), x, "backward", 1)
    found["backward"] = message(value.backward)
    found["after"] = spread(scaled)(todist.replicated(w), x).detach()
    found["in itself"] = message(spread(in_itself), todist.replicated(w), x)
    found["module"] = message(spread(whole), x)
    found["three"] = message(todist.parallelize(team=3)(place), x)
    found["die"] = message(spread(scaled), todist.replicated(w), x, "die", 3)
    found["then"] = message(todist.remote_sync_call, place, args=(x,), partitioner=1, team=2)
    return found
