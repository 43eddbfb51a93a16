from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections import OrderedDict
from itertools import pairwise
from typing import Any, NamedTuple

import cloudpickle
import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchopt_dist as todist
from torchopt_dist.distributed.partition import even_share, partition, unwrap
from torchopt_dist.distributed.world import roster

pytestmark = pytest.mark.timeout(30)


class Pair(NamedTuple):
    x: Any
    y: Any


@optree.dataclasses.dataclass(namespace="")
class Batch:
    images: torch.Tensor
    labels: torch.Tensor
    name: str = optree.dataclasses.field(default="train", pytree_node=False)


@pytest.fixture(autouse=True)
def workers(monkeypatch):
    """``workers(n)`` makes a group of n; three at first."""

    def make(size):
        monkeypatch.setattr(roster, "names", tuple(f"worker{rank}" for rank in range(size)))

    make(3)
    return make


def split(partitioner, *args, **kwargs):
    """``[(worker, args, kwargs)]`` with lists in the tensors' places."""

    def plain(leaf):
        return leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf

    return [
        (part.worker, *optree.tree_map(plain, (part.args, part.kwargs), none_is_leaf=True))
        for part in partitioner(*args, **kwargs)
    ]


# Even shares.


@pytest.mark.parametrize(
    ("size", "workers_", "sizes"),
    [
        (15, 8, [2, 2, 2, 2, 2, 2, 2, 1]),
        (15, 4, [4, 4, 4, 3]),
        (7, 4, [2, 2, 2, 1]),
        (8, 4, [2, 2, 2, 2]),
        (3, 4, [1, 1, 1]),
        (1, 4, [1]),
        (5, 1, [5]),
        (100, 3, [34, 33, 33]),
    ],
)
def test_shares_are_even(workers, size, workers_, sizes):
    workers(workers_)
    parts = todist.batch_partitioner(torch.arange(size))
    assert [part.size for part in parts] == sizes
    assert [len(part.args[0]) for part in parts] == sizes
    assert [part.worker for part in parts] == list(range(len(sizes)))
    assert torch.equal(torch.cat([part.args[0] for part in parts]), torch.arange(size))


@given(size=st.integers(1, 500), parts=st.integers(1, 64))
def test_shares_cover_all_in_order_and_differ_by_one_at_most(size, parts):
    ranges = [even_share(size, parts, index) for index in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 40),
    workers_=st.integers(1, 9),
    ndim=st.integers(1, 3),
    dim=st.integers(-3, 2),
    exclusive=st.booleans(),
    keepdim=st.booleans(),
)
def test_nothing_is_lost_doubled_or_moved(size, workers_, ndim, dim, exclusive, keepdim):
    dim = max(-ndim, min(dim, ndim - 1))
    shape = [2] * ndim
    shape[dim] = size
    tensor = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    names, roster.names = roster.names, tuple(map(str, range(workers_)))
    try:
        parts = todist.dim_partitioner(dim, exclusive=exclusive, keepdim=keepdim)(tensor)
    finally:
        roster.names = names
    tensors = [part.args[0] for part in parts]
    together = torch.stack(tensors, dim) if exclusive and not keepdim else torch.cat(tensors, dim)
    assert torch.equal(together, tensor)
    assert sum(part.size for part in parts) == size
    sizes = [part.size for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == (size if exclusive else min(size, workers_))
    tasks = [sum(part.worker == rank for part in parts) for rank in range(workers_)]
    assert max(tasks) - min(tasks) <= 1  # tasks are spread as evenly as samples
    assert [part.worker for part in parts] == sorted(part.worker for part in parts)


# Dimensions and tasks.


@pytest.mark.parametrize(
    ("partitioner", "shapes"),
    [
        (todist.batch_partitioner, [(2, 3, 5), (2, 3, 5), (1, 3, 5)]),
        (todist.exclusive_batch_partitioner, [(1, 3, 5)] * 5),
        (todist.dim_partitioner(), [(2, 3, 5), (2, 3, 5), (1, 3, 5)]),
        (todist.dim_partitioner(1), [(5, 1, 5)] * 3),
        (todist.dim_partitioner(-1), [(5, 3, 2), (5, 3, 2), (5, 3, 1)]),
        (todist.dim_partitioner(-3), [(2, 3, 5), (2, 3, 5), (1, 3, 5)]),
        (todist.dim_partitioner(0, keepdim=False), [(2, 3, 5), (2, 3, 5), (1, 3, 5)]),
        (todist.dim_partitioner(0, exclusive=True, keepdim=False), [(3, 5)] * 5),
        (todist.dim_partitioner(-2, exclusive=True, keepdim=False), [(5, 5)] * 3),
        (todist.dim_partitioner(-2, exclusive=True), [(5, 1, 5)] * 3),
        (todist.TensorDimensionPartitioner(0, exclusive=True), [(3, 5)] * 5),
        (todist.TensorDimensionPartitioner(0), [(2, 3, 5), (2, 3, 5), (1, 3, 5)]),
    ],
)
def test_shapes_of_the_parts(partitioner, shapes):
    parts = partitioner(torch.zeros(5, 3, 5))
    assert [tuple(part.args[0].shape) for part in parts] == shapes


def test_exclusive_tasks_are_spread_in_blocks():
    parts = todist.exclusive_batch_partitioner(torch.arange(7))
    assert [part.worker for part in parts] == [0, 0, 0, 1, 1, 2, 2]
    assert [part.size for part in parts] == [1] * 7


@pytest.mark.parametrize("chosen", [[2, 0], ("worker2", "worker0"), ["worker2", 0]])
def test_the_workers_can_be_chosen_and_ordered(chosen):
    parts = split(todist.dim_partitioner(0, workers=chosen), torch.arange(3))
    assert parts == [(2, ([0, 1],), {}), (0, ([2],), {})]


def test_the_workers_are_looked_up_at_the_call(workers):
    partitioner = todist.dim_partitioner(0, workers=["worker4"])
    with pytest.raises(ValueError, match="no worker is named 'worker4'"):
        partitioner(torch.arange(3))
    workers(5)
    assert [part.worker for part in partitioner(torch.arange(3))] == [4]
    assert len(todist.batch_partitioner(torch.arange(9))) == 5


# What is split, and what is not.


def test_trees_are_split_leaf_by_leaf(workers):
    workers(2)
    x, y = torch.arange(4), torch.arange(4) + 10
    tree = {"pair": Pair(x, y), "list": [x, (y, None)], "ordered": OrderedDict(b=x, a="text")}
    assert split(todist.batch_partitioner, tree, 5, z=(y,), flag=True) == [
        (
            rank,
            (
                {
                    "pair": Pair(a, b),
                    "list": [a, (b, None)],
                    "ordered": OrderedDict(b=a, a="text"),
                },
                5,
            ),
            {"z": (b,), "flag": True},
        )
        for rank, a, b in ((0, [0, 1], [10, 11]), (1, [2, 3], [12, 13]))
    ]


def test_a_registered_dataclass_is_split(workers):
    workers(2)
    parts = todist.batch_partitioner(Batch(torch.arange(4), torch.arange(4) * 2, "test"))
    batches = [part.args[0] for part in parts]
    assert [type(batch) for batch in batches] == [Batch] * 2
    assert [batch.images.tolist() for batch in batches] == [[0, 1], [2, 3]]
    assert [batch.labels.tolist() for batch in batches] == [[0, 2], [4, 6]]
    assert [batch.name for batch in batches] == ["test"] * 2


def test_an_unregistered_object_is_whole():
    @dataclasses.dataclass
    class Settings:
        tensor: torch.Tensor

    settings_ = Settings(torch.arange(100))
    parts = todist.batch_partitioner(settings_, torch.arange(3))
    assert all(part.args[0] is settings_ for part in parts)


def test_modules_parameters_scalars_and_marked_tensors_are_whole():
    model = nn.Linear(3, 3)
    parameter = nn.Parameter(torch.zeros(3))
    scalar = torch.tensor(2.0)
    weights = torch.arange(3.0)
    whole = (model, parameter, scalar, {"parameters": list(model.parameters())}, "text", None, 3)
    parts = todist.batch_partitioner(
        *whole, todist.replicated(weights), torch.arange(3.0), tree=todist.replicated({"w": weights})
    )
    assert len(parts) == 3
    for rank, part in enumerate(parts):
        for given_, got in zip(whole, part.args[: len(whole)], strict=True):
            assert optree.tree_all(optree.tree_map(lambda a, b: a is b, given_, got, none_is_leaf=True))
        assert part.args[-1].tolist() == [rank]
    # The marks come off on the way.
    for part in partition(todist.batch_partitioner, (todist.replicated(weights), torch.arange(3.0)), {}):
        assert part.args[0] is weights


def test_marks_come_off_wherever_they_are():
    x, y = torch.arange(3), torch.arange(2)
    assert unwrap(({"a": [todist.replicated(x)]}, todist.replicated((y, y)))) == ({"a": [x]}, (y, y))
    tree = {"a": [x], "b": None}
    assert unwrap(tree) is tree
    (part,) = partition(1, (todist.replicated(x),), {"k": todist.replicated(y)})
    assert part.args[0] is x
    assert part.kwargs["k"] is y


def test_a_subclass_of_module_with_a_call_is_whole():
    class Loss(nn.Module):
        pass

    loss = Loss()
    assert all(part.args[0] is loss for part in todist.batch_partitioner(loss, torch.arange(3)))


def test_parts_share_the_tensor_and_its_graph():
    x = torch.arange(6.0, requires_grad=True)
    parts = todist.batch_partitioner(x)
    assert parts[0].args[0].data_ptr() == x.data_ptr()
    sum((rank + 1) * part.args[0].sum() for rank, part in enumerate(parts)).backward()
    assert x.grad.tolist() == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("partitioner", "args", "told"),
    [
        (todist.batch_partitioner, (), ["no tensor to split"]),
        (todist.batch_partitioner, (1, "a", None), ["no tensor to split"]),
        (
            todist.batch_partitioner,
            (nn.Linear(2, 2), torch.tensor(1.0)),
            ["no tensor to split", "partitioner="],
        ),
        (todist.batch_partitioner, (todist.replicated(torch.ones(3)),), ["no tensor to split"]),
        (todist.batch_partitioner, (torch.ones(0, 3),), ["empty batch", "args[0]", "size 0", "dim=0"]),
        (todist.exclusive_batch_partitioner, (torch.ones(0, 3),), ["empty batch", "args[0]"]),
        (
            todist.batch_partitioner,
            (torch.ones(3), {"x": torch.ones(4)}),
            ["one size along dim=0", "args[0] has 3", "args[1]['x'] has 4", "todist.replicated"],
        ),
        (
            todist.dim_partitioner(1),
            (torch.ones(3, 2), torch.ones(3)),
            ["args[1]", "dim=1", "(3,)", "todist.replicated"],
        ),
        (todist.dim_partitioner(-2), (torch.ones(3),), ["args[0]", "dim=-2", "(3,)"]),
        (todist.dim_partitioner(0, workers=["nobody"]), (torch.ones(3),), ["'nobody'", "worker0, worker1"]),
        (todist.dim_partitioner(0, workers=[0, 3]), (torch.ones(3),), ["[0, 3)", "got 3"]),
    ],
)
def test_arguments_that_cannot_be_split_are_named(partitioner, args, told):
    with pytest.raises(ValueError, match=re.escape(told[0])) as caught:
        partitioner(*args)
    for words in told:
        assert words in str(caught.value)


def test_a_keyword_argument_is_named():
    with pytest.raises(ValueError, match=r"args\[0\] has 3, .*kwargs\['y'\]\[1\] has 2"):
        todist.batch_partitioner(torch.ones(3), y=[torch.ones(3), torch.ones(2)])


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        (TypeError, {"dim": 1.0}, "dim must be an integer, got float 1.0"),
        (TypeError, {"dim": "0"}, "dim must be an integer, got str '0'"),
        (TypeError, {"dim": True}, "dim must be an integer, got bool True"),
        (TypeError, {"dim": 0, "workers": "worker0"}, "sequence of ranks and names, got 'worker0'"),
        (TypeError, {"dim": 0, "workers": 2}, "sequence of ranks and names, got 2"),
        (TypeError, {"dim": 0, "workers": {0, 1}}, "sequence of ranks and names"),
        (ValueError, {"dim": 0, "workers": []}, "at least one worker"),
    ],
)
def test_bad_settings_are_told_when_the_partitioner_is_made(kind, options, told):
    dim = options.pop("dim")
    for make in (todist.dim_partitioner, todist.TensorDimensionPartitioner):
        with pytest.raises(kind, match=told):
            make(dim, **options)


# Copies.


@pytest.mark.parametrize(
    "copied",
    [
        lambda p: pickle.loads(pickle.dumps(p)),
        lambda p: cloudpickle.loads(cloudpickle.dumps(p)),
        copy.deepcopy,
        copy.copy,
    ],
    ids=["pickle", "cloudpickle", "deepcopy", "copy"],
)
@pytest.mark.parametrize(
    "partitioner",
    [
        todist.batch_partitioner,
        todist.exclusive_batch_partitioner,
        todist.dim_partitioner(-1, workers=["worker1", 0]),
        todist.TensorDimensionPartitioner(1, exclusive=True),
    ],
)
def test_partitioners_can_be_copied(copied, partitioner):
    other = copied(partitioner)
    assert split(other, torch.arange(8).reshape(4, 2)) == split(partitioner, torch.arange(8).reshape(4, 2))
    assert repr(other) == repr(partitioner)


def test_a_partitioner_shows_its_settings():
    assert (
        repr(todist.dim_partitioner(1, exclusive=True, keepdim=False, workers=["a"]))
        == "TensorDimensionPartitioner(1, exclusive=True, keepdim=False, workers=['a'])"
    )


# Partitions.


def test_a_partition_is_a_triplet():
    part = todist.Partition("worker1", (1,), {"a": 2}, size=7)
    worker, args, kwargs = part
    assert (worker, args, kwargs) == part == ("worker1", (1,), {"a": 2})
    assert isinstance(part, tuple)
    assert len(part) == 3
    assert (part.worker, part.args, part.kwargs, part.size) == ("worker1", (1,), {"a": 2}, 7)
    assert todist.Partition(0, None, None) == (0, (), {})
    assert todist.Partition(0, None, None).size == 1


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_partition_keeps_its_size_when_copied(protocol):
    part = todist.Partition(1, (1,), {"a": 2}, 7)
    for other in (
        pickle.loads(pickle.dumps(part, protocol)),
        cloudpickle.loads(cloudpickle.dumps(part)),
        copy.copy(part),
        copy.deepcopy(part),
    ):
        assert other == part
        assert (type(other), other.size) == (todist.Partition, 7)


# Partitioners of one's own.


def test_a_worker_alone_gets_all():
    args, kwargs = (torch.arange(3), 1), {"a": None}
    for worker in (2, "worker2"):
        (part,) = partition(worker, args, kwargs)
        assert part.worker == 2
        assert part.args is args
        assert part.kwargs is kwargs
        assert part.size == 1


def test_without_a_partitioner_the_batch_is_split():
    assert [part.size for part in partition(None, (torch.arange(7),), {})] == [3, 2, 2]


def test_a_function_may_return_triplets_of_any_kind():
    def own(x, *, y):
        return [
            ("worker2", (x,), {"y": y}),
            (0, [x], None),
            (1, None, {}),
            todist.Partition("worker1", (x,), None, size=9),
        ]

    parts = partition(own, ("x",), {"y": "y"})
    assert parts == [(2, ("x",), {"y": "y"}), (0, ("x",), {}), (1, (), {}), (1, ("x",), {})]
    assert [part.size for part in parts] == [1, 1, 1, 9]
    assert [type(part.args) for part in parts] == [tuple] * 4


@pytest.mark.parametrize("bad", [1.5, True, [0], ("worker0", 1), {"worker0": 1}])
def test_what_is_no_partitioner_is_told(bad):
    with pytest.raises(TypeError, match=f"partitioner must be .* got {type(bad).__name__}"):
        partition(bad, (torch.ones(3),), {})


def answer(value):
    def own(x):
        return value

    return own


@pytest.mark.parametrize(
    ("value", "kind", "told"),
    [
        (None, TypeError, ["must return a list of triplets", "got NoneType"]),
        (3, TypeError, ["must return a list of triplets", "got int"]),
        ("worker0", TypeError, ["must return a list of triplets", "got str"]),
        ((0, (), {}), TypeError, ["must return a list of triplets", "got tuple"]),
        ({0: ()}, TypeError, ["must return a list of triplets", "got dict"]),
        (iter([]), TypeError, ["must return a list of triplets", "iterator"]),
        ([], ValueError, ["returned no triplet"]),
        ([(0, (), {}), 5], TypeError, ["item 1", "tuple of three", "int 5"]),
        ([(0, ())], TypeError, ["item 0", "tuple of three", "tuple (0, ())"]),
        ([(0, (), {}, 1)], TypeError, ["item 0", "tuple of three"]),
        ([[0, (), {}]], TypeError, ["item 0", "tuple of three", "list"]),
        ([(None, (), {})], TypeError, ["item 0", "rank or a name", "None"]),
        ([(1.0, (), {})], TypeError, ["item 0", "name or its rank", "float 1.0"]),
        ([(True, (), {})], TypeError, ["item 0", "bool True"]),
        ([(0, (), {}), (3, (), {})], ValueError, ["item 1", "[0, 3)", "got 3"]),
        ([(-1, (), {})], ValueError, ["item 0", "got -1"]),
        ([("nobody", (), {})], ValueError, ["item 0", "no worker is named 'nobody'"]),
        ([(0, 5, {})], TypeError, ["item 0", "args must be a tuple", "int 5"]),
        ([(0, torch.ones(2), {})], TypeError, ["item 0", "args must be a tuple", "Tensor"]),
        ([(0, "ab", {})], TypeError, ["item 0", "args must be a tuple", "str 'ab'"]),
        ([(0, (), [1])], TypeError, ["item 0", "kwargs must be a dictionary", "list [1]"]),
    ],
)
def test_a_partitioner_that_returns_something_else_is_told(value, kind, told):
    with pytest.raises(kind) as caught:
        partition(answer(value), ("x",), {})
    for words in ["`answer.<locals>.own`", *told]:
        assert words in str(caught.value)


def test_a_partitioner_s_own_error_is_its_own():
    def own(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        partition(own, ("x",), {})


def test_bad_partitions_are_errors_of_the_caller_before_anything_runs(world):
    def main():
        ran = []

        def own(x):
            return [(0, (x,), {}), ("nobody", (x,), {})]

        with pytest.raises(ValueError, match=r"item 1: no worker is named 'nobody'"):
            todist.remote_sync_call(ran.append, args=(1,), partitioner=own)
        with pytest.raises(ValueError, match="empty batch"):
            todist.remote_sync_call(ran.append, args=(torch.ones(0),))
        return ran

    assert world(2).on_zero(main) == []
