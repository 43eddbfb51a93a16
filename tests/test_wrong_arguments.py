"""Wrong values at the public entry points → errors that name the argument, and say what was got."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import torchopt_dist as todist
from torchopt_dist.launching import launch

X = torch.arange(6.0).reshape(3, 2)
NOT_CALLABLE = (3, "f", [], True)
NOT_AN_INTEGER = ("1", 1.5, None, [1])
NOT_A_COUNT = ("3", 2.5, 0, -1, [])
NOT_SECONDS = ("soon", math.nan, -2.0, [1])


class Mistake(NamedTuple):
    """A call with one wrong value."""

    call: Callable[[Any], object]
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={self.value!r:.30}"


def loss(params: Any, batch: Any) -> torch.Tensor:
    return (params * batch).sum()


def inner(**options: Any) -> Any:
    given = {
        "loss": loss,
        "optimizer": todist.sgd(lr=0.1),
        "params": X[0].clone().requires_grad_(),
        "batches": [X[1], X[2]],
    }
    return todist.inner_loop(**{**given, **options})


def mistakes() -> Iterator[Mistake]:
    def of(name: str, call: Callable[[Any], object], *values: Any) -> Iterator[Mistake]:
        return (Mistake(call, name, value) for value in values)

    def call(**options: Any) -> Any:
        return todist.remote_sync_call(torch.sin, args=(X,), **options)

    def apply(partitioner: Any) -> Any:
        return call(partitioner=partitioner)

    rpc = todist.auto_init_rpc
    yield from of("worker_init_fn", lambda v: rpc(v), 3, "f", [])
    yield from of("worker_name_format", lambda v: rpc(worker_name_format=v), *NOT_CALLABLE)
    yield from of("transport", lambda v: rpc(transport=v), "tcp", 3, [])
    yield from of("on_loss", lambda v: rpc(on_loss=v), "stop", None, 1)
    yield from of("liveness", lambda v: rpc(liveness=v), 3.0, "patience=3", True)
    yield from of("interval", lambda v: todist.Liveness(interval=v), 0, -1.0, math.nan, math.inf, "1", None)
    yield from of("patience", lambda v: todist.Liveness(patience=v), 0, math.inf, 0.5, "10", [])
    for make in (todist.parallelize, todist.parallelize_async):
        yield from of("reducer", lambda v, make=make: make(todist.batch_partitioner, v), 3, "sum", [])
        yield from of("partitioner", lambda v, make=make: make(v), 2.5, [0], {})
        yield from of("timeout", lambda v, make=make: make(timeout=v), *NOT_SECONDS)
        yield from of("retries", lambda v, make=make: make(retries=v), "2", 1.5, -1)
        yield from of("hedge_after", lambda v, make=make: make(hedge_after=v), "1", -1.0, math.nan)
    yield from of("func", lambda v: todist.remote_sync_call(v), 3, "f", None)
    yield from of("args", lambda v: todist.remote_sync_call(torch.sin, args=v), 3, X)
    yield from of("kwargs", lambda v: todist.remote_sync_call(torch.sin, args=(X,), kwargs=v), 3, [1], "ab")
    yield from of("partitioner", apply, 1.5)
    yield from of("worker", apply, "nobody", 5, -1)
    yield from of("timeout", lambda v: call(timeout=v), *NOT_SECONDS)
    yield from of("reducer", lambda v: call(reducer=v), 3, "sum")
    yield from of("dim", lambda v: apply(todist.dim_partitioner(v)), *NOT_AN_INTEGER, 7, -9)
    yield from of("exclusive", lambda v: todist.dim_partitioner(0, exclusive=v), 1, "yes", None)
    yield from of("keepdim", lambda v: todist.dim_partitioner(0, keepdim=v), 1, "yes", None)
    yield from of(
        "worker", lambda v: apply(todist.dim_partitioner(0, workers=v)), 3, ["nobody"], [7], [], [1.5]
    )
    yield from of("items", lambda v: todist.map(torch.sin, v), 3, None)
    yield from of("func", lambda v: todist.map(v, [X]), 3, None)
    yield from of("worker", lambda v: todist.map(torch.sin, [X], workers=v), 3, [7], [])
    yield from of("partitioner", lambda v: todist.put(X, v), 3.5, "all", [0])
    yield from of("worker", todist.barrier, 3, ["nobody"], "worker0")
    yield from of("func", todist.rank_zero_only, 3, "f", None)
    yield from of("rank", lambda v: todist.on_rank(v), "0", 1.5, None)
    yield from of("folder", todist.Checkpointer, 3, None, [])
    yield from of("keep", lambda v: todist.Checkpointer("none", keep=v), "3", 1.5, 0, -1)
    yield from of("every", lambda v: todist.Checkpointer("none", every=v), *NOT_A_COUNT)
    yield from of("background", lambda v: todist.Checkpointer("none", background=v), 1, "yes", None)
    yield from of("random_states", lambda v: todist.Checkpointer("none", random_states=v), 1, "yes", None)
    yield from of("loss", lambda v: inner(loss=v), *NOT_CALLABLE)
    yield from of("optimizer", lambda v: inner(optimizer=v), 3, torch.optim.SGD, todist.sgd, None)
    yield from of("params", lambda v: inner(params=v), 3, "w", None)
    yield from of("batches", lambda v: inner(batches=v), 3.5, None, -1, X[0].sum())
    yield from of("adjoint", lambda v: inner(adjoint=v), "replayed", todist.Replayed, None, 3)
    yield from of("seed", lambda v: inner(seed=v), "0", 1.5)
    yield from of("steps", lambda v: inner(steps=v), "3", 2.5, -1)
    yield from of("stop", lambda v: inner(stop=v), 3, "now")
    yield from of("has_aux", lambda v: inner(has_aux=v), 1, "yes", None)
    yield from of("memory", lambda v: todist.Replayed(memory=v), "much", 2.5, -1, [])
    yield from of("snapshots", lambda v: todist.Replayed(snapshots=v), "some", 2.5, 0, -1)
    yield from of("blocks", lambda v: todist.Replayed(blocks=v), "some", 3, [])
    yield from of("check", lambda v: todist.Replayed(check=v), 1, "yes", None)
    yield from of("steps", todist.Truncated, "3", 2.5, -1, [])
    yield from of("solver", lambda v: todist.Implicit(solver=v), 3, "cg")
    yield from of("batches", lambda v: todist.Implicit(batches=v), *NOT_A_COUNT)
    yield from of("alpha", todist.SAMA, "0.1", math.nan, -1.0, None)
    yield from of("samples", lambda v: todist.EvolutionStrategies(v, 0.1), *NOT_A_COUNT)
    yield from of("sigma", lambda v: todist.EvolutionStrategies(2, v), "0.1", 0.0, -1.0, math.nan)
    launcher = todist.Launcher
    yield from of("nproc_per_host", lambda v: launcher(nproc_per_host=v).run(int), 0, "many", 2.5, None)
    yield from of("hosts", lambda v: launcher(hosts=v).run(int), 3, [], [3])
    yield from of("max_restarts", lambda v: launcher(max_restarts=v), "1", -1, 1.5)
    yield from of("timeout", lambda v: launcher(timeout=v), 0, "x", math.nan, [])
    yield from of("on_loss", lambda v: launcher(on_loss=v), "stop", None)
    yield from of("env", lambda v: launcher(env=v), ["A"], {"A": 1}, 3)
    yield from of("func", lambda v: launcher().run(v), 3, None)
    yield from of("args", lambda v: launch(int, v), 3, "ab")


def names(message: str, mistake: Mistake) -> bool:
    """Whether the message names the argument, and what was got: the value or an element of it, or its type."""
    value = mistake.value
    got = [repr(value)[:20], type(value).__name__, getattr(value, "__name__", None)]
    if isinstance(value, (list, dict)):
        got += [repr(element) for element in value] or ["none", "empty"]
    return mistake.name in message and any(
        each in message.replace(mistake.name, "", 1) for each in got if each
    )


def test_each_wrong_value_is_named_with_its_argument() -> None:
    def try_all() -> list[str]:
        found = []
        for mistake in table:
            try:
                answer = mistake.call(mistake.value)
            except (TypeError, ValueError, todist.TodistError) as error:
                if not names(str(error), mistake):
                    found.append(f"{mistake}: {type(error).__name__}: {error}"[:300])
            except Exception as error:
                found.append(f"{mistake}: raw {type(error).__name__}: {error}"[:300])
            else:
                found.append(f"{mistake}: no error, but {answer!r}"[:200])
        return found

    table = list(mistakes())
    assert len(table) > 200
    found = todist.auto_init_rpc()(try_all)()
    assert not found, "\n".join(itertools.chain([f"{len(found)} of {len(table)}"], found))
