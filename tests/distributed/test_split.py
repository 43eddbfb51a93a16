"""``split=[...]``: these arguments are split, all others go whole to every worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.distributed._split import split_only
from torchopt_dist.distributed.partition import partition


def weighted(
    model: nn.Module, x: Tensor, weights: Tensor, /, y: Tensor, *more: Any, scale: Tensor, **rest: Any
) -> Tensor:
    loss = (weights * scale * (model(x).squeeze(1) - y) ** 2).sum() + sum(each.sum() for each in more)
    for each in rest.values():
        loss = loss + each.sum()
    return loss


@pytest.mark.usefixtures("workers")
def test_only_the_named_arguments_are_split() -> None:
    x, other, labels = torch.arange(6.0).reshape(6, 1), torch.arange(6.0), [1, 2, 3, 4, 5, 6]
    model = nn.Linear(1, 1)
    inside = {"a": todist.replicated(other), "b": other}
    splitting = split_only(weighted, ["x", "y", "extra"], None)
    parts = partition(
        splitting, (model, x, inside, other, labels), {"scale": other, "extra": other, "kept": other}
    )
    assert [part.size for part in parts] == [2, 2, 2]
    for rank, (_, args, kwargs) in enumerate(parts):
        assert args[0] is model
        assert torch.equal(args[1], x[2 * rank : 2 * rank + 2])
        assert args[2]["a"] is args[2]["b"] is other
        assert torch.equal(args[3], other[2 * rank : 2 * rank + 2])
        assert args[4] is labels
        assert kwargs["scale"] is kwargs["kept"] is other
        assert torch.equal(kwargs["extra"], other[2 * rank : 2 * rank + 2])
    by_task = split_only(weighted, ["more"], todist.tasks)
    parts = partition(by_task, (model, x, x, x, other, other), {"scale": x})
    assert [part.args[4:] for part in parts] == [(each, each) for each in other]
    assert all(part.args[1] is x for part in parts)


def test_values_and_gradients_are_those_of_one_process(world: Any) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(2, 1).double()
        x, y = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
        scale = torch.rand(4, dtype=torch.float64, requires_grad=True)  # of the batch's length, and shared

        def loss(model: nn.Module, x: Tensor, scale: Tensor, y: Tensor) -> Tensor:
            made: Tensor = (scale.sum() * (model(x).squeeze(1) - y) ** 2).mean()
            return made

        spread = todist.parallelize(reducer=todist.mean_reducer, split=["x", "y"])(loss)
        in_call = todist.remote_sync_call(
            loss,
            args=(model, x),
            kwargs={"y": y, "scale": scale},
            reducer=todist.mean_reducer,
            split=("y", "x"),
        )
        wanted = loss(model, x, scale, y)
        leaves = [*model.parameters(), scale]
        gradients = torch.autograd.grad(wanted, leaves)
        for found in (spread(model, x, y=y, scale=scale), in_call):
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(torch.autograd.grad(found, leaves), gradients)
        balance = todist.Balance()
        uneven = todist.parallelize(
            todist.dim_partitioner(0, balance=balance), todist.mean_reducer, split=["x", "y"]
        )(loss)
        uneven(model, x, scale, y)
        assert balance.seconds
        net = todist.parallelize(todist.tasks, split=["input"])(nn.Linear(2, 1).double())
        assert len(net(x)) == 4

    world(2).on_zero(body)


MISTAKES = [
    (
        ["z"],
        None,
        ValueError,
        "`split` must hold names of the function's arguments, got 'z'; they are model, xs, y",
    ),
    (["x"], None, ValueError, "got 'x': did you mean `xs`?"),
    ("x", None, TypeError, r"`split` must be a list of names of arguments, got 'x': write \['x'\]"),
    ([], None, ValueError, "`split` must name at least one argument, got none"),
    ([1], None, TypeError, "`split` must hold names of arguments, got int 1"),
    (["y"], 0, TypeError, "`split` needs a partitioner that splits, such as todist.tasks, got the worker 0"),
]


@each_row(("split", "partitioner", "kind", "told"), MISTAKES)
def test_wrong_names_are_refused_where_the_function_is_decorated(
    split: Any, partitioner: Any, kind: type[Exception], told: str
) -> None:
    def loss(model: Any, xs: Any, y: Any) -> Any:
        return xs

    with pytest.raises(kind, match=told):
        todist.parallelize(partitioner, split=split)(loss)
    with pytest.raises(kind, match=told):
        todist.auto_init_rpc()(todist.remote_sync_call)(
            loss, args=(1, 2, 3), partitioner=partitioner, split=split
        )


def test_a_function_without_names_and_a_map_are_refused() -> None:
    with pytest.raises(
        TypeError, match="`split` needs a function whose arguments have names, got <class 'int'>"
    ):
        todist.parallelize(split=["x"])(int)
    with pytest.raises(TypeError, match="map got an unexpected keyword argument 'split'"):
        todist.map(len, [[1]], split=["x"])
