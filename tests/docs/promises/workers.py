"""``docs/api``'s pages of calls and worlds: each line, on two workers; the bodies run on rank 0, or on all ranks."""

from __future__ import annotations

import argparse
import io
import logging
import os
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.docs.promises.register import numbers, promises, same
from torchopt_dist import launching, pytree

calls, worlds, tools = (partial(promises, page) for page in ("calls", "worlds", "trees on workers"))


def where(x: Any = None) -> tuple[int, Any]:
    return todist.get_rank(), x


def half_square(w: Tensor, x: Tensor) -> Tensor:
    """The mean over rows of half the square of ``x w``."""
    return 0.5 * (x @ w).square().mean()


def weights() -> Tensor:
    return numbers(1.0, -2.0).requires_grad_()


X = torch.arange(12.0, dtype=torch.float64).view(6, 2)


@calls("parallelize", "parallelize_async", "batch_partitioner", "mean_reducer")
def a_loss_on_the_workers() -> None:
    w = weights()
    for decorate in (todist.parallelize, todist.parallelize_async):
        made = decorate(todist.batch_partitioner, todist.mean_reducer)(half_square)(todist.replicated(w), X)
        value = made.wait() if decorate is todist.parallelize_async else made
        same(value, half_square(w, X))
        same(torch.autograd.grad(value, w), torch.autograd.grad(half_square(w, X), w))
    assert [rank for rank, _ in todist.parallelize(todist.batch_partitioner)(where)(X)] == [0, 1]
    assert [rank for rank, _ in todist.parallelize()(where)(X)] == [0, 1]  # the default


@calls("map", "remote_call", "remote_sync_call", "remote_async_call")
def functions_on_workers() -> None:
    assert todist.map(where, ["a", "b", "c"]) in (
        [(0, "a"), (0, "b"), (1, "c")],
        [(0, "a"), (1, "b"), (1, "c")],
    )
    assert todist.remote_call(where, 1, "x") == (1, "x")
    assert todist.remote_sync_call(where, args=("x",), partitioner=1) == [(1, "x")]
    assert todist.remote_async_call(where, args=("x",), partitioner="worker1").wait() == [(1, "x")]


@calls("dim_partitioner", "tasks", "distributed.TensorDimensionPartitioner", "replicated")
@calls("typing.Partition", "typing.PartitionFunction", "typing.Partitioner")
def parts_of_arguments() -> None:
    shapes = [x.shape for _, x in todist.parallelize(todist.dim_partitioner(1))(where)(X)]
    assert shapes == [(6, 1), (6, 1)]
    assert isinstance(todist.dim_partitioner(1), todist.distributed.TensorDimensionPartitioner)
    each = todist.parallelize(todist.tasks)(where)(X)
    assert [x.tolist() for _, x in each] == X.tolist()
    whole = todist.parallelize(todist.batch_partitioner)(lambda x, y: (x.shape, y.shape))(
        X, todist.replicated(X)
    )
    assert whole == [((3, 2), (6, 2))] * 2

    def mine(x: Tensor) -> list[todist.typing.Partition]:
        return [todist.typing.Partition(1, (x[:1],), {}), todist.typing.Partition(0, (x[1:],), {})]

    assert [(rank, x.shape[0]) for rank, x in todist.parallelize(mine)(where)(X)] == [(1, 1), (0, 5)]


@calls("Balance")
def faster_workers_get_more() -> None:
    balance = todist.Balance({0: 1.0, 1: 2.0})
    assert [rank for rank, _ in todist.map(where, range(6), balance=balance)] == [0, 0, 0, 0, 1, 1]


@calls("sum_reducer", "stack_reducer", "concatenate_reducer")
def reduced() -> None:
    def part(x: Tensor) -> dict[str, Tensor]:
        return {"rows": x, "sum": x.sum()}

    def reduce(reducer: Any, x: Tensor = X) -> Any:
        return todist.parallelize(todist.batch_partitioner, reducer)(part)(x)

    same(reduce(todist.sum_reducer), {"rows": X[:3] + X[3:], "sum": X.sum()})
    same(reduce(todist.stack_reducer)["rows"], torch.stack([X[:3], X[3:]]))
    rows = todist.parallelize(todist.batch_partitioner, todist.concatenate_reducer)(lambda x: x)(X[:5])
    same(rows, X[:5])


@calls("put", "typing.Resident", "typing.Reference", "typing.Shards")
def kept_on_workers() -> None:
    handle = todist.put(X)
    assert isinstance(handle, todist.typing.Resident)
    for _ in range(2):
        same(todist.remote_call(torch.sum, 1, handle), X.sum())
    parts = todist.put(X, todist.batch_partitioner)
    assert isinstance(parts, todist.typing.Shards)
    w = weights()
    reference = todist.put(w)
    assert isinstance(reference, todist.typing.Reference)

    @todist.parallelize(todist.batch_partitioner, todist.mean_reducer)
    def loss(held: Any, x: Tensor) -> Tensor:
        return half_square(held.to_here(), x)

    value = loss(reference, parts)
    same(value, half_square(w, X))
    same(torch.autograd.grad(value, w), torch.autograd.grad(half_square(w, X), w))


@calls("mirror", "typing.MirroredModule")
def a_model_of_all_workers() -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    torch.manual_seed(0)
    net, twin = (nn.Linear(2, 1).double() for _ in range(2))
    twin.load_state_dict(net.state_dict())
    model = todist.mirror(net, torch.optim.SGD(net.parameters(), lr=0.001))
    assert isinstance(model, todist.typing.MirroredModule)
    spread = todist.parallelize(todist.batch_partitioner, todist.mean_reducer)(loss)
    spread(model, X).backward()
    model.step()
    loss(twin, X).backward()
    torch.optim.SGD(twin.parameters(), lr=0.001).step()
    same(list(net.parameters()), list(twin.parameters()))
    same(todist.remote_call(loss, 1, model, X), loss(twin, X))


@calls("profile", "typing.Profile", "status", "typing.Status", "typing.WorkerStatus")
def what_workers_do() -> None:
    with todist.profile() as profile:
        todist.remote_call(where, 1)
    assert isinstance(profile, todist.typing.Profile)
    assert {span.worker for span in profile.spans} == {0, 1}
    assert "worker1" in str(profile)
    status = todist.status()
    assert isinstance(status, todist.typing.Status)
    assert [isinstance(each, todist.typing.WorkerStatus) for each in status] == [True, True]
    assert len(str(status).splitlines()) >= 3
    assert [each.tasks for each in status] == [(), ()]


@calls("backward", "context", "get_gradients", "grad", "is_available", "DistAutogradContext")
def distributed_autograd() -> None:
    w = weights()
    spread = todist.parallelize(todist.batch_partitioner, todist.mean_reducer)(half_square)
    expected = torch.autograd.grad(half_square(w, X), w)
    assert todist.autograd.is_available() == torch.distributed.autograd.is_available()
    assert todist.autograd.DistAutogradContext is torch.distributed.autograd.DistAutogradContext
    with todist.autograd.context() as context:
        same(todist.autograd.grad(context, spread(todist.replicated(w), X), w), expected)
        assert w.grad is None
        todist.autograd.backward(context, spread(todist.replicated(w), X))
        same(todist.autograd.get_gradients(context)[w], expected[0])
    same(w.grad, expected[0])


@tools("tree_as_rref", "tree_to_here", "tree_wait")
def trees_of_references() -> None:
    tree = {"a": X, "b": [X.sum()]}
    same(pytree.tree_to_here(pytree.tree_as_rref(tree)), tree)
    futures = {"a": todist.remote_async_call(where, args=("x",), partitioner=1)}
    assert pytree.tree_wait(futures) == {"a": [(1, "x")]}


@worlds("auto_init_rpc", "alive", "get_rank", "get_world_size", "get_local_rank", "get_local_world_size")
@worlds("get_worker_id", "get_world_info", "typing.WorldInfo")
def places() -> None:
    def place() -> tuple[Any, ...]:
        info = todist.get_world_info()
        assert isinstance(info, todist.typing.WorldInfo)
        assert info.rank == todist.get_rank() == todist.get_worker_id() == int(os.environ["RANK"])
        return (
            todist.get_rank(),
            todist.get_world_size(),
            todist.get_local_rank(),
            todist.get_local_world_size(),
        )

    assert [todist.remote_call(place, rank) for rank in range(2)] == [(0, 2, 0, 2), (1, 2, 1, 2)]
    assert todist.alive() == (0, 1)
    assert todist.get_worker_id("worker1") == 1


@worlds("on_rank", "not_on_rank", "rank_zero_only", "rank_non_zero_only")
def on_some_ranks_only() -> None:
    def ran() -> list[Any]:
        decorators = (
            todist.on_rank(1),
            todist.not_on_rank(1),
            todist.rank_zero_only,
            todist.rank_non_zero_only,
        )
        return [decorate(lambda: "ran")() for decorate in decorators]

    assert todist.remote_call(ran, 0) == [None, "ran", "ran", None]
    assert todist.remote_call(ran, 1) == ["ran", None, None, "ran"]


@worlds("log_to_rank_zero")
def logged_here() -> None:
    def say() -> None:
        todist.log_to_rank_zero(logger="promises")
        logging.getLogger("promises").warning("from afar")

    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logger = logging.getLogger("promises")
    logger.addHandler(Handler())
    todist.remote_call(say, 1)
    while not seen:  # the record is on its way
        todist.remote_call(where, 1)
    assert "from afar" in seen[0]


@worlds("add_launcher_args", "on_ranks", "TerminalHandler", "world_variables", "Launcher")
def what_launchers_are_made_of() -> None:
    parser = argparse.ArgumentParser()
    launching.add_launcher_args(parser)
    (group,) = [
        group
        for group in parser._action_groups
        if any("--rpc" in a.option_strings for a in group._group_actions)
    ]
    assert {"--hosts", "--nproc-per-host"} <= {
        name for action in group._group_actions for name in action.option_strings
    }
    chosen = todist.Launcher.from_args(parser.parse_args(["--nproc-per-host", "3"]))
    assert chosen.nproc_per_host == 3

    variables = launching.world_variables(1, 4, address="node1", port=29500, local_rank=1, local_size=2)
    torchrun_s = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert torchrun_s.items() <= variables.items()

    record = logging.makeLogRecord({"msg": "a line", "rank": 3, "stream": "stdout"})
    with redirect_stdout(io.StringIO()) as out:
        launching.TerminalHandler().handle(record)
        launching.on_ranks(launching.TerminalHandler(), ranks=[1]).handle(record)
    assert out.getvalue() == "[rank 3] a line\n"
