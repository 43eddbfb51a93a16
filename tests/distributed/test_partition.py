"""A rank, a name, or a function of one's own → partitions, each checked before anything is sent."""

from __future__ import annotations

import copy
import pickle

import cloudpickle
import numpy as np
import pytest
import torch

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.distributed.partition import partition, unwrap

pytestmark = pytest.mark.usefixtures("workers")


def test_a_partition_is_a_triplet():
    part = todist.typing.Partition("worker1", (1,), {"a": 2}, size=7)
    worker, args, kwargs = part
    assert (worker, args, kwargs) == part == ("worker1", (1,), {"a": 2})
    assert isinstance(part, tuple)
    assert len(part) == 3
    assert (part.worker, part.args, part.kwargs, part.size) == ("worker1", (1,), {"a": 2}, 7)
    assert todist.typing.Partition(0, None, None) == (0, (), {})
    assert todist.typing.Partition(0, None, None).size == 1


@each_row("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_partition_keeps_its_size_when_copied(protocol):
    part = todist.typing.Partition(1, (1,), {"a": 2}, 7)
    for other in (
        pickle.loads(pickle.dumps(part, protocol)),
        cloudpickle.loads(cloudpickle.dumps(part)),
        copy.copy(part),
        copy.deepcopy(part),
    ):
        assert other == part
        assert (type(other), other.size) == (todist.typing.Partition, 7)


def test_marks_come_off_wherever_they_are():
    x, y = torch.arange(3), torch.arange(2)
    assert unwrap(({"a": [todist.replicated(x)]}, todist.replicated((y, y)))) == ({"a": [x]}, (y, y))
    tree = {"a": [x], "b": None}
    assert unwrap(tree) is tree
    (part,) = partition(1, (todist.replicated(x),), {"k": todist.replicated(y)})
    assert part.args[0] is x
    assert part.kwargs["k"] is y


def test_a_worker_alone_gets_all():
    args, kwargs = (torch.arange(3), 1), {"a": None}
    for worker in (2, "worker2", np.int64(2)):
        (part,) = partition(worker, args, kwargs)
        assert part.worker == 2
        assert type(part.worker) is int
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
            todist.typing.Partition("worker1", (x,), None, size=9),
            (np.int64(1), (x,), {}),
        ]

    parts = partition(own, ("x",), {"y": "y"})
    assert parts == [
        (2, ("x",), {"y": "y"}),
        (0, ("x",), {}),
        (1, (), {}),
        (1, ("x",), {}),
        (1, ("x",), {}),
    ]
    assert [part.size for part in parts] == [1, 1, 1, 9, 1]
    assert [type(part.args) for part in parts] == [tuple] * 5


@each_row("bad", [1.5, True, np.True_, [0], ("worker0", 1), {"worker0": 1}])
def test_what_is_no_partitioner_is_told(bad):
    with pytest.raises(TypeError, match=f"partitioner must be .* got {type(bad).__name__}"):
        partition(bad, (torch.ones(3),), {})


def answer(value):
    def own(x):
        return value

    return own


@each_row(
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
